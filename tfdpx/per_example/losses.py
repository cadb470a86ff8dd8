"""The loss of each row as Keras computes it on a batch of one, for the whole batch at once."""

import dataclasses

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.randomness import check_assigned
from tfdpx.per_example.rows import Rows
from tfdpx.per_example.vectorize import vectorized_map


@dataclasses.dataclass(frozen=True)
class RowLosses:
    """The losses of B * K rows and their gradients.

    Attributes:
        losses: float32 [rows].
        output_losses: List of float32 [rows], the unweighted loss of each output for the trackers
            of `model_internals.output_loss_trackers(model)`.
        predictions: List of the tensors [rows, ...] of the model's output that a loss can be
            differentiated by; among them the logits that Keras' cross-entropies reach for.
        cotangents: List of tensors, the gradient of the sum of `losses` at each of `predictions`.
    """

    losses: tf.Tensor
    output_losses: list
    predictions: list
    cotangents: list


def loss_of_one(model, x, y, y_pred, sample_weight):
    """What Keras computes on a batch of one row, as a function of that row.

    Args:
        model: As for `row_losses`, like what follows; only the structures of the nests matter.
        x: Nest of tensors.
        y: As `x`, or None.
        y_pred: Nest of tensors.
        sample_weight: As `x`, or None.

    Returns:
        Function of the tensors of `Rows((x, y, sample_weight))` and of `Outputs(y_pred)`, each
        without batch axis, to a list of float32 scalars: the loss and each output's loss.
    """
    of_rows = loss_of_rows(model, x, y, y_pred, sample_weight)

    def of_one(inputs, outputs):
        return of_rows([t[tf.newaxis] for t in inputs], [t[tf.newaxis] for t in outputs])

    return of_one


def loss_of_rows(model, x, y, y_pred, sample_weight):
    """As `loss_of_one`, but its function takes tensors with a batch axis, of any number of rows."""
    predictions = Outputs(y_pred)
    targets = Rows((x, y, sample_weight))
    trackers = model_internals.output_loss_trackers(model)
    counted = [v for tracker in trackers for v in tracker.variables]

    def of_rows(inputs, outputs):
        x, y, sample_weight = targets.pack(inputs)
        y_pred = predictions.rebuild(outputs)
        fresh = [(v, tf.zeros(v.shape, v.dtype)) for v in counted]
        with (
            step_context.recording(None),
            layer_internals.without_weight_regularizers(model.trainable_variables),
            # Keras' loss trackers are to count once, later: here their updates go into the scope.
            keras.StatelessScope(state_mapping=fresh) as scope,
        ):
            loss = model_internals.compute_loss(model, x, y, y_pred, sample_weight)
            totals = [scope.get_current_value(tracker.total) for tracker in trackers]
        # They may have been made just now.
        made = model_internals.output_loss_trackers(model)
        own = [v for tracker in made for v in tracker.variables]
        check_assigned(scope, own, "The loss", model)
        # A loss with reduction="none" still means the sum of what it returns.
        return [tf.cast(tf.reduce_sum(value), "float32") for value in (loss, *totals)]

    return of_rows


def row_losses(model, x, y, y_pred, sample_weight):
    """`model.compute_loss` vectorised over batches of one row.

    Any loss, weighting and reduction so means what it means in Keras; the batch loss times the
    batch size does not (it is wrong for `sum` and `mean_with_sample_weight`). Weight
    regularisers read no data and are left out.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of tensors [rows, ...].
        y: As `x`, or None.
        y_pred: The model's output, a nest of tensors [rows, ...].
        sample_weight: As `x`, or None.

    Returns:
        `RowLosses`.
    """
    predictions = Outputs(y_pred)
    of_one = loss_of_one(model, x, y, y_pred, sample_weight)

    def with_gradients(row):
        inputs, outputs = row
        # The tape stands inside: differentiating across the function that `vectorized_map` makes
        # under XLA would turn every input of the step into a compile-time constant.
        wanted = predictions.select(outputs)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(wanted)
            values = of_one(inputs, outputs)
        zero = tf.UnconnectedGradients.ZERO
        return values, tape.gradient(values[0], wanted, unconnected_gradients=zero)

    inputs = Rows((x, y, sample_weight)).tensors
    (losses, *each), cotangents = vectorized_map(
        with_gradients, (inputs, predictions.tensors), "The loss"
    )
    return RowLosses(losses, each, predictions.select(predictions.tensors), cotangents)
