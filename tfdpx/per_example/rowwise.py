"""Lists the layers, operations and losses that treat each row by itself.

If all parts of a model are listed, the private step runs it on all rows at once instead of mapping
it over examples. The list fails closed: a model with an unlisted layer, operation or argument is
mapped. Classes are compared by identity, never by name. A layer does not count as listed if a
method was replaced on the object.
"""

import functools
import inspect

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals

_RECURRENT = keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN, keras.layers.RNN
_MASKED = *_RECURRENT, keras.layers.Bidirectional, keras.layers.GlobalAveragePooling1D
_CELLS = keras.layers.LSTMCell, keras.layers.GRUCell, keras.layers.SimpleRNNCell

_LOSS_CLASSES = {
    model_internals.FUNCTION_LOSS,
    keras.losses.BinaryCrossentropy, keras.losses.CategoricalCrossentropy, keras.losses.Huber,
    keras.losses.MeanAbsoluteError, keras.losses.MeanSquaredError,
    keras.losses.SparseCategoricalCrossentropy,
}  # fmt: skip
_LOSSES = {
    id(function)
    for function in (
        keras.losses.binary_crossentropy, keras.losses.categorical_crossentropy,
        keras.losses.huber, keras.losses.mean_absolute_error, keras.losses.mean_squared_error,
        keras.losses.sparse_categorical_crossentropy,
    )
}  # fmt: skip


# Dict from each registered layer class to None, or to its `problem_of`, see `register_rowwise`.
_layers = {}


def register_rowwise(*layer_classes, problem_of=None):
    """Registers layer classes that treat each row by itself.

    This must hold for all calls without arguments other than the inputs. The privacy guarantee
    depends on it: a registered layer is not mapped, even if it mixes rows.

    Args:
        *layer_classes: Classes of `keras.layers.Layer`. Their subclasses are not registered.
        problem_of: Optional function `problem_of(layer, rank)`, which takes a layer and the rank of
            the layer's input. It returns a str that says why this layer may mix rows, or None if
            the layer does not mix rows.
    """
    _layers.update(dict.fromkeys(layer_classes, problem_of))


def find_obstacle(model):
    """Returns the first reason why a model may mix rows.

    Args:
        model: A built `keras.Model`.

    Returns:
        Str, a clause. None if all parts of the model are listed, so each row is treated by itself.
    """
    graph = model_internals.plain_graph(model)
    if graph is None:
        return (
            f"model '{model.name}' (of type {type(model).__name__}) is neither a Sequential model "
            "of known inputs nor a functional one"
        )
    for part in {id(m): m for m in (model, graph)}.values():
        if methods := layer_internals.replaced_methods(part):
            return f"model '{model.name}' overrides `{methods[0]}`"
    for operation in graph.operations:
        if isinstance(operation, keras.Model):
            problem = find_obstacle(operation) or _problem_of_arguments(operation)
        elif type(operation) in _operations:
            problem = _problem_of_operands(operation, _operations[type(operation)])
        elif type(operation) in _layers:
            problem = _problem_of_layer(operation, _layers[type(operation)])
        else:
            problem = f"{_describe(operation)} is not known to treat each row by itself"
        if problem:
            return problem
    return None


def find_loss(model, y, y_pred):
    """Returns the loss of a model if this loss is known to treat each row by itself, else None.

    Args:
        model: A compiled `keras.Model` with built losses, for which `find_obstacle` returned None.
        y: Nest of tensors [rows, ...], or None.
        y_pred: The model's output, a nest of tensors [rows, ...].
    """
    loss, function, arguments = model_internals.single_loss(model) or (None, None, {})
    if type(loss) not in _LOSS_CLASSES or id(function) not in _LOSSES:
        return None
    if layer_internals.replaced_methods(loss) or layer_internals.adding_losses(model):
        return None
    # An array among the arguments may have a batch axis, and `ignore_class` makes a mask.
    has_numbers = all(np.ndim(v) == 0 and not tf.is_tensor(v) for v in arguments.values())
    is_masked = arguments.get("ignore_class") is not None
    if not has_numbers or is_masked or arguments.get("axis", -1) != -1:
        return None
    if not tf.is_tensor(y) or not tf.is_tensor(y_pred) or y_pred.shape.rank < 2:
        return None
    is_sparse = function is keras.losses.sparse_categorical_crossentropy
    if is_sparse and y_pred.shape.rank > 2:
        return None  # TensorFlow would add assertions on shapes that are not static.
    # Operands of different ranks are aligned at their last axes. Then the batch axis of one operand
    # would be aligned with another axis of the other.
    lacks_axis = is_sparse or y_pred.shape[-1] == 1
    ranks = {y_pred.shape.rank, y_pred.shape.rank - 1 if lacks_axis else y_pred.shape.rank}
    return loss if y.shape.rank in ranks else None


def has_plain_cells(layer):
    """Returns whether a layer is a recurrent layer of Keras, not stateful, with Keras's cells."""
    if type(layer) not in _RECURRENT or layer.stateful:
        return False
    cells = cells_of(layer)
    if any(type(cell) not in _CELLS or not _has_plain_activations(cell) for cell in cells):
        return False
    weights = [weight for cell in cells for weight in cell.trainable_variables]
    if len(weights) > len({id(weight) for weight in weights}):
        return False  # A cell occurs twice: two parts of a gradient would be normed separately.
    is_stacked = type(layer.cell) is keras.layers.StackedRNNCells
    if layer.cell is not cells[0] and not (is_stacked and len(cells) > 1):
        return False
    parts = [layer, layer.cell, *cells]
    if any(map(layer_internals.replaced_methods, parts)) or any(map(_keeps_array, parts)):
        return False
    return all(max(cell.dropout, cell.recurrent_dropout) < 1 for cell in cells)


def cells_of(layer):
    """Returns a list of the cells of a recurrent layer."""
    return list(getattr(layer.cell, "cells", [layer.cell]))


def _has_plain_activations(part):
    names = "activation", "recurrent_activation"
    functions = [getattr(part, name, None) or keras.activations.linear for name in names]
    return all(map(layer_internals.is_activation, functions))


def _unknown_cells(layer, rank):
    return None if has_plain_cells(layer) else "has other cells than Keras's"


def _unknown_directions(layer, rank):
    parts = layer.forward_layer, layer.backward_layer
    is_known = all(has_plain_cells(part) and part.activity_regularizer is None for part in parts)
    return None if is_known else "has other layers than Keras's"


def _masked_by_row(layer, rank):
    return "may mask each row in another way" if np.ndim(layer.mask_value) else None


def over_rows(layer, rank):
    """Returns a reason why a layer mixes rows if its `axis` is the batch axis, otherwise None."""
    axes = np.atleast_1d([] if layer.axis is None else layer.axis)
    return "works along the axis of the batch" if any(axis % rank == 0 for axis in axes) else None


def _over_all(operation, rank):
    return "works along all axes" if operation.axis is None else over_rows(operation, rank)


def _unfrozen(layer, rank):
    return "is not frozen" if layer.trainable else over_rows(layer, rank)


def _shared_noise(layer, rank):
    return None if layer.noise_shape is None else "may share its noise among rows"


def _scaled_by_row(layer, rank):
    # With channels first, Keras reshapes a scale with axes to three axes.
    is_padded = np.ndim(layer.scale) > 0 and keras.config.image_data_format() == "channels_first"
    num_axes = max(np.ndim(layer.scale), np.ndim(layer.offset), 3 if is_padded else 0)
    return None if num_axes < rank else "may scale each row in another way"


def _not_images(layer, rank):
    return None if rank == 4 else "takes the batch for one image"


def _attends_otherwise(layer, rank):
    changed = layer_internals.changed_attention(layer)
    if changed:
        return f"has another `{changed[0]}` than Keras's"
    if rank != 3:
        return "has inputs of other than three axes"
    parts = (part for part in vars(layer).values() if isinstance(part, keras.Layer))
    problems = ((part, _problem_of_part(part)) for part in parts)
    return next(
        (f"has '{part.name}', which {problem}" for part, problem in problems if problem), None
    )


def _problem_of_part(layer):
    """Returns a reason why a layer may mix rows, whatever its inputs are; or None."""
    methods = layer_internals.replaced_methods(layer)
    if methods:
        return f"overrides `{methods[0]}`"
    if not _has_plain_activations(layer):
        return "has an activation that is none of keras.activations"
    if layer.activity_regularizer is not None:
        return "has a regulariser of its output"
    if getattr(layer, "quantization_mode", None):
        return "is quantized"
    # An array may have an axis for the batch.
    return "keeps an array" if _keeps_array(layer) else None


def _problem_of_layer(layer, check):
    """Returns a reason why a layer may mix rows in the calls that the model makes, or None.

    `check` is the layer's `problem_of`, see `register_rowwise`.
    """
    problem = _problem_of_part(layer)
    for args, kwargs in _calls(layer):
        tensors = [t for t in keras.tree.flatten((args, kwargs)) if _is_tensor(t)]
        problem = problem or _problem_of_shapes(tensors)
        problem = problem or (tensors and check and check(layer, len(tensors[0].shape)))
    return f"{_describe(layer)} {problem}" if problem else _problem_of_arguments(layer)


def _problem_of_arguments(layer):
    """Returns a reason why a layer may mix rows because of the arguments of its calls, or None."""
    for args, kwargs in _calls(layer):
        inputs = keras.tree.flatten(args[:1])
        arguments = [value for value in keras.tree.flatten((args[1:], kwargs)) if value is not None]
        if any(not _is_tensor(t) for t in inputs) or any(
            not isinstance(v, bool) for v in arguments
        ):
            return f"{_describe(layer)} is called with more than its inputs"
    return None


def _calls(layer):
    """Yields (args, kwargs) of each call of a layer. Masks that cannot mix rows are left out."""
    for args, kwargs in model_internals.symbolic_calls(layer):
        mask, inputs = kwargs.get("mask"), keras.tree.flatten(args[:1])
        if type(layer) in _MASKED and _is_tensor(mask) and all(map(_is_tensor, inputs)):
            # The mask is [rows, time steps], and the inputs are [rows, time steps, features].
            if (len(mask.shape), *(len(t.shape) for t in inputs)) == (2, 3):
                kwargs = {**kwargs, "mask": None}
        if type(layer) in layer_internals.ATTENTION:
            arguments = inspect.signature(layer.call).bind(*args, **kwargs).arguments
            names = "query", "value", "key", "attention_mask"
            # If `attention_mask` has fewer axes than queries, Keras adds axes in front, so its rows
            # would become positions. So it is checked like an input. A mask [rows, positions] that
            # the inputs carry is safe, because Keras adds axes behind.
            args = ([arguments.pop(n) for n in names if arguments.get(n) is not None],)
            kwargs = arguments
        yield args, kwargs


def _problem_of_operands(operation, check):
    """Returns a reason why an operation may mix rows because of its operands, or None.

    `check` is a function of the operation and the rank of its operands that returns such a reason;
    or None.
    """
    problem = None
    for args, kwargs in model_internals.symbolic_calls(operation):
        values = keras.tree.flatten((args, kwargs))
        tensors = [value for value in values if _is_tensor(value)]
        problem = problem or _problem_of_shapes(tensors)
        rank = min(len(t.shape) for t in tensors)
        if any(np.ndim(value) >= rank for value in values if not _is_tensor(value)):
            problem = problem or "has a constant with an axis for the batch"
        problem = problem or (check and check(operation, rank))
    return f"{_describe(operation)} {problem}" if problem else None


def _problem_of_shapes(tensors):
    ranks, rows = {len(t.shape) for t in tensors}, {t.shape[0] for t in tensors if t.shape}
    if len(ranks) > 1 or len(rows) > 1:
        return "has operands of different ranks"
    return "has an input without axes behind the batch" if min(ranks, default=2) < 2 else None


def _keeps_array(layer):
    """Returns whether an attribute of a layer is an array, or an object where a number belongs."""
    kinds = tf.Tensor, tf.Variable, np.ndarray
    arrays = (value for value in vars(layer).values() if isinstance(value, kinds))
    numbers = (getattr(layer, name, 0.0) for name in _names_of_numbers(type(layer)))
    allowed = int, float, keras.Variable
    return any(map(np.ndim, arrays)) or any(not isinstance(n, allowed) for n in numbers)


@functools.cache
def _names_of_numbers(layer_class):
    """Returns the names of the constructor arguments with a float as the default."""
    constructors = [vars(base).get("__init__", object) for base in layer_class.__mro__]
    signatures = [inspect.signature(constructor) for constructor in constructors]
    parameters = [p for signature in signatures for p in signature.parameters.values()]
    # `_scaled_by_row` checks `offset`.
    return [p.name for p in parameters if type(p.default) is float and p.name != "offset"]


def _is_tensor(value):
    return isinstance(value, keras.KerasTensor)


def _describe(operation):
    return f"'{operation.name}' (of type {type(operation).__name__})"


_keras = keras.layers
register_rowwise(
    _keras.InputLayer, _keras.Activation, _keras.AveragePooling1D, _keras.AveragePooling2D,
    _keras.Conv2D, _keras.Cropping2D, _keras.Dense, _keras.DepthwiseConv2D, _keras.Embedding,
    _keras.Flatten, _keras.GlobalAveragePooling1D, _keras.GlobalAveragePooling2D,
    _keras.GlobalMaxPooling1D, _keras.GlobalMaxPooling2D, _keras.LeakyReLU, _keras.MaxPooling1D,
    _keras.MaxPooling2D, _keras.Permute, _keras.ReLU, _keras.Reshape, _keras.ZeroPadding2D,
    _keras.Add, _keras.Average, _keras.Multiply, _keras.Subtract,
)  # fmt: skip
register_rowwise(
    *(_keras.Concatenate, _keras.GroupNormalization, _keras.LayerNormalization),
    problem_of=over_rows,
)
register_rowwise(_keras.BatchNormalization, problem_of=_unfrozen)
register_rowwise(*_RECURRENT, problem_of=_unknown_cells)
register_rowwise(_keras.Bidirectional, problem_of=_unknown_directions)
register_rowwise(*layer_internals.ATTENTION, problem_of=_attends_otherwise)
register_rowwise(_keras.Dropout, problem_of=_shared_noise)
register_rowwise(_keras.Masking, problem_of=_masked_by_row)
register_rowwise(_keras.Rescaling, problem_of=_scaled_by_row)
register_rowwise(_keras.Resizing, problem_of=_not_images)

# As `_layers`, for operations: arithmetic, and operations on masks.
_operations = {
    **dict.fromkeys((*model_internals.ARITHMETIC, model_internals.NOT_EQUAL)),
    model_internals.ANY: _over_all,
}
