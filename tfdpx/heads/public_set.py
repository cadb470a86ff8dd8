"""Public examples of a linear classifier: their gradients, the clip and the subspace they give.

All of it is a function of the public examples and of weights that were released already, so it
costs no privacy. The private examples have no way into this file.
"""

import numpy as np
from scipy.special import softmax

from tfdpx.heads._feature_source import Examples

# Public norms may fall to zero; a clip may not.
LEAST_CLIP = 1e-6
# A product of float64 rows with the subspace must not lengthen them.
_ROUNDING = 1e-9


class PublicSet:
    """Public features and labels, held in memory in float64.

    Args:
        data: Pair `(features, labels)` of arrays as `Head.fit` takes them, or a `tf.data.Dataset`.
        num_classes: Int.

    Attributes:
        x: float64 `[n, d]`.
        y: float64 `[n, num_classes]`, zeros and a single one a row.

    Raises:
        ValueError: If there is no example, shapes or labels do not fit, or a feature is not finite.
    """

    def __init__(self, data, num_classes):
        if isinstance(data, (tuple, list)):
            if len(data) != 2:
                raise ValueError(
                    "Argument `public_data` must be a pair (features, labels) or a dataset. "
                    f"Received: {len(data)} parts."
                )
            examples = Examples(*data, num_classes)
        else:
            examples = Examples(data, None, num_classes)
        parts = list(examples.chunks(8192))
        self.x = np.vstack([x for x, _ in parts]).astype("float64")
        self.y = np.vstack([y for _, y in parts]).astype("float64")
        unfit = int(np.sum(~np.isfinite(self.x).all(axis=1)))
        if unfit:
            raise ValueError(
                "Argument `public_data` must hold finite features: clip and subspace follow them. "
                f"Received: {unfit} rows that are not finite. Leave them out."
            )

    def __len__(self):
        return len(self.x)

    def residuals(self, kernel):
        """float64 `[n, num_classes]`: the gradient of each example's loss at its logits.

        Args:
            kernel: float64 `[d, num_classes]`.
        """
        return softmax(self.x @ kernel, axis=1) - self.y

    def gradient(self, kernel):
        """float64 `[d, num_classes]`: the sum of the gradients of all public examples."""
        return self.x.T @ self.residuals(kernel)

    def norms(self, kernel):
        """float64 `[n]`: the l2 norm of each public example's gradient."""
        lengths = np.linalg.norm(self.x, axis=1)
        return lengths * np.linalg.norm(self.residuals(kernel), axis=1)

    def quantile_clip(self, kernel, quantile):
        """Float: the clip, a quantile of the norms of the public gradients ("Adaptive threshold").

        Args:
            kernel: float64 `[d, num_classes]`.
            quantile: Float in (0, 1].
        """
        return max(LEAST_CLIP, float(np.quantile(self.norms(kernel), quantile)))

    def mean_clip(self, kernel):
        """Float: the norm of the mean public gradient, which PPGD clips by."""
        return max(LEAST_CLIP, float(np.linalg.norm(self.gradient(kernel))) / len(self))

    def subspace(self, kernel, dimension):
        """float64 `[d, p]`, p = min(dimension, d, num_classes): the subspace to release in.

        The left singular vectors of the total public gradient with the largest singular values
        ("Adaptive subspace projection"), shortened by what rounding could lengthen.

        Args:
            kernel: float64 `[d, num_classes]`.
            dimension: Int.
        """
        left, _, _ = np.linalg.svd(self.gradient(kernel), full_matrices=False)
        return left[:, :dimension] / (1 + _ROUNDING)
