"""Second moments of clipped rows, `sum_i w_i x_i x_i^T`, in float64, and their rounding.

Rows are clipped to `C / (1 + a)`, with a = (d + 16) 2^-24 + 1e-5. The first part of a is what
float32 can hide of a norm. The second is for the sum. With b rows a product and n in all, a sum of
n float64 terms of size at most C^2, in any order, errs by at most (b + n / b) 2^-53 n C^2 (Higham
2002, ch. 4). So one example more or less changes what is computed by at most
C^2 / (1 + a)^2 + 2 (b + n / b) 2^-53 n C^2, and that is below C^2 for n up to `MOST_EXAMPLES`.
"""

import numpy as np
from scipy.linalg import blas

from tfdpx.per_example import rounding

MOST_EXAMPLES = 4_000_000
_OF_THE_SUM = 1e-5
# Rows of one product.
ROWS = 8192


def clip_rows(x, l2_norm_clip):
    """float64 `[n, d]`: the rows of `x` at norms of at most `l2_norm_clip`, rounding included.

    A row that is not finite, or whose square overflows in float32, becomes zero.

    Args:
        x: float32 `[n, d]`.
        l2_norm_clip: Float; infinity leaves finite rows as they are.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", x, x, dtype="float32")).astype("float64")
        unfit = ~np.isfinite(norms)
        allowance = (x.shape[1] + 2 * rounding.EXTRA) * rounding.UNIT + _OF_THE_SUM
        factors = np.minimum(1.0, l2_norm_clip / (1 + allowance) / np.maximum(norms, 1e-30))
        rows = np.multiply(x, factors[:, np.newaxis], dtype="float64")
    rows[unfit] = 0.0
    return rows


class SecondMoment:
    """The sum of `x x^T` over rows that are added piece by piece: memory for one `[d, d]`.

    Args:
        dimension: Int, d.
    """

    def __init__(self, dimension):
        self._upper = np.zeros([dimension, dimension], order="F")

    def add(self, rows):
        """Adds float64 rows `[n, d]`; a symmetric product takes half of a general one's time."""
        if len(rows):
            self._upper = blas.dsyrk(1.0, rows.T, beta=1.0, c=self._upper, overwrite_c=1)

    def value(self):
        """float64 `[d, d]`, symmetric."""
        return np.triu(self._upper) + np.triu(self._upper, 1).T
