"""What a pass over a dataset met: every pass must meet the same examples, in any order.

The guarantee needs it. The matrices of classes may take several passes (`class_moments`); an
example whose label is another in each would count in more classes than the noise is scaled for. For
each class a sum over its examples is compared, of features times a fixed vector: labels that are
dealt anew, examples that come and go, and features that are augmented at random are noticed. A
single example that changes among many, or changes of the size of rounding, are not.
"""

import numpy as np

# Of the sum of absolute values, and of the root of the sum of squares: more than a backbone that
# computes the features anew errs by, in half precision too.
_OF_THE_SUM, _OF_THE_ROOT = 1e-5, 1e-2


class Pass:
    """Counts examples and adds them up by their classes.

    Args:
        dimension: Int, width of features.
        num_classes: Int.

    Attributes:
        count: Int, examples so far.
    """

    def __init__(self, dimension, num_classes):
        self.count = 0
        self._vector = np.random.default_rng(dimension).normal(size=dimension)
        self._sums, self._sizes, self._squares = np.zeros([3, num_classes + 1])

    def add(self, features, targets):
        """Adds float32 rows `[n, d]` and zeros and ones `[n, num_classes]`, or None for these."""
        self.count += len(features)
        if targets is None:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            values = features.astype("float64") @ self._vector
        values = np.where(np.isfinite(values), values, 0.0)
        classes = np.hstack([targets, np.ones([len(targets), 1], targets.dtype)])
        self._sums += values @ classes
        self._sizes += np.abs(values) @ classes
        self._squares += values**2 @ classes

    def differs(self, other):
        """Whether another pass met other features or labels, its count aside."""
        allowed = _OF_THE_SUM * self._sizes + _OF_THE_ROOT * np.sqrt(self._squares)
        return bool(np.any(np.abs(self._sums - other._sums) > allowed))
