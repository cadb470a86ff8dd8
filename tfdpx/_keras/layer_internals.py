"""Private names of Keras's layers: their variables, random numbers, added losses and call graph."""

import contextlib
import random

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.common import global_state

from tfdpx._keras import step_context

_NAMES = "object_name_uids"
_call = keras.Operation.__call__

# What `hook` wraps here: pairs of a module and a name in it.
DRAWS = tuple(
    (keras_backend.random, name) for name in ("normal", "uniform", "truncated_normal", "randint")
)
DROPPING = (keras_backend.random, "dropout")
TAKING = (keras_backend.numpy, "take")
# Layers that replace their weights by quantized ones.
QUANTIZED = {
    layer
    for layer in vars(keras.layers).values()
    if isinstance(layer, type) and "quantize" in vars(layer)
}
# The methods of Keras' `GroupNormalization` that our rule repeats, besides `call`.
GROUP_NORMALIZATION_STEPS = ("_reshape_into_groups", "_apply_normalization")


def call_operation(operation, args, kwargs):
    """What `keras.Operation.__call__` does by itself, unseen by a recorder."""
    # Keras's own layers draw by the functions of `DRAWS`, which hold still by themselves.
    is_own = type(operation).__module__.startswith("keras.src.")
    if step_context.is_rng_frozen() and getattr(operation, "_seed_generators", ()) and not is_own:
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


def in_float32(layer, **attributes):
    """`without`, with the twin computing in float32."""
    return without(layer, _dtype_policy=keras.DTypePolicy("float32"), **attributes)


def flatten_layers(layer):
    """`layer` and all layers below it."""
    return list(layer._flatten_layers())


def own_trainable_variables(layer):
    """Trainable variables that `layer` holds itself, not through a sublayer."""
    if not layer.trainable:
        return []
    return [v for v in layer._trainable_variables if v.trainable]


def own_weights(layer):
    """Weights that `layer` holds itself, not through a sublayer, trainable or not."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def handles(variable):
    """The resources that hold a `keras.Variable`: one, or one a replica."""
    value = variable.value
    return [part.handle for part in getattr(value, "values", [value])]


def replaced_methods(layer):
    """Names of the methods of its class that a layer has another of; a list.

    Keras itself wraps two on every layer, and keeps a loss under the name of a method.
    """
    methods = (name for name in vars(layer) if callable(getattr(type(layer), name, None)))
    return [name for name in methods if name not in ("build", "loss", "quantize")]


def overwritten_with_gradients(layer):
    """Names of the layer's own variables that Keras replaces by their gradient, as float8 has."""
    return [v.name for v in layer._trainable_variables if v.overwrite_with_gradient]


@contextlib.contextmanager
def _replacing(objects, name, value):
    """Gives an attribute of objects another value for a while."""
    kept = [(each, getattr(each, name)) for each in objects]
    for each, _ in kept:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, former in kept:
            setattr(each, name, former)


def without_weight_regularizers(variables):
    """Takes the weight regularisers off `variables` for a while.

    They read no data: the private step adds their gradient after the noise, so the per-example loss
    must not hold them.
    """
    return _replacing([v for v in variables if v.regularizer is not None], "regularizer", None)


def without_cudnn(model):
    """Within it, recurrent layers of a model do without cuDNN, which no map can vectorize."""
    recurrent = [part for part in flatten_layers(model) if hasattr(part, "use_cudnn")]
    return _replacing(recurrent, "use_cudnn", False)


def adding_losses(model):
    """Names of the layers that called `add_loss`, within a `keras.StatelessScope` too; a list."""
    return [part.name for part in flatten_layers(model) if part._loss_ids or part._losses]


def clear_added_losses(model):
    """Forgets what `adding_losses` lists, as Keras does at the start of a call."""
    model._clear_losses()


def made_by(tensor):
    """The operation that made a symbolic tensor, and the list of tensors that it was called on."""
    operation, node, _ = tensor._keras_history
    return operation, operation._inbound_nodes[node].input_tensors


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
def undisturbed():
    """Afterwards Keras's names of layers and Python's random numbers continue as if unused.

    Within it, Keras counts these names from one.
    """
    kept, state = global_state.get_global_attribute(_NAMES), random.getstate()
    global_state.set_global_attribute(_NAMES, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_NAMES, kept)
        random.setstate(state)


def seed_generators(layer):
    """Every `keras.random.SeedGenerator` of `layer` and its sublayers."""
    generators = []
    for part in flatten_layers(layer):
        generators.extend(part._seed_generators)
    return list({id(g): g for g in generators}.values())


def draw(original, shape, args, kwargs):
    """The result of a function of `DRAWS`; within `freeze_rng` the same for each row.

    Args:
        original: The function.
        shape: As it takes it, rows first.
        args: Its other arguments, a tuple.
        kwargs: Dict of the rest, with `seed`.
    """
    if not step_context.is_rng_frozen():
        return original(shape, *args, **kwargs)
    kwargs = {**kwargs, "seed": 0}
    shape = tf.cast(tf.convert_to_tensor(shape), "int32")
    if shape.shape[0] == 0:
        return original(shape, *args, **kwargs)
    one = tf.concat([[1], shape[1:]], axis=0)
    return tf.broadcast_to(original(one, *args, **kwargs), shape)


def _most_likely(logits, num_samples, dtype="int64", seed=None):
    most = tf.argmax(logits, axis=-1, output_type="int64")
    return tf.cast(tf.repeat(most[:, tf.newaxis], num_samples, axis=1), dtype)


def _mean_of(function):
    def mean(shape, *args, dtype=None, seed=None, **kwargs):
        value = tf.cast(function(*args, **kwargs), dtype or keras.config.floatx())
        return tf.broadcast_to(value, shape)

    return mean


# In place of Keras's functions within `freeze_rng`: each row depends on that row alone.
STILL = {
    "beta": _mean_of(lambda alpha, beta: alpha / (alpha + beta)),
    "binomial": _mean_of(lambda counts, probabilities: counts * probabilities),
    "categorical": _most_likely,
    "gamma": _mean_of(lambda alpha: alpha),
    "shuffle": lambda x, axis=0, seed=None: x,
}
RANDOM = keras_backend.random


def has_statistics(layer):
    """Whether a preprocessing layer of Keras was given its statistics, or was adapted."""
    if isinstance(layer, keras.layers.Normalization):
        return layer.input_mean is not None or adapted_statistics(layer) is not None
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is None or layer.bin_boundaries is not None
    return bool(layer.get_vocabulary(False)) or layer.output_mode == "tf_idf"


def adaptable_features(space):
    """Dict by feature of the layers that the `adapt` of a `FeatureSpace` would adapt."""
    return {name: space.preprocessors[name] for name in space._list_adaptable_preprocessors()}


def finish_features(space):
    """What `FeatureSpace.adapt` does once its layers are adapted."""
    space._is_adapted = True
    space.get_encoded_features()
    space.built = space._sublayers_built = True


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
