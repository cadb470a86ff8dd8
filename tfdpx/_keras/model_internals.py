"""Private names of Keras's models and optimizers: compile, build, loss, epochs."""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, names, step_context

# The base is `Any`, because type checkers do not see Keras's methods in a mixin.
_Mixin: Any = object

# Functions that `hook` wraps: pairs of a module and a name in it.
LOSS_SCALINGS = (
    names.find("scale_loss_for_distribution"),
    names.find("unscale_loss_for_distribution"),
)
LABELLED_LOSS = names.find("sparse_categorical_crossentropy")
APPLYING = (
    next(base for base in keras.optimizers.Optimizer.__mro__ if "apply" in vars(base)),
    "apply",
)

Functional = names.get("Functional")
_compute_output_spec = names.get("compute_output_spec")
_unpack_singleton = names.get("unpack_singleton")

# Keras's class for losses that wrap a function. `compile` also wraps a user's function in it.
FUNCTION_LOSS = keras.losses.MeanSquaredError.__base__
# Element-wise operations on two operands.
ARITHMETIC = tuple(map(names.get, ("Add", "Subtract", "Multiply", "Divide")))
# Operations that make masks.
NOT_EQUAL, ANY = names.get("NotEqual"), names.get("Any")


def compile_owner():
    """Returns the class that defines `keras.Model.compile`: `keras.Model` or an ancestor."""
    return next(base for base in keras.Model.__mro__ if "compile" in vars(base))


def innermost(optimizer):
    """Returns the optimizer inside of all wrappers, for example inside a `LossScaleOptimizer`."""
    while isinstance(getattr(optimizer, "inner_optimizer", None), keras.optimizers.Optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def compile_arguments(model):
    """Returns a dict of the arguments of `compile`: the original objects, not copies."""
    return dict(model._compile_config.config)


def own_training_methods(model):
    """Returns the names of methods of Keras's training step that the user has replaced.

    Args:
        model: A `keras.Model`; its class and the instance are checked.
    """
    names = ("train_step", "make_train_function")
    methods = [
        name
        for name in names
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    # Keras itself sets `train_function`. Only a function of another module is the user's.
    function = getattr(model, "train_function", None)
    function = getattr(function, "python_function", function)
    if function is not None and function.__module__ != keras.Model.make_train_function.__module__:
        methods.append("train_function")
    return methods


def compilation(model):
    """Returns an object that stays the same until the next `model.compile` replaces it."""
    return model._loss_tracker


def output_loss_trackers(model):
    """Returns a list of the metrics that average each output's loss; [] if there is one output."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def own_trackers(model):
    """Returns a list of the `Mean` metrics that a model's overridden `compute_loss` may update."""
    compiled = {id(metric) for metric in (model._loss_tracker, model._compile_metrics)}
    compiled.update(map(id, output_loss_trackers(model)))
    means = [m for m in model.metrics if type(m) is keras.metrics.Mean and id(m) not in compiled]
    return means if has_own_loss(model) else []


def count_tracked(model):
    """Returns how many numbers a loss adds to metrics: one for each output, two for each `Mean`."""
    return len(output_loss_trackers(model)) + 2 * len(own_trackers(model))


def update_loss_tracker(model, loss, count):
    """Adds the mean `loss` of `count` examples to the metric `loss` that Keras shows."""
    model._loss_tracker.update_state(loss, sample_weight=count)


@contextlib.contextmanager
def keeping_first_epoch(model):
    """Context manager that undoes `set_initial_epoch` at its end, also after an error."""
    try:
        yield
    finally:
        model._initial_epoch = None


def initial_epoch(model):
    """Returns the epoch, an int, that `set_initial_epoch` or a callback has set, or None."""
    return model._initial_epoch


def set_initial_epoch(model, epoch):
    """Makes `fit` begin at `epoch`, as `keras.callbacks.BackupAndRestore` does; None resets it."""
    model._initial_epoch = epoch


def taken_for_uncompiled(model):
    """Context manager in which Keras copies a model without its loss.

    A copy could fail for a custom loss, which Keras cannot look up by its name.
    """
    return layer_internals.replacing([model], "compiled", False)


def plain_graph(model):
    """Returns the `Functional` graph of a model, or None without such a graph.

    Only models of exactly the class `keras.Sequential` or `Functional` count, because a subclass
    may compute something else than its graph.
    """
    graph = model._functional if type(model) is keras.Sequential else model
    return graph if type(graph) is Functional else None


def symbolic_calls(operation):
    """Returns a list of the calls of an operation on symbolic tensors, pairs (args, kwargs)."""
    return [(node.arguments.args, node.arguments.kwargs) for node in operation._inbound_nodes]


def build(model, data):
    """Creates all that Keras makes on a first batch: weights, metrics, losses, optimizer variables.

    Args:
        model: A compiled `keras.Model`.
        data: `(x, y, sample_weight)`. `x` holds dummy rows, on which a built model may run. For `y`
            and `sample_weight`, only dtypes and the shapes after the batch axis are read.
    """

    def symbolic(leaf):
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor([None, *leaf.shape[1:]], dtype)

    rows = data[0]
    data = tf.nest.map_structure(lambda t: None if t is None else symbolic(t), data)
    y_pred = None
    with step_context.recording(None), tf.init_scope():
        if _knows_its_outputs(model, data[0]):
            # A call of `Model([x], [y])` returns a tensor and not a list.
            y_pred = _unpack_singleton(model.compute_output_spec(data[0]))
        elif all(part.built for part in model._flatten_layers()):
            # The model runs on numbers: its `call` may take gradients, which symbolic tensors lack.
            y_pred = tf.nest.map_structure(symbolic, step_context.eagerly(_call_once, model, rows))
        elif has_own_loss(model):
            y_pred = _compute_output_spec(model, data[0], training=False)
        if y_pred is not None:
            _build_compiled(model, *data, y_pred)
        model._symbolic_build(data_batch=data)


def _call_once(model, rows):
    with keras.StatelessScope():
        return model(rows, training=False) if model._call_has_training_arg else model(rows)


def _knows_its_outputs(model, x):
    """Returns whether the shapes of the outputs for `x` are known without running `model`."""
    # A Sequential model contains a Functional one once its inputs are known.
    graph = getattr(model, "_functional", model)
    has_known_shapes = isinstance(graph, Functional) and all(
        part.built for part in model._flatten_layers()
    )
    has_ordinary_call = type(model).call in (Functional.call, keras.Sequential.call)
    return has_known_shapes and has_ordinary_call and isinstance(x, keras.KerasTensor)


def _build_compiled(model, x, y, sample_weight, y_pred):
    """Does the same as Keras's `_symbolic_build`, but traces neither the model nor a user's loss.

    Tracing here would take as long as tracing in the step, and a user's loss may need gradients,
    which symbolic tensors do not have.
    """
    if model._compile_metrics is not None and not model._compile_metrics.built:
        _compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    if model._compile_loss is None or model._compile_loss.built:
        return
    if has_own_loss(model):
        model._compile_loss.build(y, y_pred)
    else:
        _compute_output_spec(
            model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False
        )


def has_own_loss(model):
    """Returns whether the class of a model overrides `compute_loss`."""
    return type(model).compute_loss is not keras.Model.compute_loss


def single_loss(model):
    """Returns the loss of a model that has exactly one, unweighted loss; otherwise None.

    Args:
        model: A compiled `keras.Model` with its losses built.

    Returns:
        Triple: a loss that wraps a function (of class `FUNCTION_LOSS`), this function, and a dict
        of the function's further arguments.
    """
    losses = [] if model._compile_loss is None else list(model._compile_loss._flat_losses or [])
    if has_own_loss(model) or len(losses) != 1 or losses[0].loss_weights is not None:
        return None
    loss = losses[0].loss
    if not isinstance(loss, FUNCTION_LOSS):
        return None
    return loss, loss.fn, loss._fn_kwargs


def call_model(model, x):
    """Returns the model's output in training mode, as Keras's `train_step` computes it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model, x, y, y_pred, sample_weight):
    """Returns `model.compute_loss` in training mode, as if there were one replica.

    A user's `compute_loss` may lack the argument `training`.
    """
    with step_context.unscaled_losses():
        return model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )


class OptimizerOverrides(_Mixin):
    """A mixin that makes private methods of a Keras optimizer call public ones of a subclass.

    Among the base classes, the mixin comes before the Keras optimizer.

    Methods that a subclass defines:
        all_reduce_sums(grads_and_vars): Called in place of Keras's sum of gradients over replicas.
            The method takes and returns a list of pairs (gradient, variable).
        average_weights(pairs): Updates the moving averages. `pairs` holds pairs of a weight and its
            average. Called only with `use_ema=True`.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return self.all_reduce_sums(list(grads_and_vars))

    def _update_model_variables_moving_average(self, trainable_variables):
        if self.use_ema:
            averages = self._model_variables_moving_average
            self.average_weights(zip(trainable_variables, averages, strict=True))


def adam_moments(optimizer, variable):
    """Returns Adam's averages of a weight's gradient and its square, two `keras.Variable`s."""
    place = optimizer._get_variable_index(variable)
    return optimizer._momentums[place], optimizer._velocities[place]
