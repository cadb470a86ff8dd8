"""Norms that allow for the rounding of gradients and sums.

An example is clipped by a norm, but it adds the result of float32 arithmetic to the released sum.
With u = 2^-24, a sum of n terms errs by at most n u times the sum of their absolute values, in any
order (Higham 2002, Accuracy and Stability of Numerical Algorithms, ch. 4). If gradients cancel,
this error is larger than the gradient itself. If the clipped sum is formed from inputs a_t and
output gradients g_t of T positions (for example after every ghost norm), an example is clipped by

    max(|sum_t a_t g_t^T| + (T + 8) u M, M / L),    M = sum_t |a_t| |g_t|,

with L = max(32, 4 sqrt(T)).

The first argument of the maximum bounds the sum of the example's terms, rounding included. The
second bounds the example's effect on the rounding of others, because a partial sum with a large
term absorbs small ones. It keeps the terms of a sum below L C, so n terms in one sum change by at
most L n u C. It does not change ordinary examples, because their M is near sqrt(T) times their
norm.

If the gradients of all examples are formed and kept, the clipped sum adds exactly these arrays, and
only the sum of their squares can err. This sum runs over one axis at a time, so no partial sum
absorbs many terms.
"""

import contextlib
import math
import threading
import typing

import numpy as np
import tensorflow as tf

from tfdpx._keras.tensorflow_internals import call_cached_trace

UNIT = 2.0**-24
# Roundings of a sum in addition to its terms: products, factors, roots.
EXTRA = 8
# How many terms of a long matrix product or convolution a kernel adds one after the other.
_BLOCK = 512
# Inner products of more than `_LONG` terms are formed in parts of `PART`, or their allowance for
# rounding would be visible.
_LONG, PART = 4096, 1024
# The smallest l2 norm that clips. Its square is far above the underflow of float32.
SMALLEST_CLIP = 1e-9
_LARGEST_CANCELLATION = 32.0
# With more positions than this, the allowance would be visible in the norms of ordinary examples.
MOST_POSITIONS_ALLOWED_FOR = 256
_TINY = 2.0**-126
# Times the relative error of an inner product, this is above the underflow of that product.
_SMALL = 2.0**-100


_active = threading.local()


@contextlib.contextmanager
def from_below():
    """Context manager in which norms are never too large, instead of never too small.

    It acts in this thread. The exact norm lies between both, however much of its sum cancels.
    """
    _active.is_below = True
    try:
        yield
    finally:
        _active.is_below = False


def _sign():
    """Returns the sign of allowances for rounding: 1.0, or -1.0 within `from_below`."""
    return -1.0 if getattr(_active, "is_below", False) else 1.0


def product_error():
    """Returns the relative error of one product in a matrix product on this machine, a float.

    GPUs round inputs to TF32 if TensorFlow allows it (its default), TPUs to bfloat16.
    """
    if tf.config.list_logical_devices("TPU"):
        return 2.0**-7
    if tf.config.list_logical_devices("GPU"):
        if tf.config.experimental.tensor_float_32_execution_enabled():
            return 2.0**-10
    return UNIT


def dot_error(terms):
    """Returns a bound on the error of an inner product, relative to the sum of its terms' sizes.

    Args:
        terms: Int or float32 scalar tensor, the number of terms.
    """
    return (terms + EXTRA) * UNIT + product_error()


def count_sequential_terms(terms):
    """Returns the number of terms that a matrix product or convolution adds one after the other."""
    return min(terms, _BLOCK + terms / _BLOCK)


def is_long(vectors):
    """Returns whether inner products of float32 vectors [..., d] are formed in parts."""
    return vectors.shape[-1] > _LONG


def split_long(vectors):
    """Splits long vectors [..., d] into parts [..., n, m], the last one filled up with zeros."""
    length, rank = vectors.shape[-1], vectors.shape.rank
    padded = tf.pad(vectors, [[0, 0]] * (rank - 1) + [[0, -length % PART]])
    parts = [-(-length // PART), PART]
    return tf.reshape(padded, tf.concat([tf.shape(vectors)[:-1], parts], axis=0))


def terms_in_line(vectors):
    """Returns how many terms an inner product of vectors [..., d] adds one after the other."""
    length = vectors.shape[-1]
    return PART - (-length // PART) if is_long(vectors) else length


def sum_by_axis(tensor, axes, keepdims=False):
    """Sums over one axis after the other, the last of `axes` first.

    The rounding error grows with the sum of the axes' lengths, not with their product.

    Args:
        tensor: float32.
        axes: List of axes in rising order, all negative or none. An entry may be a list of axes,
            which are summed over at once.
        keepdims: See `tf.reduce_sum`.
    """
    rank = tensor.shape.rank
    for place, axis in enumerate(reversed(axes)):
        if place:  # This changes nothing, but without it XLA would join two sums to a long one.
            tensor = tf.maximum(tensor, tf.float32.min)
        axis = np.mod(axis, rank)
        tensor = tf.reduce_sum(tensor, axis, keepdims=keepdims)
    return tensor


def squared_norms(gradients):
    """Returns the squared l2 norm of each example's gradients, float32 [B], never too small.

    `gradients` is a list of float32 tensors [B, ...]. An overflow is infinite. A square that
    underflows counts as the smallest number.
    """
    _, vectors, other_gradients = join_vectors(gradients)
    norms = []
    for gradient in (
        other_gradients if vectors is None else [_split_rows(vectors), *other_gradients]
    ):
        shape = gradient.shape[1:]
        if shape.is_fully_defined() and max(shape) > _LONG:
            gradient = _split_rows(tf.reshape(gradient, [tf.shape(gradient)[0], math.prod(shape)]))
        axes = list(range(1, gradient.shape.rank))
        squares = sum_by_axis(tf.square(gradient), axes)
        norms.append(raise_for_rounding(squares, [size_of(gradient, axis) for axis in axes]))
    return tf.add_n(norms)


def squared_lengths(vectors):
    """Returns squared l2 norms of float32 vectors [..., d], never too small."""
    squares = tf.square(vectors)
    if not is_long(vectors):
        return raise_for_rounding(tf.reduce_sum(squares, axis=-1), [vectors.shape[-1]])
    squares = split_long(squares)
    return raise_for_rounding(sum_by_axis(squares, [-2, -1]), squares.shape[-2:])


def raise_for_rounding(squares, sizes):
    """Returns sums of squares, raised by the bounds on rounding and underflow.

    Args:
        squares: float32 tensor of sums that `sum_by_axis` made of float32 squares.
        sizes: List of the sizes of the axes that were summed over, as `size_of` gives them.
    """
    relative, absolute = errors_of_squares(sizes)
    return squares * (1.0 + _sign() * relative) + _sign() * absolute


def errors_of_squares(sizes):
    """Returns bounds on the relative rounding and the absolute underflow of sums of squares.

    Args:
        sizes: As for `raise_for_rounding`.
    """
    return (sum(sizes) + EXTRA) * UNIT, math.prod(sizes) * _TINY


def size_of(tensor, axis):
    """Returns the size of an axis: an int if it is static, else a float32 scalar tensor."""
    static = tensor.shape[axis]
    return tf.cast(tf.shape(tensor)[axis], "float32") if static is None else static


def join_vectors(gradients):
    """Joins all vectors in a list of float32 tensors [B, ...], because each costs graph nodes.

    Returns:
        Triple. The first part is a list of bools, whether each of `gradients` is a vector [B,
        length] of static length or a scalar [B]. The second is a tensor [B, total length] that
        joins them, or None without any. The third is a list of the others.
    """
    small = [g.shape.rank < 3 and g.shape[1:].is_fully_defined() for g in gradients]
    vectors = [
        g if g.shape.rank == 2 else tf.expand_dims(g, 1)
        for g, flag in zip(gradients, small, strict=True)
        if flag
    ]
    other_gradients = [g for g, flag in zip(gradients, small, strict=True) if not flag]
    return small, tf.concat(vectors, axis=1) if vectors else None, other_gradients


def _split_rows(vectors):
    """Splits padded vectors [B, length] into [B, n, m] with n near m, so sums err less."""
    length = vectors.shape[1]
    width = math.isqrt(length)
    if not width:
        return vectors
    padded = tf.pad(vectors, [[0, 0], [0, -length % width]])
    return tf.reshape(padded, [-1, -(-length // width), width])


class Measured(typing.NamedTuple):
    """Squared norms of the gradients at one kernel, without an allowance for rounding.

    The engine computes the allowances of all kernels at once, from the tensors and numbers here.

    Attributes:
        squares: float32 [B, 1], the squared norms. Or [B, 3]: the other two columns are squares of
            inner products, which must be subtracted from the first.
        terms: Int or float32 scalar, how many terms are added up.
        magnitudes: float32 [B, 1], M, the sum of the sizes of the terms. None means the root of
            `squares`, for gradients that are kept and added themselves.
        relative: Float or float32 scalar, the relative rounding error of `squares`.
        absolute: Float or float32 scalar, the absolute error of `squares` by underflow.
        removed_errors: Two floats, the error of each inner product as a share of M.
        removed_relative: Float, the error of the subtraction as a share of `squares`.
    """

    squares: tf.Tensor
    terms: int | float | tf.Tensor
    magnitudes: tf.Tensor | None = None
    relative: float | tf.Tensor = 0.0
    absolute: float | tf.Tensor = 0.0
    removed_errors: tuple = (0.0, 0.0)
    removed_relative: float = 0.0


def add_up(norms):
    """Returns the sum of squared norms with an allowance for rounding, float32 [B].

    Args:
        norms: List of squared norms, each float32 [B] or a `Measured`. `Measured`s of one kind are
            handled together.
    """
    total, kinds = [], {}
    for norm in norms:
        if isinstance(norm, Measured):
            kind = norm.squares.shape[1], norm.magnitudes is None
            kinds.setdefault(kind, []).append(norm)
        else:
            total.append(norm)
    return tf.add_n([*total, *map(_allow_together, kinds.values())])


def _allow_together(measured):
    """Returns the sum over `Measured`s of one kind with their allowances, float32 [B]."""
    squares, inner_squares = tf.stack([norm.squares for norm in measured]), None
    if squares.shape[2] > 1:
        squares, inner_squares = tf.split(squares, [1, 2], axis=2)  # [kernels, B, 1 or 2].
    relative = [1.0 + _sign() * norm.relative for norm in measured]
    absolute = [_sign() * norm.absolute for norm in measured]
    squares = squares * _column(relative) + _column(absolute)
    if measured[0].magnitudes is None:
        magnitudes = tf.sqrt(squares)
    else:
        magnitudes = tf.stack([norm.magnitudes for norm in measured])
    if inner_squares is not None:
        errors = magnitudes * np.array([[norm.removed_errors] for norm in measured])
        slack = tf.reduce_sum(errors * (2.0 * tf.sqrt(inner_squares) + errors), 2, keepdims=True)
        slack += squares * _column([norm.removed_relative for norm in measured])
        difference = squares - tf.reduce_sum(inner_squares, 2, keepdims=True)
        squares = tf.maximum(difference, 0.0) + _sign() * slack
    bounds = allow(squares, magnitudes, _column([norm.terms for norm in measured]))
    return tf.reduce_sum(bounds, axis=[0, 2])


def _column(numbers):
    """Stacks numbers or scalar tensors to [length, 1, 1]; numbers alone to a NumPy array."""
    if any(tf.is_tensor(number) for number in numbers):
        numbers = tf.stack([tf.cast(number, "float32") for number in numbers])
        return tf.reshape(numbers, [-1, 1, 1])
    return np.array(numbers, "float64")[:, np.newaxis, np.newaxis]


def allow(squares, magnitudes, terms):
    """Returns the squares of the norms to clip by, float32 [...].

    Args:
        squares: float32 [...], squared norms, not too small.
        magnitudes: float32 [...], M, the sum of the sizes of the terms.
        terms: Number of terms: an int, or a float32 tensor or NumPy array that broadcasts to
            `squares`.
    """
    if _sign() < 0:
        return tf.maximum(squares, 0.0)
    # Ordinary examples have M up to about sqrt(terms) times their norm.
    if tf.is_tensor(terms):
        largest = tf.maximum(_LARGEST_CANCELLATION, 4.0 * tf.sqrt(terms))
    else:
        largest = np.maximum(_LARGEST_CANCELLATION, 4.0 * np.sqrt(terms))
    norms = tf.sqrt(squares) + dot_error(terms) * magnitudes
    lower = magnitudes * (1.0 / largest)
    # The maximum keeps values that are not finite.
    return tf.square(tf.where(norms < lower, lower, norms))


def squared_norms_of_products(inputs, output_gradients, fan_in, fan_out):
    """Returns |A^T G|^2 from inner products of positions, and its M.

    An inner product of inputs errs by e_in |a_s| |a_t|, one of gradients by e_out |g_s| |g_t|, and
    the sum of the T^2 products by 2 T u times each product. These errors are added. The squared
    lengths are raised until e |a_s| |a_t| also covers underflow.

    Args:
        inputs: A A^T, float32 [B, groups, T, T].
        output_gradients: G G^T, float32 [B, groups, T, T].
        fan_in: Int, the number of terms in an inner product of inputs.
        fan_out: Int, the number of terms in an inner product of output gradients.

    Returns:
        Two tensors [B, groups]: the squared norm, never too small, and M.
    """
    count = size_of(inputs, 2)
    # For each pair of positions, five products may underflow.
    product_errors = (2 * count + EXTRA) * UNIT, 5 * count**2 * _TINY
    numbers = [n for fan in (fan_in, fan_out) for n in (fan * _SMALL, dot_error(fan))]
    return call_cached_trace(
        _square_norms_of_products,
        (_sign(),),
        inputs,
        output_gradients,
        tf.stack([*numbers, *product_errors]),
    )


def _square_norms_of_products(sign, inputs, output_gradients, numbers):
    """Does `squared_norms_of_products` with the errors in `numbers`."""
    *gram_errors, relative_error, absolute_error = tf.unstack(numbers)
    sizes, slack = [], []
    for gram, least, error in (inputs, *gram_errors[:2]), (output_gradients, *gram_errors[2:]):
        sizes.append(tf.sqrt(tf.linalg.diag_part(gram) + least))
        slack.append(tf.expand_dims(error * sizes[-1], -1) * tf.expand_dims(sizes[-1], -2))
    absolute_in, absolute_out = tf.abs(inputs), tf.abs(output_gradients)
    slack = absolute_out * (slack[0] + relative_error * absolute_in) + absolute_in * slack[1]
    total = sum_by_axis(inputs * output_gradients, [2, 3])
    slack = tf.reduce_sum(slack, [2, 3]) + absolute_error
    squares = tf.maximum(total, 0.0) + sign * slack
    return squares, tf.reduce_sum(sizes[0] * sizes[1], axis=2)
