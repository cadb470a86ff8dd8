"""What rounding can hide of a gradient, and norms that allow for it.

An example is clipped by a norm, but what it adds to the released sum is the result of float32
arithmetic. With u = 2^-24, a sum of n terms errs by at most n u times the sum of their sizes, in
any order (Higham 2002, Accuracy and Stability of Numerical Algorithms, ch. 4). For gradients that
cancel, that is more than the gradient itself. So where the clipped sum is formed from inputs a_t
and output gradients g_t (as after every ghost norm), an example is clipped by

    max(|sum_t a_t g_t^T| + (T + 8) u M, M / L),    M = sum_t |a_t| |g_t|,

with L = max(32, 4 sqrt(T)).

The first term bounds what the example's own rows add, rounding included. The second bounds what
they do to other rows: a partial sum that holds a large term absorbs small ones. Ordinary examples
have M near sqrt(T) times their norm, so it does not touch them; it keeps what is scaled and added
below L C, so that n rows in one sum change by at most L n u C.

Where gradients are formed one by one and kept, the sum adds the very arrays whose norms were taken,
and only the sum of squares can err: it is done one axis at a time, so that no partial sum absorbs
many terms.
"""

import math
import typing

import numpy as np
import tensorflow as tf

UNIT = 2.0**-24
# What a sum has besides its terms: products, factors, roots.
EXTRA = 8
# Terms of a matrix product or convolution of long rows that kernels add one after the other.
_BLOCK = 512
# The least l2 norm that clips: its square is far above what float32 loses to underflow.
SMALLEST_CLIP = 1e-9
_LARGEST_CANCELLATION = 32.0
# Beyond so many positions the allowance would be visible in the norms of ordinary examples.
MOST_POSITIONS_ALLOWED_FOR = 256
_TINY = 2.0**-126


def product_error():
    """Float: relative error of one product in a matrix product on this machine.

    GPUs round inputs to TF32 where TensorFlow allows it (its default), TPUs to bfloat16.
    """
    if tf.config.list_logical_devices("TPU"):
        return 2.0**-7
    if tf.config.list_logical_devices("GPU"):
        if tf.config.experimental.tensor_float_32_execution_enabled():
            return 2.0**-10
    return UNIT


def dot_error(terms):
    """Error of an inner product of `terms` products, relative to the sum of their sizes.

    Args:
        terms: Int, or float32 scalar tensor.
    """
    return (terms + EXTRA) * UNIT + product_error()


def blocked(terms):
    """The terms that an ordinary matrix product or convolution adds one after the other."""
    return min(terms, _BLOCK + terms / _BLOCK)


def sum_by_axis(tensor, axes, keepdims=False):
    """`tf.reduce_sum`, the last of `axes` first: errs by the sum of their sizes, not the product.

    Args:
        tensor: float32.
        axes: List of ints in rising order, all negative or none.
        keepdims: As of `tf.reduce_sum`.
    """
    last_first = [axis % tensor.shape.rank for axis in reversed(axes)]
    for place, axis in enumerate(last_first):
        if place:  # Changes nothing, but XLA would make one long sum of two without it.
            tensor = tf.where(tensor < tf.float32.min, tf.float32.min, tensor)
        tensor = tf.reduce_sum(tensor, axis, keepdims=keepdims)
    return tensor


def squared_norms(gradients):
    """float32 [B]: squared l2 norms over a list of float32 tensors [B, ...], never too small.

    What overflows is infinite. Each square that underflows counts as the smallest number.
    """
    norms = []
    for _, gradient in alike(gradients):
        axes = list(range(1, gradient.shape.rank))
        squares = sum_by_axis(tf.square(gradient), axes)
        norms.append(raised(squares, [size_of(gradient, axis) for axis in axes]))
    return tf.add_n(norms)


def squared_lengths(vectors):
    """float32 [...]: squared l2 norms of float32 vectors [..., d], never too small."""
    return raised(tf.reduce_sum(tf.square(vectors), axis=-1), [vectors.shape[-1]])


def raised(squares, sizes):
    """Sums of squares, raised by what rounding and underflow may have taken.

    Args:
        squares: float32 tensor of sums that `sum_by_axis` made of float32 squares.
        sizes: List of the sizes of the axes that were summed over, as `size_of` gives them.
    """
    return squares * (1.0 + (sum(sizes) + EXTRA) * UNIT) + math.prod(sizes) * _TINY


def size_of(tensor, axis):
    """The size of an axis: an int where it is static, else a float32 scalar tensor."""
    static = tensor.shape[axis]
    return tf.cast(tf.shape(tensor)[axis], "float32") if static is None else static


def alike(gradients):
    """Pairs of places in a list of float32 [B, ...] and what stands there, few tensors in all.

    Vectors of one length are one tensor [B, number, length]: a graph holds many of them, and every
    operation on each takes time to trace. Everything else stays as it is.
    """
    places = {}
    for place, gradient in enumerate(gradients):
        shape = gradient.shape[1:]
        small = len(shape) < 2 and shape.is_fully_defined()
        places.setdefault(tuple(shape) if small else place, []).append(place)
    for found in places.values():
        several = len(found) > 1
        yield (
            found,
            tf.stack([gradients[p] for p in found], axis=1) if several else gradients[found[0]],
        )


class Measured(typing.NamedTuple):
    """Squared norms of the gradients at one kernel, for which rounding is yet to be allowed.

    Attributes:
        squares: float32 [B], not too small but for what `removed` takes.
        magnitudes: float32 [B], M: the sum of the sizes of what is added up.
        terms: How many terms that are: int, or float32 scalar.
        removed: float32 [2, B]: squares of two inner products, part of `squares`, that do not
            belong to the norm; None for none.
        removed_errors: Two floats: what each inner product errs by, as a share of M.
        relative: Float: what the subtraction of `removed` errs by, as a share of `squares`.
    """

    squares: tf.Tensor
    magnitudes: tf.Tensor
    terms: int | float | tf.Tensor
    removed: tf.Tensor | None = None
    removed_errors: tuple = (0.0, 0.0)
    relative: float = 0.0


def add_up(norms):
    """float32 [B]: the sum of squared norms, rounding allowed for.

    Args:
        norms: List of float32 [B] and of `Measured`. All of these are worked on at once.
    """
    measured = [each for each in norms if isinstance(each, Measured)]
    total = [each for each in norms if not isinstance(each, Measured)]
    if measured:
        squares = _without_removed(measured)
        magnitudes = tf.stack([each.magnitudes for each in measured])
        allowed = allow(squares, magnitudes, _column([each.terms for each in measured]))
        total.append(tf.reduce_sum(allowed, axis=0))
    return tf.add_n(total)


def _without_removed(measured):
    """float32 [kernels, B]: `squares` without what is `removed`, still not too small."""
    squares = tf.stack([each.squares for each in measured])
    if all(each.removed is None for each in measured):
        return squares
    none = tf.zeros([2, tf.shape(squares)[1]])
    removed = tf.stack([none if each.removed is None else each.removed for each in measured], 1)
    magnitudes = tf.stack([each.magnitudes for each in measured])
    errors = magnitudes * np.transpose([each.removed_errors for each in measured])[..., np.newaxis]
    slack = tf.reduce_sum(errors * (2.0 * tf.sqrt(removed) + errors), axis=0)
    slack += squares * _column([each.relative for each in measured])
    return tf.maximum(squares - tf.reduce_sum(removed, axis=0), 0.0) + slack


def _column(numbers):
    """A list of numbers as [length, 1]: NumPy's where none is a tensor."""
    if any(tf.is_tensor(number) for number in numbers):
        return tf.stack([tf.cast(number, "float32") for number in numbers])[:, tf.newaxis]
    return np.array(numbers, "float64")[:, np.newaxis]


def allow(squares, magnitudes, terms):
    """float32 [...]: the squares of the norms to clip by.

    Args:
        squares: float32 [...], squared norms, not too small.
        magnitudes: float32 [...], M: the sum of the sizes of what is added up.
        terms: How many terms that are: int, or float32 or NumPy's array broadcast to `squares`.
    """
    # Ordinary examples have M up to about sqrt(terms) times their norm.
    if tf.is_tensor(terms):
        largest = tf.maximum(_LARGEST_CANCELLATION, 4.0 * tf.sqrt(terms))
    else:
        largest = np.maximum(_LARGEST_CANCELLATION, 4.0 * np.sqrt(terms))
    norms = tf.sqrt(squares) + dot_error(terms) * magnitudes
    least = magnitudes * (1.0 / largest)
    # A comparison with what is not finite keeps it.
    return tf.square(tf.where(norms < least, least, norms))


def squared_norms_of_products(inputs, output_gradients, fan_in, fan_out):
    """float32 [B, groups]: |A^T G|^2 from inner products of positions; and its M.

    Each inner product of inputs errs by e_in |a_s| |a_t|, each of gradients by e_out |g_s| |g_t|,
    and the sum of their T^2 products by 2 T u of each. That is added, and so is what underflows.

    Args:
        inputs: A A^T, float32 [B, groups, T, T].
        output_gradients: G G^T, likewise.
        fan_in: Int, terms in an inner product of inputs.
        fan_out: Int, of output gradients.

    Returns:
        Two tensors [B, groups]: the squared norm, never too small, and M.
    """
    count = size_of(inputs, 2)
    grams = (inputs, fan_in), (output_gradients, fan_out)
    sizes = [tf.sqrt(tf.linalg.diag_part(gram) + terms * _TINY) for gram, terms in grams]
    pairs = [tf.expand_dims(s, -1) * tf.expand_dims(s, -2) for s in sizes]
    products = inputs * output_gradients
    absolute_in, absolute_out = tf.abs(inputs), tf.abs(output_gradients)
    slack = (
        dot_error(fan_in) * pairs[0] * absolute_out
        + dot_error(fan_out) * pairs[1] * absolute_in
        + (2 * count + EXTRA) * UNIT * tf.abs(products)
        + _TINY * (fan_in * absolute_out + fan_out * absolute_in)
    )
    total = sum_by_axis(products, [2, 3])
    squares = tf.maximum(total, 0.0) + tf.reduce_sum(slack, [2, 3])
    squares += count**2 * _TINY
    return squares, tf.reduce_sum(sizes[0] * sizes[1], axis=2)
