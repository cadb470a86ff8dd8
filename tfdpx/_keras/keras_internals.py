"""The only file that touches private names of Keras; those of TensorFlow: `tensorflow_internals`.

Everything here is a plain function around one of them, so that a new version of Keras is looked at
in one place. `keras_hook` puts the wrappers into Keras; while they are in, this thread's recorder
(`recording`) sees every call of every layer.
"""

import concurrent.futures
import contextlib
import io
import threading
import weakref
import zipfile

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend import compute_output_spec
from keras.src.backend.common import global_state
from keras.src.legacy.saving import legacy_h5_format
from keras.src.losses import loss as loss_module
from keras.src.metrics import confusion_metrics, iou_metrics
from keras.src.models.functional import Functional
from keras.src.saving import object_registration, saving_lib

# What `keras_hook` wraps besides public methods: pairs of a module and a name in it.
LOSS_SCALINGS = (
    (loss_module, "scale_loss_for_distribution"),
    (loss_module, "unscale_loss_for_distribution"),
)
LOOKING_UP = (object_registration, "get_registered_object")
LOADING = (saving_lib, "_load_state")
LOADING_HDF5 = (
    (legacy_h5_format, "load_weights_from_hdf5_group"),
    (legacy_h5_format, "load_weights_from_hdf5_group_by_name"),
)
LOADING_HDF5_MODEL = (legacy_h5_format, "load_model_from_hdf5")
SAVING_HDF5_MODEL = (legacy_h5_format, "save_model_to_hdf5")
DRAWS = tuple(
    (keras_backend.random, name) for name in ("normal", "uniform", "truncated_normal", "randint")
)
DROPPING = (keras_backend.random, "dropout")
LABELLED_LOSS = (keras_backend.nn, "sparse_categorical_crossentropy")

# Metrics that take a weight for each decision, not for each row.
_COUNTING_METRICS = (
    confusion_metrics._ConfusionMatrixConditionCount,
    confusion_metrics.Precision,
    confusion_metrics.Recall,
    confusion_metrics.SensitivitySpecificityBase,
    confusion_metrics.AUC,
)

_NAMES = "object_name_uids"
_active = threading.local()
_drivers = weakref.WeakKeyDictionary()
_call = keras.Operation.__call__


def compile_owner():
    """The class between `keras.Model` and its ancestors that defines `compile`."""
    return next(base for base in keras.Model.__mro__ if "compile" in vars(base))


def innermost(optimizer):
    """The optimizer inside any number of wrappers such as `LossScaleOptimizer`."""
    while isinstance(getattr(optimizer, "inner_optimizer", None), keras.optimizers.Optimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


@contextlib.contextmanager
def recording(recorder):
    """Shows every operation called in this thread to `recorder.observe(operation, args, kwargs)`.

    `recording(None)` hides them from an outer recorder.
    """
    previous = getattr(_active, "recorder", None)
    _active.recorder = recorder
    try:
        yield recorder
    finally:
        _active.recorder = previous


@contextlib.contextmanager
def still():
    """Within it, layers that hold a seed generator (such as dropout) run in inference mode.

    What they draw nevertheless is the same for all rows. For comparing one forward pass with
    another.
    """
    previous, _active.still = getattr(_active, "still", False), True
    try:
        yield
    finally:
        _active.still = previous


def is_still():
    """Whether this thread is within `still`."""
    return getattr(_active, "still", False)


def draw(original, shape, args, kwargs):
    """What a function of `DRAWS` gives by itself; within `still` the same for each row.

    Args:
        original: The function.
        shape: As it takes it, rows first.
        args: Its other arguments, a tuple.
        kwargs: Dict of the rest, with `seed`.
    """
    if not is_still() or len(shape) == 0:
        return original(shape, *args, **kwargs)
    one = tf.concat([[1], tf.cast(tf.stack(shape)[1:], "int32")], axis=0)
    drawn = original(one, *args, **{**kwargs, "seed": 0})
    return tf.broadcast_to(drawn, tf.cast(tf.stack(shape), "int32"))


def call_operation(operation, args, kwargs):
    """What `keras.Operation.__call__` does by itself, unseen by a recorder."""
    if is_still() and getattr(operation, "_seed_generators", None):
        kwargs = {**kwargs, "training": False} if "training" in kwargs else kwargs
    return _call(operation, *args, **kwargs)


def without(layer, **attributes):
    """A shallow copy of `layer` that shares its variables, with `attributes` replaced.

    Keras' own `__setattr__` is bypassed, so nothing is tracked twice and the layer stays untouched.
    """
    twin = object.__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    twin.__dict__.update(attributes)
    return twin


def compile_arguments(model):
    """The arguments that a `keras.Model` was compiled with, a dict of the very objects."""
    return dict(model._compile_config.config)


def own_trainable_variables(layer):
    """Trainable variables that `layer` holds itself, not through a sublayer."""
    if not layer.trainable:
        return []
    return [v for v in layer._trainable_variables if v.trainable]


def flatten_layers(layer):
    """`layer` and all layers below it."""
    return list(layer._flatten_layers())


def made_by(tensor):
    """The operation that made a symbolic tensor, and the list of tensors that it was called on."""
    operation, node, _ = tensor._keras_history
    return operation, operation._inbound_nodes[node].input_tensors


def seed_generators(layer):
    """Every `keras.random.SeedGenerator` of `layer` and its sublayers."""
    found = []
    for part in flatten_layers(layer):
        found.extend(part._seed_generators)
    return list({id(g): g for g in found}.values())


def seed_states(layer):
    """The states of `seed_generators(layer)`, `keras.Variable`s."""
    return [generator.state for generator in seed_generators(layer)]


def handles(variable):
    """The resources that hold a `keras.Variable`: one, or one a replica."""
    value = variable.value
    return [part.handle for part in getattr(value, "values", [value])]


def own_training_methods(model):
    """Names of the methods between `fit` and Keras' `train_step` that are not Keras' own.

    Args:
        model: A `keras.Model`; its class and the instance are looked at.
    """
    names = ("train_step", "make_train_function")
    own = [
        name
        for name in names
        if name in vars(model) or getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    # Keras keeps what it makes there; only a function of another module is somebody's own.
    function = getattr(model, "train_function", None)
    function = getattr(function, "python_function", function)
    if function is not None and function.__module__ != keras.Model.make_train_function.__module__:
        own.append("train_function")
    return own


def overwritten_with_gradients(layer):
    """Names of the layer's own variables that Keras replaces by their gradient, as float8 has."""
    return [v.name for v in layer._trainable_variables if v.overwrite_with_gradient]


def adding_losses(model):
    """Names of the layers that called `add_loss`, within a `keras.StatelessScope` too; a list."""
    return [part.name for part in flatten_layers(model) if part._loss_ids or part._losses]


def clear_added_losses(model):
    """Forgets what `adding_losses` lists, as Keras does at the start of a call."""
    model._clear_losses()


def output_loss_trackers(model):
    """The means that Keras keeps for each output's loss; empty for a model of one output."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


@contextlib.contextmanager
def without_weight_regularizers(variables):
    """Takes the weight regularisers off `variables` for a while.

    They read no data: the private step adds their gradient after the noise, so the per-example loss
    must not hold them.
    """
    kept = [(v, v.regularizer) for v in variables if v.regularizer is not None]
    for variable, _ in kept:
        variable.regularizer = None
    try:
        yield
    finally:
        for variable, regularizer in kept:
            variable.regularizer = regularizer


def compilation(model):
    """An object that each `model.compile` makes anew, and keeps until the next."""
    return model._loss_tracker


def update_loss_tracker(model, loss, count):
    """Adds a batch of `count` examples of mean `loss` to what Keras shows as `loss`."""
    model._loss_tracker.update_state(loss, sample_weight=count)


def compute_metrics(model, x, y, y_pred, sample_weight, present):
    """`model.compute_metrics`, counting only the rows where `present` [rows] is true, if given.

    Keras gives `sample_weight` to `weighted_metrics` alone; an absent row (padding) must not count
    in the unweighted ones either.
    """
    compiled = model._compile_metrics
    own_method = type(model).compute_metrics is not keras.Model.compute_metrics
    if compiled is None or present is None or own_method:
        if sample_weight is None and present is not None:
            sample_weight = tf.cast(present, "float32")
        return model.compute_metrics(x, y, y_pred, sample_weight)
    if not compiled.built:
        with recording(None):
            compiled.build(y, y_pred)
    y_true, y_pred = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    weights = [None] if sample_weight is None else compiled._flatten_y(sample_weight)
    weights = weights * len(y_true) if len(weights) == 1 else weights
    present = tf.cast(present, "float32")
    unweighted, weighted = compiled._flat_metrics, compiled._flat_weighted_metrics
    for each, others, *batch, weight in zip(
        unweighted, weighted, y_true, y_pred, weights, strict=True
    ):
        for metric in each.metrics if each else ():
            _update(metric, *batch, present)
        for metric in others.metrics if others else ():
            _update(metric, *batch, present, weight)
    return model.get_metrics_result()


def _update(metric, y_true, y_pred, present, weight=None):
    """`metric.update_state`, where a row that is not `present`, float32 [rows], does not count."""
    mask = getattr(y_pred, "_keras_mask", None)
    if weight is None:
        # Without weights Keras leaves a mask unread.
        weight, mask, y_pred = present, None, tf.identity(y_pred)
    if isinstance(metric, iou_metrics._IoUBase):
        like = y_true if metric.sparse_y_true else y_true[..., 0]
        weight = tf.broadcast_to(_with_axes_of(like, weight), tf.shape(like))
    elif isinstance(metric, _COUNTING_METRICS):
        weight = _with_axes_of(y_true, weight)
    elif mask is not None:
        weight = _with_axes_of(mask, weight)
    metric.update_state(y_true, y_pred, sample_weight=weight)


def _with_axes_of(tensor, weight):
    """`weight` with axes of length one behind its own, as many as `tensor` has."""
    missing = max(tensor.shape.rank - weight.shape.rank, 0)
    return tf.reshape(weight, tf.concat([tf.shape(weight), [1] * missing], axis=0))


@contextlib.contextmanager
def fresh_names():
    """Within it, Keras counts the names that it gives to layers and models from one.

    Afterwards it goes on as if none had been given.
    """
    kept = global_state.get_global_attribute(_NAMES)
    global_state.set_global_attribute(_NAMES, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, kept)


@contextlib.contextmanager
def keeping_first_epoch(model):
    """Afterwards, also after an error, `fit` begins again at its own `initial_epoch`."""
    try:
        yield
    finally:
        model._initial_epoch = None


def initial_epoch(model):
    """The epoch that a callback had `fit` begin at, an int or None."""
    return model._initial_epoch


def set_initial_epoch(model, epoch):
    """Has `fit` begin at another epoch, as `keras.callbacks.BackupAndRestore` does; or None."""
    model._initial_epoch = epoch


def side_channels(tensor):
    """The attributes by which Keras passes more than the value: `_keras_mask`, `_keras_logits`."""
    return (getattr(tensor, "_keras_mask", None), getattr(tensor, "_keras_logits", None))


def set_side_channels(tensor, mask, logits):
    """Attaches a mask and logits as Keras does; `None` attaches nothing."""
    if mask is not None:
        tensor._keras_mask = mask
    if logits is not None:
        tensor._keras_logits = logits


@contextlib.contextmanager
def driving(model, name):
    """Within it, `driver(model)` is `name`: who splits batches over replicas and runs the step."""
    previous = _drivers.get(model)
    _drivers[model] = name
    try:
        yield
    finally:
        _drivers[model] = previous


def driver(model):
    """Whose `fit` is running: "keras" or "tfdpx", None outside of both."""
    return _drivers.get(model)


@tf.autograph.experimental.do_not_convert
def eagerly(function, *args):
    """`function(*args)` in eager mode, also while a graph is being traced.

    In a thread of its own: `tf.init_scope` would leave the graph too, but it stops every tape in
    the thread, and gradients taken in it are silently zero.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function, *args).result()


def build(model, data):
    """Creates what Keras makes on a first batch: weights, metrics, losses, optimizer variables.

    Args:
        model: A compiled `keras.Model`.
        data: `(x, y, sample_weight)`; only dtypes and the shapes behind the batch axis are read.
    """

    def symbolic(leaf):
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor([None, *leaf.shape[1:]], dtype)

    data = tf.nest.map_structure(lambda t: None if t is None else symbolic(t), data)
    with recording(None), tf.init_scope():
        if _knows_its_outputs(model, data[0]):
            _build_compiled(model, *data)
        model._symbolic_build(data_batch=data)


def _knows_its_outputs(model, x):
    """Whether the shapes of `model`'s outputs for `x` are known without running it."""
    # A Sequential model has a Functional one inside, once its inputs are known.
    graph = getattr(model, "_functional", model)
    known = isinstance(graph, Functional) and all(layer.built for layer in model.layers)
    ordinary = type(model).call in (Functional.call, keras.Sequential.call)
    return known and ordinary and isinstance(x, keras.KerasTensor)


def known_inputs(model):
    """The symbolic inputs that a Functional or Sequential model was built on, a nest; or None."""
    graph = getattr(model, "_functional", None) or model
    return getattr(graph, "_inputs_struct", None)


def _build_compiled(model, x, y, sample_weight):
    """As `_symbolic_build`, but the model is not traced, which takes as long as in its step."""
    y_pred = model.compute_output_spec(x)
    if model._compile_metrics is not None and not model._compile_metrics.built:
        compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=sample_weight)
    if model._compile_loss is not None and not model._compile_loss.built:
        compute_output_spec(
            model._compute_loss, x, y, y_pred, sample_weight=sample_weight, training=False
        )


def call_model(model, x):
    """The training-mode forward pass, as Keras' own `train_step` makes it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def compute_loss(model, x, y, y_pred, sample_weight):
    """`model.compute_loss` in training mode, as if there were one replica.

    Also where it is overridden without `training`.
    """
    _active.unscaled = True
    try:
        return model._compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True
        )
    finally:
        _active.unscaled = False


class OptimizerOverrides:
    """Stands before a Keras optimizer, and has its private methods call public ones of ours.

    Methods that a subclass defines:
        all_reduce_sums(grads_and_vars): What to do in place of adding up the gradients of all
            replicas. Takes and returns a list of pairs.
        average_weights(pairs): Updates the moving averages, given pairs of a weight and its
            average. Called if there are any.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return self.all_reduce_sums(list(grads_and_vars))

    def _update_model_variables_moving_average(self, trainable_variables):
        if self.use_ema:
            averages = self._model_variables_moving_average
            self.average_weights(zip(trainable_variables, averages, strict=True))


def write_epoch(board, step, logs):
    """Writes the scalars of an epoch as Keras's TensorBoard callback does, at a step of our choice.

    Args:
        board: A `keras.callbacks.TensorBoard`.
        step: Int, where on the x-axis.
        logs: Dict by name; what begins with "val_" goes to the run "validation".
    """
    board._log_epoch_metrics(step, logs)


@contextlib.contextmanager
def writing(board, validation=False):
    """Within it, summaries go to the run "train" or "validation" of a TensorBoard callback."""
    writer = board._val_writer if validation else board._train_writer
    with writer.as_default():
        yield


# The methods of Keras' `GroupNormalization` that our rule repeats, besides `call`.
GROUP_NORMALIZATION_STEPS = ("_reshape_into_groups", "_apply_normalization")


def in_float32(layer, **attributes):
    """`without`, with the twin computing in float32."""
    return without(layer, _dtype_policy=keras.DTypePolicy("float32"), **attributes)


def recorder():
    """The recorder that is active in this thread, or None."""
    return getattr(_active, "recorder", None)


def is_unscaled():
    """Whether losses are to be computed in this thread as if there were one replica."""
    return getattr(_active, "unscaled", False)


def adapted_statistics(layer):
    """What `adapt` has computed for a layer, a list of arrays; None where it has nothing.

    Also of a layer from a file, which does not say that it was adapted. Of a layer of one's own
    that has an `adapt`, nobody knows what that computes: all of its weights.
    """
    if isinstance(layer, keras.layers.TextVectorization):
        layer = layer._lookup_layer
    if isinstance(layer, keras.layers.Normalization):
        if layer.input_mean is not None or not layer.built:
            return None
        mean, variance = np.array(layer.adapt_mean), np.array(layer.adapt_variance)
        return [mean, variance] if mean.any() or (variance != 1).any() else None
    if isinstance(layer, keras.layers.Discretization):
        given = layer.num_bins is None or layer.bin_boundaries is None
        return None if given else [np.array(layer.bin_boundaries)]
    if isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        if layer._has_input_vocabulary or not layer.get_vocabulary(include_special_tokens=False):
            return None
        frequencies = [layer.idf_weights] if layer.output_mode == "tf_idf" else []
        return [np.array(part) for part in (layer.get_vocabulary(), *frequencies)]
    # Its layers are in it; and tfdpx's own layers take no private data.
    others = isinstance(layer, keras.utils.FeatureSpace) or type(layer).__module__.startswith(
        "tfdpx."
    )
    if others or not callable(getattr(layer, "adapt", None)):
        return None
    return [np.array(layer.name), *(np.array(weight) for weight in layer.weights)]


def saved_optimizer(weights_store):
    """The arrays, by name, of the optimizer in a weights file of Keras; None if it has none."""
    try:
        store = weights_store.get("optimizer")
        return {name: np.array(store[name]) for name in store.keys()}
    except KeyError:
        return None


def weights_file(model):
    """The bytes of the file that `model.save_weights` writes, a `.weights.h5`.

    Made in memory: HDF5 itself ends the process where a disk is full.
    """
    content, name = io.BytesIO(), "model.weights.h5"
    with zipfile.ZipFile(content, "w") as archive:
        store = saving_lib.H5IOStore(name, archive=archive, mode="w")
        saving_lib._save_state(
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
        )
        store.close()
    with zipfile.ZipFile(content) as archive:
        return archive.read(name)
