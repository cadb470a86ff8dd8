"""Computes a loss for each row: the loss that Keras computes for a batch with only this row."""

import dataclasses

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context
from tfdpx.per_example import rowwise
from tfdpx.per_example.random_layers import UnmappedState, check_assigned, seeds, state_mapping
from tfdpx.per_example.rows import Outputs, Rows
from tfdpx.per_example.vectorize import vectorized_map


@dataclasses.dataclass(frozen=True)
class RowLosses:
    """The loss of each row, and the gradients of these losses.

    Attributes:
        losses: float32 [rows].
        tracked: List of float32 [rows], numbers for the model's metrics. The first tensors are the
            unweighted losses of the outputs. The metrics in
            `model_internals.output_loss_trackers(model)` average these. Then come two tensors for
            each metric in `model_internals.own_trackers(model)`: the numbers that `compute_loss`
            adds to the total of the metric, and the numbers that it adds to the count.
        predictions: List of the differentiable tensors [rows, ...] in the model's output, with the
            logits that Keras's cross-entropies read.
        cotangents: List of tensors, the gradients of the sum of `losses` with respect to
            `predictions`.
        direct: List of float32 tensors [rows, *variable.shape], the gradients of each row's loss
            with respect to variables that the loss itself reads, for example a learned
            temperature.
    """

    losses: tf.Tensor
    tracked: list
    predictions: list
    cotangents: list
    direct: list


def row_losses(
    model, x, y, y_pred, sample_weight, states=None, variables=(), shared=(), is_rowwise=False
):
    """Returns the loss of each row: `model.compute_loss` for a batch with only this row.

    So any loss, weighting and reduction means the same as in Keras. (The loss of a batch times the
    size of the batch would be wrong for the reductions `sum` and `mean_with_sample_weight`.) Weight
    regularizers read no data and are left out. A loss that `rowwise` lists is called on all rows at
    once, and tracing takes a quarter of the time.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of tensors [rows, ...].
        y: As `x`, or None.
        y_pred: The model's output, a nest of tensors [rows, ...].
        sample_weight: As `x`, or None.
        states: int64 tensor [rows, generators, 2]. If a loss calls the model again, the model's
            seed generators start from these states. None means fixed states, which are not secret.
        variables: List of the `keras.Variable`s that `RowLosses.direct` has gradients for.
        shared: List of other tensors that the loss may read.
        is_rowwise: Bool, whether the model is known to treat each row by itself.

    Returns:
        `RowLosses`.
    """
    if is_rowwise and sample_weight is None and not variables:
        loss = rowwise.find_loss(model, y, y_pred)
        if loss is not None and not Outputs(y_pred).has_masks:
            return _losses_by_row(loss, y, y_pred)
    predictions, targets = Outputs(y_pred), Rows((x, y, sample_weight))
    values = [v.value for v in variables]
    if states is None:
        count = len(layer_internals.seed_generators(model))
        states = seeds(tf.zeros([2], tf.int64), [targets.count, count])

    def differentiate(row):
        inputs, outputs, states = row
        # The tape is inside of the mapped function: differentiating across the function that
        # `vectorized_map` makes under XLA would turn every input of the step into a compile-time
        # constant.
        differentiable = predictions.select(outputs)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([differentiable, values])
            # `t[tf.newaxis]` would do the same, but its gradient would be a copy.
            inputs = targets.pack([tf.expand_dims(t, 0) for t in inputs])
            y_pred = predictions.rebuild([tf.expand_dims(t, 0) for t in outputs])
            losses = _losses_of_one(model, *inputs, y_pred, states)
        zero, sources = tf.UnconnectedGradients.ZERO, (differentiable, values)
        at_outputs, at_values = tape.gradient(losses[0], sources, unconnected_gradients=zero)
        return losses, at_outputs, [tf.cast(tf.convert_to_tensor(g), "float32") for g in at_values]

    rows = targets.tensors, predictions.tensors, states
    if targets.tensors[0].shape[0] == 1:
        row = tf.nest.map_structure(lambda t: t[0], rows)
        results = tf.nest.map_structure(lambda t: t[tf.newaxis], differentiate(row))
    else:
        results = vectorized_map(differentiate, rows, "The loss", shared=shared)
    (losses, *tracked), cotangents, direct = results
    differentiable = predictions.select(predictions.tensors)
    return RowLosses(losses, tracked, differentiable, cotangents, direct)


def _losses_by_row(loss, y, y_pred):
    """Returns the `RowLosses` of a loss that is known to treat each row by itself."""
    predictions = Outputs(y_pred)
    # `copy.copy` would call `get_config`, from which Keras's Huber leaves out its delta.
    by_entry = layer_internals.without(loss, reduction="none")
    differentiable = predictions.select(predictions.tensors)
    with (
        tf.GradientTape(watch_accessed_variables=False) as tape,
        step_context.recording(None),
        step_context.unscaled_losses(),
    ):
        tape.watch(differentiable)
        losses = by_entry(y, predictions.rebuild(predictions.tensors))
        if losses.shape.rank > 1:
            adds = loss.reduction in ("sum", "none", None)
            reduce = tf.reduce_sum if adds else tf.reduce_mean
            losses = reduce(losses, axis=list(range(1, losses.shape.rank)))
        losses = tf.cast(losses, "float32")
    zero = tf.UnconnectedGradients.ZERO
    cotangents = tape.gradient(losses, differentiable, unconnected_gradients=zero)
    return RowLosses(losses, [], differentiable, cotangents, [])


def sum_of_outputs(y_pred, variables):
    """Returns `RowLosses` as if the loss were the sum of all outputs.

    The engine uses these losses if only shapes matter.

    Args:
        y_pred: Nest of tensors [rows, ...].
        variables: List of `keras.Variable`.
    """
    outputs = Outputs(y_pred)
    predictions = outputs.select(outputs.tensors)
    losses = tf.zeros(tf.shape(outputs.tensors[0])[:1])
    direct = [tf.zeros([*losses.shape, *v.shape]) for v in variables]
    return RowLosses(losses, [], predictions, [tf.ones_like(t) for t in predictions], direct)


def _losses_of_one(model, x, y, sample_weight, y_pred, states):
    """Returns a list of scalars: the loss of one row, and the numbers that it adds to metrics."""
    output_trackers = model_internals.output_loss_trackers(model)
    other_trackers = model_internals.own_trackers(model)
    # The trackers are updated later, once. Updates that the loss makes here stay in the scope.
    variables = [v for tracker in (*output_trackers, *other_trackers) for v in tracker.variables]
    zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
    generators = layer_internals.seed_generators(model)
    with (
        step_context.recording(None),
        layer_internals.without_weight_regularizers(model.trainable_variables),
        keras.StatelessScope(state_mapping=[*zeros, *state_mapping(generators, states)]) as scope,
    ):
        loss = model_internals.compute_loss(model, x, y, y_pred, sample_weight)
        sums = [tracker.total for tracker in output_trackers]
        sums += [v for tracker in other_trackers for v in (tracker.total, tracker.count)]
        sums = [scope.get_current_value(v) for v in sums]
    _check_unread([value for _, value in zeros], loss)
    # `compute_loss` may just have made the trackers.
    output_trackers = model_internals.output_loss_trackers(model)
    assignable = [v for tracker in (*output_trackers, *other_trackers) for v in tracker.variables]
    check_assigned(scope, [*assignable, *(g.state for g in generators)], "The loss", model)
    # A loss with reduction="none" still means the sum of its values.
    return [tf.cast(tf.reduce_sum(value), "float32") for value in (loss, *sums)]


def _check_unread(totals, loss):
    """Raises UnmappedState if a loss depends on `totals`, the values of the model's metrics."""
    visited, waiting = set(), [loss]
    operations = {id(t.op) for t in totals if tf.is_symbolic_tensor(t)}
    while waiting:
        tensor = waiting.pop()
        if not tf.is_symbolic_tensor(tensor) or id(tensor.op) in visited:
            continue
        visited.add(id(tensor.op))
        waiting.extend(tensor.op.inputs)
    if visited & operations:
        raise UnmappedState(
            "The loss reads a metric of the model, which adds up private examples without noise, "
            "so no gradient would be bounded by the clip. A metric may be updated in "
            "`compute_loss`, but not read."
        )
