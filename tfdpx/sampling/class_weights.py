"""Weights of examples by their class, for `fit(class_weight=)`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import tensorflow as tf

_LARGEST = float(np.finfo("float32").max)


@dataclasses.dataclass(frozen=True)
class ClassWeights:
    """Weights of classes, for a single output and one label per example.

    Args:
        by_class: Dict from class, an int, to weight, a float. Missing classes have weight 1.
    """

    by_class: dict[int, float]

    def of_labels(self, y: Any) -> tf.Tensor:
        """Returns the weight of each example, float32 `[n]`, from targets as for `labels_of`."""
        listed = sorted(self.by_class)
        classes = tf.constant(listed, "int64")
        weights = tf.constant([self.by_class[label] for label in listed], "float32")
        labels = labels_of(y)
        places = tf.minimum(tf.searchsorted(classes, labels), len(listed) - 1)
        return tf.where(tf.gather(classes, places) == labels, tf.gather(weights, places), 1.0)

    def largest(self, y_pred: Any) -> float:
        """Returns the largest weight of the classes that a model has; 1 if all are 0.

        Args:
            y_pred: The model's output, a tensor `[n, num_classes]`; `[n, 1]` or `[n]` for two
                classes. Only its shape is read.

        Raises:
            ValueError: If it has another shape, or there are several outputs.
        """
        shapes = [tuple(output.shape) for output in tf.nest.flatten(y_pred)]
        if len(shapes) > 1 or len(shapes[0]) > 2:
            raise ValueError(
                "Argument `class_weight` needs a model with one output and one label per example. "
                f"Received: outputs of shapes {shapes}. Pass `sample_weight` instead."
            )
        num_classes = max(2, *(size or 0 for size in shapes[0][1:]))
        weights = [weight for weight in self.by_class.values() if math.isfinite(weight)]
        left_out = [1.0] if set(range(num_classes)) - set(self.by_class) else []
        return max(0.0, *weights, *left_out) or 1.0


def labels_of(y: Any) -> tf.Tensor:
    """Returns the class of each example, int64 `[n]`.

    Args:
        y: Tensor of classes, `[n]` or `[n, 1]`, or one-hot, `[n, num_classes]`.

    Raises:
        ValueError: If `y` is anything else.
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
    """Returns the weights of an argument `class_weight`, or None if there are none.

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
        sample_weight: Nest of tensors `[n, ...]`, or None.
        weights: float32 `[n]`.
    """
    if sample_weight is None:
        return weights

    def product(tensor):
        shape = [-1] + [1] * (tensor.shape.rank - 1)
        return tf.cast(tensor, weights.dtype) * tf.reshape(weights, shape)

    return tf.nest.map_structure(product, sample_weight)
