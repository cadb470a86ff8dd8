"""A copy of a model and its optimizer that takes one update at a time on canaries alone.

Canaries are equal examples whose gradient is far longer than the clip, in a batch that holds
nothing else. Each update starts at the same weights, and what it adds to them is what an adversary
sees who knows everything but who was there.
"""

import contextlib
import random
import warnings

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, lora, model_internals, step_context
from tfdpx.account import copy_weights
from tfdpx.per_example.rows import Rows
from tfdpx.training.private_optimizer import PrivateOptimizer
from tfdpx.training.public_clip import PublicClip

# How much longer than the clip a canary's gradient is: what is not clipped must show.
_EXCESS = 1000.0
# With public data, about the norm of their gradients over `l2_norm_clip`.
_PUBLIC_NORM = 2.0


class Canaries:
    """Runs updates of a copy of `model`; the model and its optimizer are only read.

    Args:
        model: A built `keras.Model`.
        optimizer: The tfdpx optimizer to audit.
        count: Int, canaries wanted; `self.count` is the least multiple of the replicas above.
        x: Optional nest of arrays or tensors [rows, ...]; only shapes and dtypes are read.

    Raises:
        ValueError: If the model cannot be copied, or the canaries have no gradient.
    """

    def __init__(self, model, optimizer, count, x=None):
        self._optimizer, self._strategy = optimizer, model.distribute_strategy
        replicas = self._strategy.num_replicas_in_sync
        self._each = -(-count // replicas)
        self.count = self._each * replicas
        specs = _specs(model, x)
        with _undisturbed(), self._strategy.scope():
            self._model = _copy(model, specs)
        for variable in self._model.trainable_variables:
            variable.regularizer = variable.constraint = None
        self._jit_compile = model.jit_compile and replicas == 1
        self._x = Rows(specs).map(lambda t: _values(t, self._each, blank=optimizer.augment))
        self._rows, self._y = self._x, self._targets()
        if optimizer.augment is None and optimizer.augmult:
            self._x = Rows(self._x).map(lambda t: _views(t, optimizer.augmult))
        self._start = [tf.constant(v.numpy()) for v in self._model.trainable_variables]

    def names(self):
        """The paths of the trained variables."""
        return [v.path for v in self._model.trainable_variables]

    def shapes(self):
        """Their shapes."""
        return [value.shape for value in self._start]

    def sizes(self):
        """The numbers of their values."""
        return [int(np.prod(value.shape)) for value in self._start]

    def updates(self, noise_multiplier):
        """A function that takes an update, with noise of its own.

        Args:
            noise_multiplier: Float.

        Returns:
            Function of a bool, whether the canaries are present, and a list of tensors, a
            direction. It returns the list of what was added to the sums of each variable, in units
            of the clip; its product with the direction; the squared norm of each; and the largest
            difference between replicas.
        """
        config = self._optimizer.get_config()
        config.update(plan=None, noise_multiplier=noise_multiplier, seed=None, use_ema=False)
        # An example that was never drawn is clipped at the whole clip, which no other exceeds.
        config.update(individual=None)
        # Those of files are known by a digest alone, and have targets for another loss.
        config.pop("public_data", None)
        config.pop("public_quantile", None)
        config.update({"bias_correction": None} if "bias_correction" in config else {})
        config.update({"weight_decay": 0.0} if config.get("weight_decay") is not None else {})
        with _undisturbed(), self._strategy.scope(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`noise_multiplier=0`")
            policy = self._public()
            optimizer = _observed(type(self._optimizer), policy).from_config(config)
            if policy is not None:
                optimizer.clip_policy = policy
            optimizer.clip_policy.learn = _nothing  # Each update starts at the same clip too.
            self._model.compile(
                optimizer,
                loss=tf.nest.map_structure(lambda _: _linear, self._y),
                jit_compile=self._jit_compile,
            )
        model, strategy, variables = self._model, self._strategy, self._model.trainable_variables

        @tf.function(jit_compile=self._jit_compile, autograph=False)
        def update(present, direction):
            weight = tf.fill([self._each], tf.cast(present, "float32"))
            strategy.run(model.train_step, args=((self._x, self._y, weight),))
            copies = [strategy.experimental_local_results(v.value) for v in variables]
            spread = [tf.reduce_max(tf.abs(c - own[0])) for own in copies for c in own]
            # Subtracted from the weights, as a gradient is.
            added = [start - own[0] for start, own in zip(self._start, copies, strict=True)]
            for variable, start in zip(variables, self._start, strict=True):
                variable.assign(start)
            along = [tf.reduce_sum(a * d) for a, d in zip(added, direction, strict=True)]
            squares = [tf.reduce_sum(tf.square(a)) for a in added]
            return added, tf.add_n(along), tf.stack(squares), tf.reduce_max(tf.stack(spread))

        def run(present, direction):
            # With several replicas, a step runs only where somebody has split the batch.
            several = strategy.num_replicas_in_sync > 1
            name = "tfdpx" if several else step_context.driver(model)
            with step_context.driving(model, name):
                return update(tf.constant(present), direction)

        return run

    def _public(self):
        """The clip policy of made-up public data in place of the optimizer's, if it has any.

        Two examples whose gradients cancel: they set the clip, and leave nothing in the sum.
        """
        given = self._optimizer
        if given.public_data is None:
            return None
        x = tf.nest.map_structure(lambda t: tf.repeat(t[:1], 2, axis=0), self._rows)
        pair = tf.constant([1.0, -1.0]) * _PUBLIC_NORM / _EXCESS

        def opposite(y):
            return y[:1] * tf.reshape(pair, [2, *[1] * (y.shape.rank - 1)])

        x = tuple(x) if isinstance(x, list) else x
        y = tf.nest.map_structure(opposite, self._y)
        return _Public(x, y, given.public_quantile, given.plan.num_examples, given.l2_norm_clip)

    def _targets(self):
        """Nest like the model's outputs: the loss is their product, whose gradient is long."""
        generator = np.random.default_rng(1)
        one = Rows(self._x).map(lambda t: t[:1])
        with tf.GradientTape() as tape:
            y_pred = model_internals.call_model(self._model, one)
            y = tf.nest.map_structure(
                lambda t: tf.constant(generator.normal(size=t.shape), "float32"), y_pred
            )
            pairs = zip(tf.nest.flatten(y), tf.nest.flatten(y_pred), strict=True)
            loss = tf.add_n([tf.reduce_sum(t * tf.cast(p, "float32")) for t, p in pairs])
        gradients = tape.gradient(loss, [v.value for v in self._model.trainable_variables])
        norm = float(tf.linalg.global_norm([g for g in gradients if g is not None]))
        if not (np.isfinite(norm) and norm > 0):
            raise ValueError(
                f"The canary's gradient has norm {norm} on model '{self._model.name}': nothing can "
                "be learned from it. Give another model, or other weights."
            )
        scale = _EXCESS * self._optimizer.l2_norm_clip / norm
        y = tf.nest.map_structure(lambda t: tf.repeat(t * scale, self._each, axis=0), y)
        return tuple(y) if isinstance(y, list) else y


class _Public(PublicClip):
    """Keeps the clip of an update, over `l2_norm_clip`, for the same update."""

    scale = 1.0

    def begin(self, *args):
        decided = super().begin(*args)
        self.scale = sum(decided.tensors) / self.l2_norm_clip if decided.tensors else 1.0
        return decided


def _observed(private, policy):
    """A subclass of a private optimizer class whose updates add gradients to the weights as is.

    Its methods, and those of its subclasses, run as they do; only what Keras's own optimizer would
    make of the gradient is left out, and what is added is in units of the clip.

    Args:
        private: The class.
        policy: `_Public`, or None.
    """
    base = next(
        c
        for c in private.__mro__
        if issubclass(c, keras.optimizers.Optimizer) and not issubclass(c, PrivateOptimizer)
    )

    def update_step(self, gradient, variable, learning_rate):
        unit = 1.0 if policy is None else policy.scale
        self.assign_sub(variable, tf.cast(gradient * (self.batch_size / unit), variable.dtype))

    # Between the private classes and Keras's, by the method resolution order.
    last = type(f"Last{base.__name__}", (base,), {"update_step": update_step})
    return type(f"Observed{private.__name__}", (private, last), {})


def _nothing(*learned):
    """Learns nothing."""


def _linear(y_true, y_pred):
    return tf.reduce_sum(y_true * tf.cast(y_pred, y_true.dtype), list(range(1, y_pred.shape.rank)))


def _specs(model, x):
    """Tensors with the shapes and dtypes of the model's inputs: one, or a list."""
    if x is not None:
        specs = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(x)]
    else:
        specs = [tf.zeros([1, *_known(t.shape[1:])], t.dtype) for t in getattr(model, "inputs", [])]
    if not specs or not model.built:
        raise ValueError(
            f"The shapes of the inputs of model '{model.name}' are not known. Build the model, and "
            "give `x`, a batch like those that it trains on; only its shapes and dtypes are read."
        )
    return _one_or_list(specs)


def _one_or_list(values):
    return values[0] if len(values) == 1 else list(values)


def _known(shape):
    return [32 if size is None else size for size in shape]


def _values(tensor, rows, blank):
    """Equal examples like those of `tensor`; `blank` ones look the same in all views."""
    shape, dtype = [1, *tensor.shape[1:]], tensor.dtype
    if dtype.is_floating and not blank:
        made = tf.constant(np.random.default_rng(0).normal(size=shape), dtype)
    elif dtype == tf.string:
        made = tf.fill(shape, "a")
    else:
        made = tf.cast(tf.ones(shape), dtype)
    return tf.repeat(made, rows, axis=0)


def _views(tensor, count):
    """[B, ...] as [B, count, ...]: equal views of each example."""
    return tf.repeat(tensor[:, tf.newaxis], count, axis=1)


def _copy(model, specs):
    """A model like `model`, with weights of its own and the same values."""
    try:
        if getattr(model, "inputs", None):
            # Without what it was compiled with, which Keras would copy too.
            bare = keras.Model(_one_or_list(model.inputs), _one_or_list(model.outputs))
            twin = keras.models.clone_model(bare)
        else:
            bare, twin = model, type(model).from_config(model.get_config())
            twin(specs)
        lora.enable_as(bare, twin)
        copy_weights(bare, twin)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"Model '{model.name}' (of type {type(model).__name__}) cannot be copied, and an audit "
            "must not touch its weights. Build it, and give it (and its layers) a `get_config` "
            f"from which the class can make it again. Keras said: {error}"
        ) from error
    return twin


@contextlib.contextmanager
def _undisturbed():
    """Afterwards random numbers and names continue as if nothing had been made."""
    state = random.getstate()
    try:
        with layer_internals.fresh_names():
            yield
    finally:
        random.setstate(state)
