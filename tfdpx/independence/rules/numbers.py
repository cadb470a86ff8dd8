"""Shapes, axes and indices: which whole numbers, or products with the number of rows, they hold."""

import numpy as np
import tensorflow as tf

from tfdpx.independence._values import Fixed, NotProvable, Sized, Unknown
from tfdpx.independence.lengths import Length, product
from tfdpx.independence.registry import of_numbers, whatever
from tfdpx.independence.rules.picking import kinds

# More numbers than any shape has are not followed.
_MOST = 64


@whatever("Shape ShapeN Size Rank")
def shape_of(site, *inputs):
    """Lengths of axes, whatever stands along them."""
    tensors = site.operation.inputs
    return [_measured(site, *pair) for pair in zip(tensors, inputs, strict=True)]


def _measured(site, tensor, value):
    if tensor.shape.is_fully_defined():
        lengths = tuple(Length(n) for n in tensor.shape)
    elif isinstance(value, Unknown):
        return value
    elif getattr(value, "shape", None) is None:
        if not isinstance(value, Sized):
            raise NotProvable("its input has an unknown shape")
        return Sized(None)
    else:
        lengths = value.shape
    kind = site.operation.type
    content = {"Size": (product(lengths),), "Rank": (Length(len(lengths)),)}.get(kind, lengths)
    shape = () if kind in ("Size", "Rank") else (Length(len(lengths)),)
    made = Sized if any(n.counts_rows for n in content) else Fixed
    return made(shape, tuple(content))


@of_numbers("Cast Identity StopGradient EnsureShape")
def kept(site, x):
    """The same numbers, if they stay whole."""
    return x if _is_whole(site) else None


@of_numbers("Pack")
def packed(site, *inputs):
    """One more axis."""
    return np.stack(inputs, axis=site.attribute("axis"))


@of_numbers("ConcatV2")
def joined(site, *inputs):
    """One behind the other."""
    *inputs, axis = inputs
    return np.concatenate(inputs, axis=_int(axis))


@of_numbers("StridedSlice")
def sliced(site, x, begin, end, strides):
    """As Python slices."""
    numbers = [_ints(n) for n in (begin, end, strides)]
    if None in numbers:
        return None
    begin, end, strides = numbers
    masks = [site.attribute(f"{name}_mask") for name in ("begin", "end")]
    index = []
    for n, kind in enumerate(kinds(site, len(begin), x.ndim)):
        first = None if masks[0] >> n & 1 else begin[n]
        last = None if masks[1] >> n & 1 else end[n]
        part = slice(first, last, strides[n])
        index.append({"new": np.newaxis, "rest": ..., "one": begin[n]}.get(kind, part))
    picked = x[tuple(index)]
    return picked if isinstance(picked, np.ndarray) else _scalar(picked)


@of_numbers("Slice")
def cut(site, x, begin, size):
    """A part of each axis."""
    begin, size = _ints(begin), _ints(size)
    if begin is None or size is None:
        return None
    ends = [None if n == -1 else b + n for b, n in zip(begin, size, strict=True)]
    return x[tuple(map(slice, begin, ends))]


@of_numbers("GatherV2")
def looked_up(site, x, indices, axis):
    """Entries at indices."""
    wanted = _ints(indices)
    if wanted is None or site.attribute("batch_dims"):
        return None
    return np.take(x, np.reshape(wanted, indices.shape).astype(int), axis=_int(axis))


@of_numbers("Prod")
def multiplied(site, x, axes):
    """The product of a vector."""
    if not axes.size:
        return x
    return _scalar(product(x)) if x.ndim == 1 and not site.attribute("keep_dims") else None


@of_numbers("Reshape")
def reshaped(site, x, shape):
    """The same numbers in another shape."""
    shape = _ints(shape)
    return None if shape is None else x.reshape(shape)


@of_numbers("ExpandDims Squeeze")
def expanded(site, x, *_):
    """The same numbers with more or fewer axes of length 1."""
    shape = site.static()
    return None if shape is None or None in shape else x.reshape(shape)


@of_numbers("Mul")
def product_of(site, a, b):
    """Products; broadcast."""
    return a * b if _is_whole(site) else None


@of_numbers("FloorDiv")
def quotient(site, a, b):
    """Quotients that are known to be whole, and those of known numbers."""
    a, b = np.broadcast_arrays(a, b)
    quotients = [_quotient(x, y) for x, y in zip(a.flat, b.flat, strict=True)]
    return (
        None
        if None in quotients
        else np.array([*quotients, None], dtype=object)[:-1].reshape(a.shape)
    )


def _quotient(x, y):
    if x.known is not None and y.known:
        return Length(x.known // y.known)
    return x.over(y) if y.factor > 0 else None


_OF_INTS = {
    "Add": np.add,
    "AddV2": np.add,
    "Sub": np.subtract,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "FloorMod": np.mod,
    "Neg": np.negative,
    "Range": lambda start, limit, delta: np.arange(int(start), int(limit), int(delta)),
    "Fill": lambda shape, value: np.full(shape, value),
    "ReverseV2": lambda x, axes: np.flip(x, tuple(axes)),
}


@of_numbers(" ".join(_OF_INTS))
def of_ints(site, *inputs):
    """What NumPy gives, where all is known and whole."""
    if not _is_whole(site):
        return None
    numbers = [_ints(array) for array in inputs]
    if None in numbers:
        return None
    shaped = [np.reshape(n, a.shape).astype(int) for n, a in zip(numbers, inputs, strict=True)]
    found = np.asarray(_OF_INTS[site.operation.type](*shaped))
    if found.size > _MOST:
        return None
    made = np.empty(found.shape, dtype=object)
    made[...] = [[]] if not found.size else np.vectorize(Length, otypes=[object])(found.astype(int))
    return made


def _is_whole(site):
    """Whether the output holds whole numbers of a size that shapes have."""
    return site.operation.outputs[0].dtype in (tf.int32, tf.int64)


def _ints(array):
    """The numbers as a list of ints; None if one is not known."""
    numbers = [length.known for length in array.flat]
    return None if None in numbers else numbers


def _int(array):
    [number] = _ints(array) or [None]
    if number is None:
        raise NotProvable("an axis is not known")
    return number


def _scalar(length):
    made = np.empty((), dtype=object)
    made[()] = length
    return made
