"""Private names of Keras's layers: their variables, random numbers, added losses and call graph."""

import contextlib
import random
import sys
import types

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import names, step_context

_NAMES = "object_name_uids"
_call = keras.Operation.__call__

# Functions that `hook` wraps: pairs of a module and a name in it.
DRAWS = tuple(map(names.find, ("normal", "uniform", "truncated_normal", "randint")))
DROPPING = names.find("dropout")
TAKING = names.find("take")
_VARIABLE = next(c for c in keras.Variable.__mro__ if "_restore_from_tensors" in vars(c))
FILLING = (_VARIABLE, "_initialize_with_initializer")
RESTORING = (_VARIABLE, "_restore_from_tensors")
# Layers that replace their weights by quantized ones.
QUANTIZED = {
    layer
    for layer in vars(keras.layers).values()
    if isinstance(layer, type) and "quantize" in vars(layer)
}
# The methods of Keras's `GroupNormalization` that our rule repeats, in addition to `call`.
GROUP_NORMALIZATION_STEPS = ("_reshape_into_groups", "_apply_normalization")


# Attributes of Keras's attention layers, with their values for attention over the second of three
# axes. For a sublayer, the value is its equation, axis or noise shape.
_ATTENTION = {
    keras.layers.MultiHeadAttention: {
        **dict.fromkeys(("_query_dense", "_key_dense", "_value_dense"), "abc,cde->abde"),
        "_output_dense": "abcd,cde->abe",
        "_dot_product_equation": "aecd,abcd->acbe",
        "_combine_equation": "acbe,aecd->abcd",
        "_softmax": (3,),
        "_attention_axes": (1,),
        "_inverse_sqrt_key_dim": float,
        **dict.fromkeys(("_use_gate", "_sliding_window", "_flash_attention", "_dropout_layer")),
    },
    keras.layers.GroupQueryAttention: {
        "_query_dense": "bqm,muh->bquh",
        **dict.fromkeys(("_key_dense", "_value_dense"), "bkm,mvh->bkvh"),
        "_output_dense": "bquh,uhm->bqm",
        "_dot_product_equation": "bquh,bkuh->buqk",
        "_combine_equation": "buqk,bkuh->bquh",
        "_softmax": -1,
        "_inverse_sqrt_head_dim": float,
        "num_repeats": int,
        **dict.fromkeys(("use_gate", "sliding_window", "_flash_attention", "_dropout_layer")),
    },
}
ATTENTION = tuple(_ATTENTION)


def changed_attention(layer):
    """Returns the names of attributes of a built attention layer that have unusual values.

    `_ATTENTION` lists the usual values, which Keras sets for inputs [rows, positions, features]. A
    gate, a window or flash attention changes these values.
    """
    described = {
        keras.layers.EinsumDense: "equation",
        keras.layers.Softmax: "axis",
        keras.layers.Dropout: "noise_shape",
    }
    changed = []
    for name, expected in _ATTENTION[type(layer)].items():
        value = vars(layer).get(name)
        if type(value) in described:
            value = getattr(value, described[type(value)])
        value = None if value is False else value
        is_same = type(value) is type(expected) and value == expected
        if not is_same and type(value) is not expected:
            changed.append(name)
    return changed


def call_operation(operation, args, kwargs):
    """Runs the original `keras.Operation.__call__` of an operation, without a recorder."""
    # Keras's layers draw with the functions in `DRAWS`, which handle `freeze_rng` themselves. Other
    # random layers are called in inference mode.
    is_own = type(operation).__module__.startswith("keras.src.")
    if step_context.is_rng_frozen() and getattr(operation, "_seed_generators", ()) and not is_own:
        kwargs = {**kwargs, "training": False} if "training" in kwargs else kwargs
    return _call(operation, *args, **kwargs)


def without(layer, **attributes):
    """Returns a shallow copy of `layer` that shares its variables, with `attributes` replaced.

    The copy is made without Keras's `__setattr__`. So Keras tracks no variable twice, and `layer`
    does not change.
    """
    twin = object.__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    twin.__dict__.update(attributes)
    return twin


def in_float32(layer, **attributes):
    """Returns a copy of `layer`, made as by `without`, that computes in float32."""
    return without(layer, _dtype_policy=keras.DTypePolicy("float32"), **attributes)


def flatten_layers(layer):
    """Returns a list of `layer` and all layers inside of it."""
    return list(layer._flatten_layers())


def own_trainable_variables(layer):
    """Returns the trainable variables that `layer` holds itself, not in a sublayer."""
    if not layer.trainable:
        return []
    return [v for v in layer._trainable_variables if v.trainable]


def own_weights(layer):
    """Returns the weights that `layer` holds itself, not in a sublayer, trainable or not."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def handles(variable):
    """Returns a list of the resources that hold a `keras.Variable`, one for each replica."""
    value = variable.value
    return [part.handle for part in getattr(value, "values", [value])]


def checkpoint_of(trackable):
    """Returns the number of the last `tf.train.Checkpoint.restore` that restored an object."""
    return trackable._update_uid


def replaced_methods(layer):
    """Returns the names of methods that code outside of the layer's module has replaced.

    These are methods that were set on the layer object, and `call` if it was set on the class. The
    names `build`, `quantize` and `loss` do not count: Keras itself sets them on objects.
    """
    methods = (name for name in vars(layer) if callable(getattr(type(layer), name, None)))
    replaced = [name for name in methods if name not in ("build", "loss", "quantize")]
    owner = next(base for base in type(layer).__mro__ if "call" in vars(base))
    is_own = _is_defined_in(vars(owner)["call"], sys.modules.get(owner.__module__))
    return replaced if is_own else [*replaced, "call"]


def is_activation(function):
    """Returns whether Keras defines a function as one of its activations."""
    return _is_defined_in(function, names.find("relu")[0])


def _is_defined_in(function, module):
    # `__module__` proves nothing, because any code may set it. A wrapped function does not count
    # either, because the wrapper's code runs too.
    is_function = type(function) is types.FunctionType and module is not None
    return is_function and function.__globals__ is vars(module)


def overwritten_with_gradients(layer):
    """Returns the names of variables to which Keras assigns gradients, as float8 layers need."""
    return [v.name for v in layer._trainable_variables if v.overwrite_with_gradient]


@contextlib.contextmanager
def replacing(objects, name, value):
    """Context manager that sets the attribute `name` of objects, and restores the former values."""
    former_values = [(holder, getattr(holder, name)) for holder in objects]
    for holder, _ in former_values:
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, former in former_values:
            setattr(holder, name, former)


def without_weight_regularizers(variables):
    """Context manager that removes the weight regularisers of `variables`, and restores them.

    Regularisers read no data, so the private step adds their gradients after the noise. The
    per-example loss must therefore not contain regularisers.
    """
    return replacing([v for v in variables if v.regularizer is not None], "regularizer", None)


def without_cudnn(model):
    """Context manager in which recurrent layers avoid cuDNN, which cannot be vectorized."""
    recurrent = [part for part in flatten_layers(model) if hasattr(part, "use_cudnn")]
    return replacing(recurrent, "use_cudnn", False)


def adding_losses(model):
    """Returns the names of layers that called `add_loss`, also within a `keras.StatelessScope`."""
    return [part.name for part in flatten_layers(model) if part._loss_ids or part._losses]


def clear_added_losses(model):
    """Clears the losses that layers added by `add_loss`, as Keras does before a call."""
    model._clear_losses()


def made_by(tensor):
    """Returns the operation that made a symbolic tensor, and the list of its input tensors."""
    operation, node, _ = tensor._keras_history
    return operation, operation._inbound_nodes[node].input_tensors


def count_calls_of_output(layer):
    """Returns how many symbolic calls of other layers and operations take a layer's output."""
    return len(layer._outbound_nodes)


def side_channels(tensor):
    """Returns the mask and the logits that Keras has attached to a tensor; each may be None."""
    return (getattr(tensor, "_keras_mask", None), getattr(tensor, "_keras_logits", None))


def set_side_channels(tensor, mask, logits):
    """Attaches a mask and logits as Keras does; None attaches nothing."""
    if mask is not None:
        tensor._keras_mask = mask
    if logits is not None:
        tensor._keras_logits = logits


@contextlib.contextmanager
def undisturbed():
    """Context manager that restores Keras's counters of layer names and Python's random state.

    Inside of the context, Keras counts layer names from one.
    """
    counts, state = names.get("get_global_attribute")(_NAMES), random.getstate()
    set_attribute = names.get("set_global_attribute")
    set_attribute(_NAMES, None)
    try:
        yield
    finally:
        set_attribute(_NAMES, counts)
        random.setstate(state)


def seed_generators(layer):
    """Returns all `keras.random.SeedGenerator`s of `layer` and its sublayers."""
    generators = []
    for part in flatten_layers(layer):
        generators.extend(part._seed_generators)
    return list({id(g): g for g in generators}.values())


def draw(original, shape, args, kwargs):
    """Calls one of Keras's random functions; within `freeze_rng`, all rows get the same numbers.

    Args:
        original: The function, one of `DRAWS`.
        shape: The first argument of `original`, the shape of the draw. The first axis is the rows.
        args: The other positional arguments of `original`, a tuple.
        kwargs: Dict of the keyword arguments of `original`, including `seed`.
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


# Functions that replace Keras's random ones within `freeze_rng`. The result for a row depends only
# on that row.
STILL = {
    "beta": _mean_of(lambda alpha, beta: alpha / (alpha + beta)),
    "binomial": _mean_of(lambda counts, probabilities: counts * probabilities),
    "categorical": _most_likely,
    "gamma": _mean_of(lambda alpha: alpha),
    "shuffle": lambda x, axis=0, seed=None: x,
}
RANDOM, _ = DROPPING


def has_statistics(layer):
    """Returns whether a Keras preprocessing layer has statistics, from arguments or `adapt`."""
    if isinstance(layer, keras.layers.Normalization):
        return layer.input_mean is not None or adapted_statistics(layer) is not None
    if isinstance(layer, keras.layers.Discretization):
        return layer.num_bins is None or layer.bin_boundaries is not None
    return bool(layer.get_vocabulary(False)) or layer.output_mode == "tf_idf"


def adaptable_features(space):
    """Returns a dict from feature names to the layers that `FeatureSpace.adapt` would adapt."""
    return {name: space.preprocessors[name] for name in space._list_adaptable_preprocessors()}


def finish_features(space):
    """Does the last part of `FeatureSpace.adapt`, after all layers of the space are adapted."""
    space._is_adapted = True
    space.get_encoded_features()
    space.built = space._sublayers_built = True


def adapted_statistics(layer):
    """Returns the statistics that `adapt` has computed for a layer, a list of arrays, or None.

    The function also works for a layer from a file, although the file does not tell that the layer
    was adapted. For a user's layer with an `adapt` method, the result has all weights, because we
    cannot know which of them are statistics.
    """
    if isinstance(layer, keras.layers.TextVectorization):
        layer = layer._lookup_layer
    if isinstance(layer, keras.layers.Normalization):
        if layer.input_mean is not None or not layer.built:
            return None
        mean, variance = np.array(layer.adapt_mean), np.array(layer.adapt_variance)
        return [mean, variance] if mean.any() or (variance != 1).any() else None
    if isinstance(layer, keras.layers.Discretization):
        is_unadapted = layer.num_bins is None or layer.bin_boundaries is None
        return None if is_unadapted else [np.array(layer.bin_boundaries)]
    if isinstance(layer, keras.layers.StringLookup | keras.layers.IntegerLookup):
        if layer._has_input_vocabulary or not layer.get_vocabulary(include_special_tokens=False):
            return None
        frequencies = [layer.idf_weights] if layer.output_mode == "tf_idf" else []
        return [np.array(part) for part in (layer.get_vocabulary(), *frequencies)]
    # A `FeatureSpace` is covered by its layers, and tfdpx's layers take no private data.
    is_covered = isinstance(layer, keras.utils.FeatureSpace) or type(layer).__module__.startswith(
        "tfdpx."
    )
    if is_covered or not callable(getattr(layer, "adapt", None)):
        return None
    return [np.array(layer.name), *(np.array(weight) for weight in layer.weights)]
