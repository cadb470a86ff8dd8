"""Features with labels, read in chunks as often as a head needs: from arrays or a dataset.

Every pass over a dataset must meet the same examples, in any order; the guarantee needs it. The
matrices of classes may take several passes (`_class_moments`), and an example whose label changed
in between would count in more classes than the noise is scaled for. For each class a sum over its
examples is compared, of features times a fixed vector. This notices labels that are dealt anew,
examples that come and go, and features that are augmented at random, but neither a single example
that changes among many nor changes of the size of rounding.
"""

import math

import numpy as np
import tensorflow as tf

from tfdpx._keras import tensorflow_internals
from tfdpx.heads import _moments

# Allowed differences of passes, as shares of the sum of absolute values and of the root of the sum
# of squares: more than the errors of a backbone that computes the features anew in half precision.
_OF_THE_SUM, _OF_THE_ROOT = 1e-5, 1e-2


class FeatureSource:
    """Rows of features and, unless they are only to be predicted, targets.

    Args:
        features: Array `[n, d]`, or a `tf.data.Dataset` of batches `(features, labels)`. Each pass
            iterates over the dataset once and must meet every example once, in any order.
        labels: Array of class numbers `[n]` or of zeros and ones `[n, num_classes]`; None with a
            dataset, or for features alone.
        num_classes: Int.
        labelled: Bool, whether there must be labels.

    Attributes:
        dimension: Int, d.
        count: Int, number of examples; None before a dataset was read to its end once.
        bytes: Size of the features in float32; infinite for a dataset.

    Raises:
        ValueError: If shapes or types do not fit.
    """

    def __init__(self, features, labels, num_classes, labelled=True):
        self._num_classes, self._first = num_classes, None
        self._dataset = features if isinstance(features, tf.data.Dataset) else None
        if self._dataset is None:
            self._arrays = np.asanyarray(features), None if labels is None else np.asarray(labels)
            shape = self._arrays[0].shape
            _check_rank(shape)
            self.count = len(self._arrays[0])
            _check_count(self.count)
            if labels is not None and len(np.atleast_1d(self._arrays[1])) != self.count:
                raise ValueError(
                    "Arguments `features` and `labels` must hold as many examples. Received: "
                    f"{self.count} features, labels of shape {self._arrays[1].shape}."
                )
            if labels is None and labelled:
                raise ValueError(
                    "Argument `labels` must be given with an array of features. Received: None."
                )
        else:
            if labels is not None:
                raise ValueError(
                    "Argument `labels` must be left out with a dataset, which holds them. "
                    f"Received: labels of type {type(labels).__name__}."
                )
            shape = _features_of(self._dataset, labelled)
            _check_rank(shape)
            self.count = None
        self.dimension = shape[1]
        if not self.dimension:
            raise ValueError(
                f"Argument `features` must have a known, positive width. Received: shape {shape}."
            )
        self.bytes = math.inf if self.count is None else 4 * self.count * self.dimension

    def chunks(self, rows):
        """One pass: pairs of float32 features `[<= rows, d]` and float32 targets, in order.

        Targets `[<= rows, num_classes]` are zeros and ones; None without labels.

        Args:
            rows: Int.

        Raises:
            ValueError: If a label is invalid, or a pass meets other examples than the first.
        """
        met = Pass(self.dimension, self._num_classes)
        for x, y in self._pieces(rows):
            with np.errstate(over="ignore"):  # What overflows is not finite, and counts as zero.
                x = np.asarray(x, "float32")
            y = None if y is None else self._targets(np.asarray(y))
            # Arrays cannot change between passes.
            met.add(x, None if self._dataset is None else y)
            if met.count > _moments.MOST_EXAMPLES:
                _check_count(met.count)
            yield x, y
        _check_count(met.count)
        first = self._first = self._first or met
        self.count = first.count
        if first.count != met.count or first.differs(met):
            raise ValueError(
                f"A pass over `features` met {met.count} examples, the first one {first.count}, "
                "or others. The dataset must give every example once, with the same features and "
                "label in every iteration, in any order."
            )

    def _pieces(self, rows):
        if self._dataset is None:
            x, y = self._arrays
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                yield x[part], None if y is None else y[part]
            return
        for batch in self._dataset.rebatch(rows).as_numpy_iterator():
            yield batch if isinstance(batch, tuple) else (batch, None)

    def _targets(self, labels):
        classes = self._num_classes
        if labels.ndim == 2 and labels.shape[1] == classes:
            if not np.isin(labels, (0, 1)).all():
                raise ValueError(
                    f"Argument `labels` of shape [n, {classes}] must hold zeros and ones alone."
                )
            return labels.astype("float32")
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"Argument `labels` must hold integers [n], or zeros and ones [n, {classes}]. "
                f"Received: shape {labels.shape}, dtype {labels.dtype}. Convert whole numbers of "
                "another type by `labels.astype(int)`."
            )
        if len(labels) and not (0 <= labels.min() and labels.max() < classes):
            raise ValueError(
                f"Argument `labels` must lie in [0, {classes}), by num_classes={classes}. "
                f"Received: labels from {labels.min()} to {labels.max()}."
            )
        targets = np.zeros([len(labels), classes], "float32")
        targets[np.arange(len(labels)), labels] = 1.0
        return targets


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


def _features_of(dataset, labelled):
    """The shape of the features in a batch of `dataset`, a tuple of ints and Nones."""
    # An example that is repeated within a pass counts twice.
    repeats = "RepeatDataset" in tensorflow_internals.sources_of(dataset)
    if repeats or dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "Argument `features` must be a dataset that ends and gives every example once: an "
            "example that comes twice in a pass needs twice the noise. Received: an infinite "
            "dataset, or one with `repeat`. Leave out `repeat`; a head makes its own passes."
        )
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    dense = all(isinstance(part, tf.TensorSpec) for part in parts)
    if not dense or len(parts) > 2 or (labelled and len(parts) < 2):
        raise ValueError(
            "Argument `features` must be a dataset of batches (features, labels) of dense tensors. "
            f"Received: elements of {spec}. A head takes no sample weights."
        )
    shape = parts[0].shape
    if shape.rank is None:
        raise ValueError(
            "Argument `features` must be a dataset whose features have a known rank. Received: "
            f"elements of {spec}. Set it with `tf.ensure_shape`."
        )
    return tuple(shape)


def _check_rank(shape):
    if len(shape) != 2:
        raise ValueError(
            f"Argument `features` must have the shape [n, d]. Received: shape {tuple(shape)}. "
            "Flatten the output of the backbone for each example."
        )


def _check_count(count):
    if not 0 < count <= _moments.MOST_EXAMPLES:
        raise ValueError(
            f"A head takes 1 to {_moments.MOST_EXAMPLES} examples: beyond, rounding may exceed "
            f"what the clip allows for. Received: {count}, or more."
        )
