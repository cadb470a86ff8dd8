"""What an engine gives for one pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class EngineOutput:
    """Per-example quantities of B examples with K views each.

    Attributes:
        losses: float32 [B * K], the loss of each row.
        output_losses: List of float32 [B * K], one a tracked output.
        y_pred: The model's output, a nest of tensors [B * K, ...].
        squared_norms: float32 [B], the squared l2 norm of each example's mean gradient over its
            views and over all trainable variables.
        clipped_sums: Function of factors, float32 [B], that gives the sum over examples of factor
            times gradient, a list of float32 tensors in the order of `model.trainable_variables`.
            An example of factor zero contributes exactly zero.
        of_rows: List of tensors [B * K, ...] of which each row must follow from that row of the
            inputs, for the gradients to be those of one example each: to be proved. Empty where
            each example is computed alone.
        alone: List of pairs of lists of tensors [B * K, ...], what a layer computed for each
            example alone: its inputs and its outputs.
    """

    losses: tf.Tensor
    output_losses: Sequence[tf.Tensor]
    y_pred: Any
    squared_norms: tf.Tensor
    clipped_sums: Callable
    of_rows: Sequence[tf.Tensor] = ()
    alone: Sequence[tuple] = ()
