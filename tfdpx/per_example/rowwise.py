"""Models that are known to treat each row by itself, so that they need not be mapped to be apart.

The list fails closed: a model, a layer, an operation or an argument that is not known is mapped.
Known are classes by identity, never by a name, with no method replaced on the object.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals

_ACTIVATIONS = {id(f) for f in vars(keras.activations).values() if callable(f)}


def find_obstacle(model):
    """The first reason why a model is not known to treat each row by itself.

    Args:
        model: A built `keras.Model`.

    Returns:
        Str, a clause; None if all of the model is known.
    """
    graph = model_internals.plain_graph(model)
    if graph is None:
        return (
            f"model '{model.name}' (of type {type(model).__name__}) is neither a Sequential model "
            "of known inputs nor a functional one"
        )
    for part in {id(m): m for m in (model, graph)}.values():
        if replaced := layer_internals.replaced_methods(part):
            return f"model '{model.name}' has a `{replaced[0]}` of its own"
    layers, operations = _known_layers(), _known_operations()
    for operation in graph.operations:
        if isinstance(operation, keras.Model):
            problem = find_obstacle(operation) or _problem_of_arguments(operation)
        elif type(operation) in operations:
            problem = _problem_of_operands(operation)
        elif type(operation) in layers:
            problem = _problem_of_layer(operation, layers[type(operation)])
        else:
            problem = f"{_described(operation)} is not known to treat each row by itself"
        if problem:
            return problem
    return None


def _known_layers():
    """Dict by class: a function of a layer and the rank of its input to a problem, or None."""
    layers = keras.layers
    known = dict.fromkeys(
        (
            layers.InputLayer, layers.Activation, layers.AveragePooling1D, layers.AveragePooling2D,
            layers.Conv2D, layers.Cropping2D, layers.Dense, layers.DepthwiseConv2D,
            layers.Embedding, layers.Flatten, layers.GlobalAveragePooling1D,
            layers.GlobalAveragePooling2D, layers.GlobalMaxPooling1D, layers.GlobalMaxPooling2D,
            layers.LeakyReLU, layers.MaxPooling1D, layers.MaxPooling2D, layers.Permute, layers.ReLU,
            layers.Reshape, layers.ZeroPadding2D,
        )
    )  # fmt: skip
    known.update(dict.fromkeys((layers.Add, layers.Average, layers.Multiply, layers.Subtract)))
    along_axis = (layers.Concatenate, layers.GroupNormalization, layers.LayerNormalization)
    known.update(dict.fromkeys(along_axis, _over_rows))
    known[layers.BatchNormalization] = _unfrozen
    known[layers.Dropout] = _shared_noise
    known[layers.Rescaling] = _scaled_by_row
    known[layers.Resizing] = _not_images
    own = sys.modules.get("tfdpx.layers")  # Which imports this package.
    if own is not None:
        known[own.GroupNorm] = _over_rows
        known.update(dict.fromkeys((own.SkipInit, own.UnitNormWithConstant, own.WSConv2D)))
    return known


def _known_operations():
    return set(model_internals.ARITHMETIC)


def _over_rows(layer, rank):
    axes = np.atleast_1d([] if layer.axis is None else layer.axis)
    return "works along the axis of the batch" if any(axis % rank == 0 for axis in axes) else None


def _unfrozen(layer, rank):
    return "is not frozen" if layer.trainable else _over_rows(layer, rank)


def _shared_noise(layer, rank):
    return None if layer.noise_shape is None else "may share its noise among rows"


def _scaled_by_row(layer, rank):
    # Of channels first, Keras makes an array of three axes of a scale that has any.
    padded = np.ndim(layer.scale) > 0 and keras.config.image_data_format() == "channels_first"
    axes = max(np.ndim(layer.scale), np.ndim(layer.offset), 3 if padded else 0)
    return None if axes < rank else "may scale each row in another way"


def _not_images(layer, rank):
    return None if rank == 4 else "takes the batch for one image"


def _problem_of_layer(layer, check):
    """Str, a clause, or None."""
    problem = None
    replaced = layer_internals.replaced_methods(layer)
    if replaced:
        problem = f"has a `{replaced[0]}` of its own"
    elif id(getattr(layer, "activation", None) or keras.activations.linear) not in _ACTIVATIONS:
        problem = "has an activation that is none of keras.activations"
    elif layer.activity_regularizer is not None:
        problem = "has a regulariser of its output"
    elif getattr(layer, "quantization_mode", None):
        problem = "is quantized"
    elif any(np.ndim(value) for value in vars(layer).values() if _is_array(value)):
        problem = "keeps an array"  # Which may have an axis for the batch.
    for args, kwargs in model_internals.symbolic_calls(layer):
        tensors = [t for t in keras.tree.flatten((args, kwargs)) if _is_tensor(t)]
        problem = problem or _problem_of_shapes(tensors)
        problem = problem or (tensors and check and check(layer, len(tensors[0].shape)))
    return f"{_described(layer)} {problem}" if problem else _problem_of_arguments(layer)


def _problem_of_arguments(layer):
    """Str, a clause, or None."""
    for args, kwargs in model_internals.symbolic_calls(layer):
        inputs = keras.tree.flatten(args[:1])
        others = [value for value in keras.tree.flatten((args[1:], kwargs)) if value is not None]
        if any(not _is_tensor(t) for t in inputs) or any(not isinstance(v, bool) for v in others):
            return f"{_described(layer)} is called with more than its inputs"
    return None


def _problem_of_operands(operation):
    """Str, a clause, or None."""
    problem = None
    for args, kwargs in model_internals.symbolic_calls(operation):
        values = keras.tree.flatten((args, kwargs))
        tensors = [value for value in values if _is_tensor(value)]
        problem = problem or _problem_of_shapes(tensors)
        rank = min(len(t.shape) for t in tensors)
        if any(np.ndim(value) >= rank for value in values if not _is_tensor(value)):
            problem = problem or "has a constant with an axis for the batch"
    return f"{_described(operation)} {problem}" if problem else None


def _problem_of_shapes(tensors):
    ranks, rows = {len(t.shape) for t in tensors}, {t.shape[0] for t in tensors if t.shape}
    if len(ranks) > 1 or len(rows) > 1:
        return "has operands of different ranks"
    return "has an input without axes behind the batch" if min(ranks, default=2) < 2 else None


def _is_array(value):
    return isinstance(value, tf.Tensor | np.ndarray)


def _is_tensor(value):
    return isinstance(value, keras.KerasTensor)


def _described(operation):
    return f"'{operation.name}' (of type {type(operation).__name__})"
