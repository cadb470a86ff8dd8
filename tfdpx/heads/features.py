"""Holds features and labels in memory, yields them in chunks of float64, and clips features.

A `tf.data.Dataset` is read only once, so all passes of a head over the data see the same examples.

Rounding: a head sums over all n examples in float64, b rows at a time. If the terms have norms of
at most C, the rounding error of the sum is at most (b + n / b) 2^-53 n C, in any order of the terms
(Higham 2002, ch. 4). To make up for this error, rows and gradients are clipped to C / (1 + a), with
a = 1e-4. Then one example more or less changes the computed sum by at most
C / (1 + a) + 2 (b + n / b) 2^-53 n C. This is below C for all n up to `MOST_EXAMPLES`. The
difference, about 9e-5 C, covers the rounding of norms and of projected sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tfdpx.sampling.inputs import refuse_repeat
from tfdpx.training.clipping import AutomaticClip

MOST_EXAMPLES = 4_000_000
# The number of examples in a chunk, called b above.
ROWS = 8192
_OF_THE_SUM = 1e-4


class FeatureSet:
    """Holds and checks the features of examples and, except for predictions, their labels.

    Args:
        features: Array `[n, d]`, for example a `np.memmap`; or a finite `tf.data.Dataset` of
            batches `(features, labels)` that yields every example exactly once.
        labels: Array of class numbers `[n]`, or of numbers in [0, 1] `[n, num_classes]`. None with
            a dataset, or for features without labels.
        num_classes: Int, the number of classes.
        labelled: Bool, whether labels are required.

    Attributes:
        x: Array `[n, d]`, the features.
        count: Int, n, the number of examples.
        dimension: Int, d, the number of features of an example.

    Raises:
        ValueError: If shapes, types or labels do not match.
    """

    def __init__(
        self,
        features: ArrayLike | tf.data.Dataset,
        labels: ArrayLike | None,
        num_classes: int,
        labelled: bool = True,
    ):
        if isinstance(features, tf.data.Dataset):
            if labels is not None:
                raise ValueError(
                    "Argument `labels` must be left out with a dataset, which holds them. "
                    f"Received: labels of type {type(labels).__name__}."
                )
            features, labels = _arrays_of(features, labelled)
        elif labels is None and labelled:
            raise ValueError(
                "Argument `labels` is required with an array of features. Received: None."
            )
        self.x = np.asanyarray(features)
        _check_rank(self.x.shape)
        self.count, self.dimension = self.x.shape
        _check_count(self.count)
        if not self.dimension:
            raise ValueError(
                f"Argument `features` must have a positive width. Received: shape {self.x.shape}."
            )
        self._num_classes = num_classes
        self._labels = None if labels is None else self._checked(np.asarray(labels))

    def _checked(self, labels):
        classes = self._num_classes
        if len(np.atleast_1d(labels)) != self.count:
            raise ValueError(
                "Arguments `features` and `labels` must have the same length. Received: "
                f"{self.count} features, labels of shape {labels.shape}."
            )
        if labels.ndim == 2 and labels.shape[1] == classes:
            if labels.dtype.kind in "OSU" or not (0 <= labels.min() and labels.max() <= 1):
                raise ValueError(
                    f"Argument `labels` of shape [n, {classes}] must hold numbers in [0, 1], such "
                    "as zeros and ones or probabilities of the classes. Received: other values, "
                    f"of dtype {labels.dtype}."
                )
            return labels
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ValueError(
                f"Argument `labels` must hold integers [n], or numbers in [0, 1] [n, {classes}]. "
                f"Received: shape {labels.shape}, dtype {labels.dtype}. Convert whole numbers of "
                "another type with `labels.astype(int)`."
            )
        if not (0 <= labels.min() and labels.max() < classes):
            raise ValueError(
                f"Argument `labels` must lie in [0, {classes}), because num_classes={classes}. "
                f"Received: labels from {labels.min()} to {labels.max()}."
            )
        return labels

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yields the examples in order, in chunks of at most `ROWS`.

        Yields:
            Pairs of float64 arrays: features `[rows, d]`, and targets `[rows, num_classes]` in
            [0, 1], or None without labels.
        """
        for start in range(0, self.count, ROWS):
            part = slice(start, start + ROWS)
            x = np.asarray(self.x[part], "float64")
            yield x, None if self._labels is None else self._targets(self._labels[part])

    def _targets(self, labels):
        if labels.ndim == 2:
            return labels.astype("float64")
        targets = np.zeros([len(labels), self._num_classes])
        targets[np.arange(len(labels)), labels] = 1.0
        return targets


def finite_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns `x` with zeros in place of rows that are not finite, and the l2 norms of its rows.

    Args:
        x: float64 array `[n, d]`. A row also counts as not finite if its squared norm overflows.

    Returns:
        Two float64 arrays `[n, d]` and `[n]`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(np.einsum("ij,ij->i", x, x))
    finite = np.isfinite(norms)
    if not finite.all():
        x, norms = np.where(finite[:, np.newaxis], x, 0.0), np.where(finite, norms, 0.0)
    return x, norms


def clip_factors(norms: np.ndarray, l2_norm_clip: float | str) -> np.ndarray:
    """Returns the factors by which rows are multiplied to clip them.

    Rows are clipped to a little less than `l2_norm_clip`, to make up for the rounding of sums.

    Args:
        norms: float64 array `[n]`, the norms of the rows.
        l2_norm_clip: Float, the largest norm of a row; with infinity, no row is clipped. Or
            "automatic" for `tfdpx.training.clipping.AutomaticClip`, after which a row has a norm of
            at most 1.

    Returns:
        float64 array `[n]`.
    """
    if isinstance(l2_norm_clip, str):
        return 1 / (1 + _OF_THE_SUM) / (norms + AutomaticClip().stability)
    limit = l2_norm_clip / (1 + _OF_THE_SUM)
    return np.ones_like(norms) if limit == math.inf else limit / np.maximum(norms, limit)


def clipped_rows(x: np.ndarray, l2_norm_clip: float) -> np.ndarray:
    """Returns the rows of `x`, clipped by `clip_factors`; rows that are not finite become zero.

    Args:
        x: float64 array `[n, d]`.
        l2_norm_clip: Float, the largest norm of a row; with infinity, no row is clipped.
    """
    x, norms = finite_rows(x)
    return x * clip_factors(norms, l2_norm_clip)[:, np.newaxis]


def first_positives(targets: np.ndarray, most: int) -> np.ndarray:
    """Returns targets that keep the first labels of each example and are zero elsewhere.

    A row of zeros and ones keeps its first `most` ones. A row of soft labels keeps the first labels
    with squares that sum to at most `most`, so a row that sums to one keeps all of them. Each row
    of the result has a norm of at most sqrt(most), which bounds the sensitivity.

    Args:
        targets: Array `[n, num_classes]` of values in [0, 1].
        most: Int, the largest sum of squares of a row.
    """
    return targets * (np.cumsum(targets**2, axis=1) <= most)


def _arrays_of(dataset, labelled):
    """Reads a dataset into arrays.

    Args:
        dataset: `tf.data.Dataset` of batches `(features, labels)`, or of features only.
        labelled: Bool, whether labels are required.

    Returns:
        Features and labels, two arrays. The labels are None if the dataset has none.
    """
    refuse_repeat("features", dataset)
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    dense = all(isinstance(part, tf.TensorSpec) for part in parts)
    if not dense or len(parts) > 2 or (labelled and len(parts) < 2):
        raise ValueError(
            "Argument `features` must be a dataset of batches (features, labels) of dense tensors. "
            f"Received: elements of {spec}. A head accepts no sample weights."
        )
    _check_rank(parts[0].shape)
    batches, count = [], 0
    for batch in dataset.as_numpy_iterator():
        batches.append(batch if isinstance(batch, tuple) else (batch,))
        count += len(batches[-1][0])
        if count > MOST_EXAMPLES:
            break
    _check_count(count)
    features, *labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return features, labels[0] if labels else None


def _check_rank(shape):
    if tf.TensorShape(shape).rank != 2:
        raise ValueError(
            f"Argument `features` must have the shape [n, d]. Received: shape {shape}. "
            "Flatten the output of the backbone for each example."
        )


def _check_count(count):
    if not 0 < count <= MOST_EXAMPLES:
        raise ValueError(
            f"A head takes 1 to {MOST_EXAMPLES} examples, because with more the rounding may "
            f"exceed the margin of the clip. Received: {count}, or more."
        )
