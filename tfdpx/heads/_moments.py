"""Second moments of clipped rows, `sum_i w_i x_i x_i^T`, in float64, and their rounding.

Rows are clipped to `C / (1 + a)`, with a = 1e-5, by norms that are never too small (`measured`).
That a is for the sum. With b rows a product and n in all, a sum of
n float64 terms of size at most C^2, in any order, errs by at most (b + n / b) 2^-53 n C^2 (Higham
2002, ch. 4). So one example more or less changes what is computed by at most
C^2 / (1 + a)^2 + 2 (b + n / b) 2^-53 n C^2, and that is below C^2 for n up to `MOST_EXAMPLES`.
"""

import math

import numpy as np
import tensorflow as tf

from tfdpx.per_example import rounding

MOST_EXAMPLES = 4_000_000
_OF_THE_SUM = 1e-5
# Rows of one product, in float64.
ROWS = 8192
_STRIPS, _NARROWEST = 4, 64


def measured(x):
    """`x` without what is not finite, and the squared norms of its rows.

    Args:
        x: float32 `[n, d]`.

    Returns:
        `x`, in which rows that are not finite, or whose square overflows, are zero; and float32
        `[n]`, squared norms, never too small.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        squares = rounding.raised(np.einsum("ij,ij->i", x, x), [x.shape[1]])
    fit = np.isfinite(squares)
    if not fit.all():
        x, squares = np.where(fit[:, np.newaxis], x, 0.0), np.where(fit, squares, 0.0)
    return x, squares.astype("float32")


class ClippedRows:
    """Rows in float64 at norms of at most `l2_norm_clip`, rounding included.

    Args:
        l2_norm_clip: Float; infinity leaves finite rows as they are.
    """

    def __init__(self, l2_norm_clip):
        self._clip = l2_norm_clip / (1 + _OF_THE_SUM)
        self._buffer = np.empty([0, 0])

    def __call__(self, x):
        """The rows of float32 `x` `[n, d]`, in memory that the next call uses again."""
        x, squares = measured(x)
        if self._buffer.shape < x.shape or self._buffer.shape[1:] != x.shape[1:]:
            self._buffer = np.empty([max(len(x), ROWS), x.shape[1]])
        rows = self._buffer[: len(x)]
        if self._clip == math.inf:
            rows[:] = x
            return rows
        norms = np.sqrt(squares, dtype="float64")
        factors = self._clip / np.maximum(norms, self._clip)
        return np.multiply(x, factors[:, np.newaxis], out=rows)


class SecondMoment:
    """The sum of `x x^T` over rows that are added piece by piece: memory for one `[d, d]`.

    Only strips on and above the diagonal are formed: five eighths of a general product.

    Args:
        dimension: Int, d.
    """

    def __init__(self, dimension):
        width = max(-(-dimension // _STRIPS), _NARROWEST)
        self._starts = range(0, dimension, width)
        self._strips = [np.zeros([min(width, dimension - s), dimension - s]) for s in self._starts]

    def add(self, rows):
        """Adds float64 rows `[n, d]`."""
        if not len(rows):
            return
        rows = tf.convert_to_tensor(rows)
        for start, strip in zip(self._starts, self._strips, strict=True):
            left = rows[:, start : start + len(strip)]
            strip += tf.matmul(left, rows[:, start:], transpose_a=True).numpy()

    def value(self):
        """float64 `[d, d]`, symmetric."""
        whole = np.zeros([self._strips[0].shape[1]] * 2)
        for start, strip in zip(self._starts, self._strips, strict=True):
            whole[start : start + len(strip), start:] = strip
        return np.triu(whole) + np.triu(whole, 1).T


def second_moment(examples, l2_norm_clip):
    """float64 `[d, d]`: the sum of `x x^T` over all examples, clipped, by one pass.

    Args:
        examples: `FeatureSource`.
        l2_norm_clip: Float, or infinity.
    """
    moment, clipped = SecondMoment(examples.dimension), ClippedRows(l2_norm_clip)
    for x, _ in examples.chunks(ROWS):
        moment.add(clipped(x))
    return moment.value()
