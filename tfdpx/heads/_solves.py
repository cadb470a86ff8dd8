"""Linear systems of noisy second moments, which noise may have made indefinite.

All of this is post-processing: it reads released matrices and the public scale of their noise.
"""

import math

import numpy as np
import scipy.linalg
import tensorflow as tf

# The least eigenvalue that a system may keep, as a share of its ridge.
_LEAST = 1 / 8
# Of the noise's norm: how large a ridge is that follows it.
_OF_THE_NOISE = 1.25


class Positive:
    """A symmetric matrix plus `ridge` times the identity, with no eigenvalue near zero or below.

    The moment without noise has no negative eigenvalue, so with the ridge none below it. Where
    noise has pushed one below an eighth of the ridge, all that are below the ridge are raised to
    it: that is the nearest matrix (in the Frobenius norm) that the true one could be. So no system
    is worse conditioned than 8 times its largest eigenvalue over the ridge. That none is below the
    eighth is known from a Cholesky factor, which takes a tenth of the time of eigenvalues.

    Args:
        matrix: float64 `[d, d]`, symmetric.
        ridge: Float > 0.
    """

    def __init__(self, matrix, ridge):
        self._factor = None
        identity = np.eye(len(matrix))
        if _cholesky(matrix + (1 - _LEAST) * ridge * identity) is not None:
            self._factor = _cholesky(matrix + ridge * identity)
        if self._factor is None:
            values, self._vectors = scipy.linalg.eigh(matrix, driver="evd")
            self._values = np.maximum(values, 0.0) + ridge

    def solve(self, right):
        """`matrix^-1 right`, float64.

        Args:
            right: float64 `[d]` or `[d, k]`.
        """
        if self._factor is not None:
            columns = right.reshape(len(right), -1)
            return tf.linalg.cholesky_solve(self._factor, columns).numpy().reshape(right.shape)
        turned = self._vectors.T @ right
        return self._vectors @ (turned / self._values.reshape(-1, *[1] * (right.ndim - 1)))


def _cholesky(matrix):
    """The factor, or None where there is none. TensorFlow's: BLAS threads wait for each other."""
    try:
        factor = tf.linalg.cholesky(matrix)
    except tf.errors.InvalidArgumentError:  # Some devices say so, others return NaN.
        return None
    return factor if np.isfinite(tf.linalg.diag_part(factor)).all() else None


def ridge(matrix, given, noise_multiplier, sensitivity):
    """The ridge of a system: `given`, or a quarter larger than the noise.

    The spectral norm of noise of standard deviation s on the diagonal, and s / sqrt(2) off it,
    is about sqrt(2 d) s.

    Args:
        matrix: The released matrix `[d, d]`.
        given: Float, or None for the norm of the noise, and at least a millionth of the mean
            eigenvalue.
        noise_multiplier: Float; s over the sensitivity.
        sensitivity: Float, of the matrix; infinite without privacy.
    """
    least = 1e-9 * max(float(np.trace(matrix)) / len(matrix), 1e-9)
    if given is not None:
        return max(given, least)
    if not noise_multiplier:
        return 1e3 * least
    norm = math.sqrt(2 * len(matrix)) * noise_multiplier * sensitivity
    return max(_OF_THE_NOISE * norm, 1e3 * least)
