"""Linear systems of noisy second moments, which noise may have made indefinite.

All of this is post-processing: it reads released matrices and the public scale of their noise.
"""

import math

import numpy as np
import scipy.linalg


class Positive:
    """A symmetric matrix plus `ridge` times the identity, taken to be at least `ridge`.

    The moment without noise has no negative eigenvalue, so with the ridge none below it. Where
    noise has pushed eigenvalues below, they are raised to the ridge: that is the nearest matrix (in
    the Frobenius norm) that the true one could be. No system is then worse conditioned than
    the largest eigenvalue over the ridge.

    Args:
        matrix: float64 `[d, d]`, symmetric.
        ridge: Float > 0.
    """

    def __init__(self, matrix, ridge):
        self._vectors = None
        identity = np.eye(len(matrix))
        try:  # That this succeeds says that no eigenvalue of `matrix` is negative.
            scipy.linalg.cho_factor(matrix + 1e-9 * ridge * identity, check_finite=False)
            self._factor = scipy.linalg.cho_factor(matrix + ridge * identity, check_finite=False)
        except scipy.linalg.LinAlgError:
            values, self._vectors = scipy.linalg.eigh(matrix, driver="evd")
            self._values = np.maximum(values, 0.0) + ridge

    def solve(self, right):
        """`matrix^-1 right`, float64.

        Args:
            right: float64 `[d]` or `[d, k]`.
        """
        if self._vectors is None:
            return scipy.linalg.cho_solve(self._factor, right, check_finite=False)
        turned = self._vectors.T @ right
        return self._vectors @ (turned / self._values.reshape(-1, *[1] * (right.ndim - 1)))


def ridge(matrix, given, noise_multiplier, sensitivity):
    """The ridge of a system: `given`, or as large as the noise.

    The spectral norm of noise of standard deviation s on the diagonal, and s / sqrt(2) beside it,
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
    noise = math.sqrt(2 * len(matrix)) * noise_multiplier * sensitivity if noise_multiplier else 0.0
    return max(noise, 1e3 * least)
