"""Weights examples by their class, for `fit(class_weight=)`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpx._keras.variables import value_of, variable

_LARGEST = float(np.finfo("float32").max)


@dataclasses.dataclass(frozen=True)
class ClassWeights:
    """The weights of classes, for a model with a single output and one label per example.

    Args:
        by_class: Dict from class (int) to weight (float). Missing classes have weight 1.
    """

    by_class: dict[int, float]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the classes in ascending order, int64 `[k]`, and their weights, float32 `[k]`."""
        listed = sorted(self.by_class.items()) or [(0, 1.0)]
        classes, weights = zip(*listed, strict=True)
        return np.array(classes, "int64"), np.array(weights, "float32")

    def of_labels(self, y: Any) -> tf.Tensor:
        """Returns the weight of each example, float32 `[n]`. `y` is as for `labels_of`."""
        classes, weights = map(tf.constant, self.arrays())
        return _look_up(classes, weights, labels_of(y))


class WeightTable:
    """Stores class weights in variables, so a traced step can later use other class weights."""

    def __init__(self) -> None:
        arrays = ClassWeights({}).arrays()
        self._variables = [variable(array, array.dtype, shape=[None]) for array in arrays]

    @contextlib.contextmanager
    def holding(self, class_weights: ClassWeights | None) -> Iterator[None]:
        """Context manager that puts class weights into the table. With None, all weights are 1."""
        former_arrays = [value_of(part) for part in self._variables]
        self.assign(*(class_weights or ClassWeights({})).arrays())
        try:
            yield
        finally:
            self.assign(*former_arrays)

    def assign(self, *arrays: np.ndarray) -> None:
        """Writes the result of `ClassWeights.arrays`, classes and their weights, to the table."""
        for part, array in zip(self._variables, arrays, strict=True):
            part.assign(array)

    def of_labels(self, y: Any) -> tf.Tensor:
        """Returns the weight of each example, as `ClassWeights.of_labels` does."""
        classes, weights = map(tf.convert_to_tensor, self._variables)
        return _look_up(classes, weights, labels_of(y))

    def largest(self, y_pred: Any) -> tf.Tensor:
        """Returns the largest weight of any class; 1 if all weights are 0.

        The maximum is over all classes in the table and all classes of the model. A class of the
        model that is not in the table has weight 1.

        Args:
            y_pred: The model's output, a tensor `[n, num_classes]`; `[n, 1]` or `[n]` for two
                classes. Only its shape is read.

        Returns:
            float32 scalar.

        Raises:
            ValueError: If `y_pred` has another shape, or there are several outputs.
        """
        shapes = [tuple(output.shape) for output in tf.nest.flatten(y_pred)]
        if len(shapes) > 1 or len(shapes[0]) > 2:
            raise ValueError(
                "Argument `class_weight` needs a model with one output and one label per example. "
                f"Received: outputs of shapes {shapes}. Pass `sample_weight` instead."
            )
        num_classes = max(2, *(size or 0 for size in shapes[0][1:]))
        classes, weights = map(tf.convert_to_tensor, self._variables)
        # Classes in the table count even if the model does not have them.
        of_model = _look_up(classes, weights, tf.range(num_classes, dtype="int64"))
        weights = tf.concat([weights, of_model], axis=0)
        largest = tf.reduce_max(tf.where(tf.math.is_finite(weights), weights, 0.0))
        return tf.where(largest > 0, largest, 1.0)


def _look_up(classes, weights, labels):
    """Returns the weight of each label, float32 [n]; 1 for a label that is not in `classes`."""
    places = tf.minimum(tf.searchsorted(classes, labels), tf.size(classes) - 1)
    return tf.where(tf.gather(classes, places) == labels, tf.gather(weights, places), 1.0)


def labels_of(y: Any) -> tf.Tensor:
    """Returns the class of each example, int64 `[n]`.

    Args:
        y: Tensor of classes, `[n]` or `[n, 1]`, or one-hot, `[n, num_classes]`.

    Raises:
        ValueError: If `y` has another form.
    """
    if not tf.is_tensor(y):
        raise ValueError(
            "Argument `class_weight` needs a single array `y` of classes. "
            f"Received: y of type {type(y).__name__}. Pass `sample_weight` instead."
        )
    labels = y
    if y.shape.rank == 2:
        labels = y[:, 0] if y.shape[1] == 1 else tf.argmax(tf.cast(y, "float32"), axis=1)
    if labels.shape.rank != 1:
        raise ValueError(
            "Argument `class_weight` needs `y` of shape [num_examples], [num_examples, 1] or "
            f"[num_examples, num_classes]. Received: shape {tuple(y.shape)}."
        )
    return tf.cast(tf.round(labels) if labels.dtype.is_floating else labels, "int64")


def read_class_weight(class_weight: dict[int, float] | None) -> ClassWeights | None:
    """Converts the argument `class_weight` of `fit` to `ClassWeights`, or to None if it is empty.

    Raises:
        ValueError: If a weight is negative or not finite.
    """
    if not class_weight:
        return None
    if not all(0 <= weight <= _LARGEST for weight in class_weight.values()):
        raise ValueError(
            "Argument `class_weight` must hold weights that are finite and >= 0. Received: "
            f"class_weight={class_weight}"
        )
    return ClassWeights({int(key): float(weight) for key, weight in class_weight.items()})


def multiply(sample_weight: Any, weights: tf.Tensor) -> Any:
    """Returns sample weights multiplied by the weights of examples.

    Args:
        sample_weight: Nested structure of tensors `[n, ...]`, or None.
        weights: float32 `[n]`, the weight of each example.
    """
    if sample_weight is None:
        return weights

    def product(tensor):
        shape = [-1] + [1] * (tensor.shape.rank - 1)
        return tf.cast(tensor, weights.dtype) * tf.reshape(weights, shape)

    return tf.nest.map_structure(product, sample_weight)
