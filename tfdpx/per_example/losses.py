"""The loss of each row as Keras computes it on a batch of one, for the whole batch at once."""

import keras
import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.rows import Rows


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
        float32 [rows], and a list of float32 [rows], the unweighted loss of each output for the
        trackers of `keras_hook.output_loss_trackers(model)`.
    """
    predictions = Outputs(y_pred)
    targets = Rows((x, y, sample_weight))
    trackers = keras_hook.output_loss_trackers(model)
    fresh = [(v, tf.zeros(v.shape, v.dtype)) for tracker in trackers for v in tracker.variables]

    def loss_of_one(inputs):
        rows, outputs = [[t[tf.newaxis] for t in group] for group in inputs]
        x, y, sample_weight = targets.pack(rows)
        # Keras' loss trackers are to count once, later: here their updates go into the scope.
        with keras.StatelessScope(state_mapping=fresh) as scope:
            loss = keras_hook.compute_loss(model, x, y, predictions.rebuild(outputs), sample_weight)
            each = [scope.get_current_value(tracker.total) for tracker in trackers]
        # A loss with reduction="none" still means the sum of what it returns.
        return [tf.cast(tf.reduce_sum(value), "float32") for value in (loss, *each)]

    with (
        keras_hook.recording(None),
        keras_hook.without_weight_regularizers(model.trainable_variables),
    ):
        total, *each = tf.vectorized_map(loss_of_one, (targets.tensors, predictions.tensors))
    return total, each
