"""Computes norms that allow for the rounding of gradients and sums.

The factor that clips an example is computed from the norm of its gradient. But the array that the
example adds to the released sum has rounding errors, because arithmetic is in float32. So the norm
must include an allowance for these errors.

With u = 2^-24, a sum of n terms errs by at most n u times the sum of their absolute values, in any
order (Higham 2002, Accuracy and Stability of Numerical Algorithms, ch. 4). If the terms cancel,
this error can be larger than the sum itself. A clipped sum may be formed from the inputs a_t and
the output gradients g_t of T positions, without the gradients of single examples. The norm of an
example is then taken to be

    max(|sum_t a_t g_t^T| + (T + 8) u M, M / L),    M = sum_t |a_t| |g_t|,

with L = max(32, 4 sqrt(T)).

The first argument of the maximum bounds the sum of the example's terms, with rounding errors. The
second argument bounds the example's effect on the rounding of other examples: in a partial sum, a
large term absorbs small ones. With the clip C, no term of a sum exceeds L C. So an example changes
the rounding error of a sum of n terms by at most L n u C. The second argument does not affect
ordinary examples, where M is near sqrt(T) times the norm.

If the gradients of all examples are formed and kept, the clipped sum adds exactly these arrays.
Then only the sum of their squares has rounding errors. This sum is taken over one axis at a time,
so no partial sum absorbs many terms.
"""

import contextlib
import math
import threading
import typing

import numpy as np
import tensorflow as tf

from tfdpx._keras.tensorflow_internals import call_cached_trace

UNIT = 2.0**-24
# A sum of n terms has n rounding errors, and this many more: of products, factors and roots.
EXTRA = 8
# How many terms of a long matrix product or convolution a kernel adds one after the other.
_BLOCK = 512
# Inner products of more than `_LONG` terms are formed in parts of `PART` terms. Otherwise their
# allowance for rounding would noticeably raise the norms.
_LONG, PART = 4096, 1024
# The smallest l2 norm that clips. Its square is far above the underflow of float32.
SMALLEST_CLIP = 1e-9
_LARGEST_CANCELLATION = 32.0
# With more positions than this, the allowance would noticeably raise norms of ordinary examples.
MOST_POSITIONS_ALLOWED_FOR = 256
_TINY = 2.0**-126
# This number times the relative error of an inner product is larger than the product's underflow.
_SMALL = 2.0**-100


_active = threading.local()


@contextlib.contextmanager
def from_below():
    """Returns a context manager in which computed norms are lower bounds, not upper bounds.

    Only the current thread is affected. The exact norm lies between the norm inside of this context
    and the norm outside, even if the terms of a gradient cancel.
    """
    _active.is_below = True
    try:
        yield
    finally:
        _active.is_below = False


def _sign():
    """Returns the sign of allowances for rounding: 1.0 by default, and -1.0 within `from_below`."""
    return -1.0 if getattr(_active, "is_below", False) else 1.0


def product_error():
    """Returns the relative error of the multiplications in a matrix product on this machine.

    GPUs round the inputs to TF32 if TensorFlow allows it, as it does by default. TPUs round them to
    bfloat16.
    """
    if tf.config.list_logical_devices("TPU"):
        return 2.0**-7
    if tf.config.list_logical_devices("GPU"):
        if tf.config.experimental.tensor_float_32_execution_enabled():
            return 2.0**-10
    return UNIT


def dot_error(terms):
    """Returns a bound on the relative error of an inner product.

    The error is relative to the sum of the absolute values of all terms.

    Args:
        terms: Int or float32 scalar tensor, the number of terms.
    """
    return (terms + EXTRA) * UNIT + product_error()


def count_sequential_terms(terms):
    """Returns how many terms a kernel adds one after the other in a sum of `terms` terms.

    The sum is an entry of a matrix product or of a convolution.
    """
    return min(terms, _BLOCK + terms / _BLOCK)


def is_long(vectors):
    """Returns whether vectors [..., d] are so long that inner products are formed in parts."""
    return vectors.shape[-1] > _LONG


def split_long(vectors):
    """Splits long vectors [..., d] into n parts, [..., n, m]. Zeros fill up the last part."""
    length, rank = vectors.shape[-1], vectors.shape.rank
    padded = tf.pad(vectors, [[0, 0]] * (rank - 1) + [[0, -length % PART]])
    parts = [-(-length // PART), PART]
    return tf.reshape(padded, tf.concat([tf.shape(vectors)[:-1], parts], axis=0))


def terms_in_line(vectors):
    """Returns how many terms are added one after the other in an inner product of two `vectors`."""
    length = vectors.shape[-1]
    return PART - (-length // PART) if is_long(vectors) else length


def sum_by_axis(tensor, axes, keepdims=False):
    """Sums a tensor over one axis after the other, starting with the last of `axes`.

    The rounding error grows with the sum of the axes' lengths. In a sum over all axes at once, it
    would grow with the product.

    Args:
        tensor: float32 tensor.
        axes: List of axes in rising order. Either all are negative, or none is. An entry may be a
            list of axes, to sum over these at once.
        keepdims: As in `tf.reduce_sum`.
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

    `gradients` is a list of float32 tensors [B, ...]. A norm that overflows is infinite. A square
    that underflows counts as the smallest float32 number.
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
    """Returns the squared l2 norms of float32 vectors [..., d]. They are never too small."""
    squares = tf.square(vectors)
    if not is_long(vectors):
        return raise_for_rounding(tf.reduce_sum(squares, axis=-1), [vectors.shape[-1]])
    squares = split_long(squares)
    return raise_for_rounding(sum_by_axis(squares, [-2, -1]), squares.shape[-2:])


def raise_for_rounding(squares, sizes):
    """Increases sums of squares to upper bounds: adds bounds on rounding errors and underflow.

    Within `from_below`, the function subtracts these, so the results are lower bounds.

    Args:
        squares: float32 tensor, sums of squares that `sum_by_axis` computed.
        sizes: List of the sizes of the axes that were summed over, as `size_of` returns them.
    """
    relative, absolute = errors_of_squares(sizes)
    return squares * (1.0 + _sign() * relative) + _sign() * absolute


def errors_of_squares(sizes):
    """Returns two bounds for sums of squares: on the relative rounding error, and on the underflow.

    Args:
        sizes: As for `raise_for_rounding`.
    """
    return (sum(sizes) + EXTRA) * UNIT, math.prod(sizes) * _TINY


def size_of(tensor, axis):
    """Returns the size of an axis: an int if it is static, else a float32 scalar tensor."""
    static = tensor.shape[axis]
    return tf.cast(tf.shape(tensor)[axis], "float32") if static is None else static


def join_vectors(gradients):
    """Joins small gradients into one tensor, which saves graph nodes.

    A gradient is small if it is a vector [B, length] of static length, or a scalar [B].

    Args:
        gradients: List of float32 tensors [B, ...].

    Returns:
        Triple. The first part is a list with a bool for each gradient, whether it is small. The
        second part is a tensor [B, total length] that joins all small gradients, or None if there
        are none. The third part is a list of the other gradients.
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
    """Pads vectors [B, length], and reshapes them to [B, n, m].

    Because n is near m, a sum over one axis after the other has small rounding errors.
    """
    length = vectors.shape[1]
    width = math.isqrt(length)
    if not width:
        return vectors
    padded = tf.pad(vectors, [[0, 0], [0, -length % width]])
    return tf.reshape(padded, [-1, -(-length // width), width])


class Measured(typing.NamedTuple):
    """The squared norms of the gradients of one kernel, without an allowance for rounding.

    The fields hold all that `add_up` needs to compute the allowances of all kernels at once.

    Attributes:
        squares: float32 [B, 1], the squared norms. Or float32 [B, 3]: a squared norm is then the
            first column minus the second and the third column, which are squares of two inner
            products.
        terms: Int or float32 scalar. A gradient is a sum, and this is its number of terms.
        magnitudes: float32 [B, 1], the sum M of the norms of these terms. None if the clipped sum
            adds the gradients themselves. Then M is the square root of `squares`.
        relative: Float or float32 scalar, the relative rounding error of `squares`.
        absolute: Float or float32 scalar, the absolute error of `squares` by underflow.
        removed_errors: Pair of floats, the rounding errors of the two inner products, divided by M.
        removed_relative: Float, the rounding error of the subtraction, divided by the first column.
    """

    squares: tf.Tensor
    terms: int | float | tf.Tensor
    magnitudes: tf.Tensor | None = None
    relative: float | tf.Tensor = 0.0
    absolute: float | tf.Tensor = 0.0
    removed_errors: tuple = (0.0, 0.0)
    removed_relative: float = 0.0


def add_up(norms):
    """Adds up squared norms, with allowances for rounding. Returns float32 [B].

    Args:
        norms: List of squared norms. Each is a float32 [B] that includes its allowance, or a
            `Measured`, to which the function adds the allowance.
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
    """Adds up a list of `Measured`s, with their allowances. Returns float32 [B].

    All have the same number of columns in `squares`, and all or none have `magnitudes`.
    """
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
    """Stacks a list of numbers to the shape [length, 1, 1].

    The result is a tensor if one of `numbers` is a tensor, otherwise a NumPy array.
    """
    if any(tf.is_tensor(number) for number in numbers):
        numbers = tf.stack([tf.cast(number, "float32") for number in numbers])
        return tf.reshape(numbers, [-1, 1, 1])
    return np.array(numbers, "float64")[:, np.newaxis, np.newaxis]


def allow(squares, magnitudes, terms):
    """Returns squared norms with an allowance for rounding. Clip factors are computed from these.

    Args:
        squares: float32 [...], squared norms, never too small.
        magnitudes: float32 [...], the M that the module's docstring defines.
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
    """Returns the squared norm of a gradient A^T G from inner products of positions, and its M.

    The rows of A and G are the inputs a_t and the output gradients g_t at an example's T positions.
    The module's docstring defines M.

    The squared norm is the sum of <a_s, a_t> <g_s, g_t> over all T^2 pairs of positions. The error
    of <a_s, a_t> is at most e_in |a_s| |a_t|, and the error of <g_s, g_t> is at most
    e_out |g_s| |g_t|. Adding the T^2 products causes an error of at most 2 T u times each product.
    The result includes all three errors. For underflow, |a_t| and |g_t| are first increased a
    little.

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
    """Computes `squared_norms_of_products`, with the result of `_sign` and the bounds on errors."""
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
