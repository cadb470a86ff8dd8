"""Keras's metrics for batches with padding, in which only the present rows count."""

import keras
import tensorflow as tf

from tfdpx._keras import names, step_context

# Metrics that take a weight per decision instead of per row.
_COUNTING_METRICS = (
    names.get("_ConfusionMatrixConditionCount"),
    keras.metrics.Precision,
    keras.metrics.Recall,
    names.get("SensitivitySpecificityBase"),
    keras.metrics.AUC,
)


def compute_metrics(model, x, y, y_pred, sample_weight, present):
    """Calls `model.compute_metrics`, and counts only the rows that are present.

    `present` is bool [rows], or None if all rows are present.

    Keras passes `sample_weight` only to `weighted_metrics`, but an absent row (padding) must not
    count in the unweighted ones either.
    """
    compiled = model._compile_metrics
    own_method = type(model).compute_metrics is not keras.Model.compute_metrics
    if compiled is None or present is None or own_method:
        if sample_weight is None and present is not None:
            sample_weight = tf.cast(present, "float32")
        return model.compute_metrics(x, y, y_pred, sample_weight)
    if not compiled.built:
        with step_context.recording(None):
            compiled.build(y, y_pred)
    y_true, y_pred = compiled._flatten_y(y), compiled._flatten_y(y_pred)
    weights = [None] if sample_weight is None else compiled._flatten_y(sample_weight)
    weights = weights * len(y_true) if len(weights) == 1 else weights
    present = tf.cast(present, "float32")
    unweighted, weighted = compiled._flat_metrics, compiled._flat_weighted_metrics
    for plain_metrics, weighted_metrics, *batch, weight in zip(
        unweighted, weighted, y_true, y_pred, weights, strict=True
    ):
        for metric in plain_metrics.metrics if plain_metrics else ():
            _update(metric, *batch, present)
        for metric in weighted_metrics.metrics if weighted_metrics else ():
            _update(metric, *batch, present, weight)
    return model.get_metrics_result()


def _update(metric, y_true, y_pred, present, weight=None):
    """Calls `metric.update_state` for the present rows; `present` is float32 [rows]."""
    mask = getattr(y_pred, "_keras_mask", None)
    y_true, y_pred = _without_absent(y_true, present), _without_absent(y_pred, present)
    if weight is None:
        # Without weights Keras ignores a mask.
        weight, mask = present, None
    elif mask is not None:
        y_pred._keras_mask = mask
    if isinstance(metric, names.get("_IoUBase")):
        like = y_true if metric.sparse_y_true else y_true[..., 0]
        weight = tf.broadcast_to(_with_axes_of(like, weight), tf.shape(like))
    elif isinstance(metric, _COUNTING_METRICS):
        weight = _with_axes_of(y_true, weight)
    elif mask is not None:
        weight = _with_axes_of(mask, weight)
    if type(metric) is keras.metrics.MeanMetricWrapper:  # A user's function.
        values = tf.convert_to_tensor(metric._fn(y_true, y_pred, **metric._fn_kwargs))
        if values.shape.rank == 0:
            raise ValueError(
                f"Metric '{metric.name}' returns one number for a batch, and rows that were not "
                "drawn cannot be left out of it. Return one number for each example, for example "
                "by `keras.ops.mean(..., axis=-1)`."
            )
    metric.update_state(y_true, y_pred, sample_weight=weight)


def _without_absent(tensor, present):
    """Returns `tensor` [rows, ...] with its first present row in place of absent ones.

    A weight of zero is not enough, because zero times a NaN in an absent row is NaN.
    """
    first = tf.gather(tensor, tf.argmax(present))
    first = tf.where(tf.reduce_any(present > 0), first, tf.zeros_like(first))
    return tf.where(_with_axes_of(tensor, present > 0), tensor, first)


def _with_axes_of(tensor, weight):
    """Returns `weight` with trailing axes of length one, up to the rank of `tensor`."""
    missing = max(tensor.shape.rank - weight.shape.rank, 0)
    return tf.reshape(weight, tf.concat([tf.shape(weight), [1] * missing], axis=0))
