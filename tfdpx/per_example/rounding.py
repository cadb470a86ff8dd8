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


def sum_by_axis(tensor, axes):
    """`tf.reduce_sum`, the last of `axes` first: errs by the sum of their sizes, not the product.

    Args:
        tensor: float32.
        axes: List of ints in rising order, all negative or none.
    """
    for axis in reversed(axes):
        # The maximum changes nothing, but XLA would make one long sum of two without it.
        kept = tf.reduce_sum(tensor, axis, keepdims=True)
        tensor = tf.where(kept < tf.float32.min, tf.float32.min, kept)
    # An empty list of axes would squeeze all of length one.
    return tf.squeeze(tensor, axes) if axes else tensor


def squared_norms(gradients):
    """float32 [B]: squared l2 norms over a list of float32 tensors [B, ...], never too small.

    What overflows is infinite. Each square that underflows counts as the smallest number.
    """
    norms = []
    for gradient in gradients:
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


def allow(squares, magnitudes, terms):
    """float32 [...]: the squares of the norms to clip by.

    Args:
        squares: float32 [...], squared norms, not too small.
        magnitudes: float32 [...], M: the sum of the sizes of what is added up.
        terms: How many terms that are: int, or float32 broadcast to `squares`.
    """
    norms = tf.sqrt(squares) + dot_error(terms) * magnitudes
    # Ordinary examples have M up to about sqrt(terms) times their norm.
    if isinstance(terms, int):  # Not in the graph, which holds this for every layer.
        largest = max(_LARGEST_CANCELLATION, 4.0 * math.sqrt(terms))
    else:
        largest = tf.maximum(_LARGEST_CANCELLATION, 4.0 * tf.sqrt(terms))
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
    pairs = [s[..., :, tf.newaxis] * s[..., tf.newaxis, :] for s in sizes]
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
