"""Public examples of a linear classifier: the start, clip and subspace that they give.

All of it is a function of the public examples and of weights that were released already, so it
costs no privacy. The private examples have no way into this file.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import scipy.optimize
from scipy.special import logsumexp, softmax

from tfdpx.heads._feature_source import FeatureSource

# Public norms may fall to zero; a clip may not.
LEAST_CLIP = 1e-6
# A product of float64 rows with the subspace must not lengthen them.
_ROUNDING = 1e-9
_MOST_ITERATIONS = 500


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PublicSet:
    """Public features and labels, held in memory.

    Args:
        x: float64 `[n, d]`; n may be 0.
        y: float64 `[n, num_classes]`, zeros and a single one a row.
    """

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, data, num_classes: int) -> PublicSet:
        """The set of `public_data`.

        Args:
            data: Pair `(features, labels)` of arrays as `Head.fit` takes them, or a
                `tf.data.Dataset`.
            num_classes: Int.

        Raises:
            ValueError: If there is no example, shapes or labels do not fit, or a feature is not
                finite.
        """
        x, *labels = data if isinstance(data, (tuple, list)) else (data, None)
        if len(labels) != 1:
            raise ValueError(
                "Argument `public_data` must be a pair (features, labels) or a dataset. "
                f"Received: {len(data)} parts."
            )
        examples = FeatureSource(x, labels[0], num_classes)
        parts = list(examples.chunks(8192))
        x, y = (np.vstack(arrays).astype("float64") for arrays in zip(*parts, strict=True))
        unfit = int(np.sum(~np.isfinite(x).all(axis=1)))
        if unfit:
            raise ValueError(
                "Argument `public_data` must hold finite features: clip and subspace follow them. "
                f"Received: {unfit} rows that are not finite. Leave them out."
            )
        return cls(x, y)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def digest(self) -> str:
        """A hash of the examples."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.x, self.y):
            digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def minimum(self, l2_regularization: float, reference: np.ndarray) -> np.ndarray:
        """float64 `[d, m]`: where loss + `l2_regularization` / 2 |kernel - `reference`|^2 is least.

        By L-BFGS in float64, to a gradient of 1e-6 in every entry or 500 iterations, in as many
        unknowns a class as there are rows: what the minimum adds to `reference` is a combination
        of the rows.

        Args:
            l2_regularization: Float > 0, without which separable data have no minimum.
            reference: float64 `[d, m]`, where the search starts too.
        """
        if not len(self):
            return reference
        basis, offset = np.linalg.qr(self.x.T)[0], self.x @ reference
        rows = self.x @ basis
        shape = rows.shape[1], self.y.shape[1]

        def objective(flat):
            moved = flat.reshape(shape)
            logits = rows @ moved + offset
            loss = np.sum(logsumexp(logits, axis=1) - np.sum(logits * self.y, axis=1))
            loss += l2_regularization / 2 * np.sum(moved**2)
            slope = rows.T @ (softmax(logits, axis=1) - self.y) + l2_regularization * moved
            return loss, slope.ravel()

        found = scipy.optimize.minimize(
            objective,
            np.zeros(shape).ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _MOST_ITERATIONS, "maxfun": 2 * _MOST_ITERATIONS, "gtol": 1e-6},
        )
        return reference + basis @ found.x.reshape(shape)

    def residuals(self, kernel: np.ndarray) -> np.ndarray:
        """float64 `[n, m]`: the gradient of each example's loss at its logits.

        Args:
            kernel: float64 `[d, m]`.
        """
        return softmax(self.x @ kernel, axis=1) - self.y

    def gradient(self, kernel: np.ndarray) -> np.ndarray:
        """float64 `[d, m]`: the sum of the gradients of all public examples.

        Args:
            kernel: float64 `[d, m]`.
        """
        return self.x.T @ self.residuals(kernel)

    def quantile_clip(self, kernel: np.ndarray, quantile: float) -> float:
        """Float: the clip, a quantile of the norms of the public gradients ("Adaptive threshold").

        Args:
            kernel: float64 `[d, m]`.
            quantile: Float in (0, 1].
        """
        lengths = np.linalg.norm(self.x, axis=1)
        norms = lengths * np.linalg.norm(self.residuals(kernel), axis=1)
        return max(LEAST_CLIP, float(np.quantile(norms, quantile)))

    def subspace(self, kernel: np.ndarray, dimension: int) -> np.ndarray:
        """float64 `[d, p]`, p = min(dimension, d, m): the subspace to release in.

        The left singular vectors of the total public gradient with the largest singular values
        ("Adaptive subspace projection"), shortened by what rounding could lengthen.

        Args:
            kernel: float64 `[d, m]`.
            dimension: Int.
        """
        left, _, _ = np.linalg.svd(self.gradient(kernel), full_matrices=False)
        return left[:, :dimension] / (1 + _ROUNDING)
