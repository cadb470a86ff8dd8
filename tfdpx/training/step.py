"""Algorithm 1 of De et al. 2022 (arXiv:2204.13650): one private update on a whole logical batch.

`_step` reads like the algorithm. The names in parentheses are modules:

1. Draw the random choices for the views of the batch (`views`).
2. For each microbatch, compute the gradient of each example (`per_example`) and clip it
   (`clipping`, `mechanism`). The function for this is traced and checked once (`preflight`).
3. Add up the `Totals` of all microbatches (`microbatches`) and of all replicas (`replicas`).
4. Add noise once (`mechanism`, `noise`), and count the update (`session`).
5. Apply the result with the Keras optimizer.
"""

import keras
import numpy as np
import tensorflow as tf

from tfdpx import mechanism, noise
from tfdpx._keras import metric_internals, model_internals, tensorflow_internals
from tfdpx.checks.callbacks import check_log_names
from tfdpx.checks.state import call_without_metrics, check_update
from tfdpx.per_example.rows import Rows
from tfdpx.sampling import inputs
from tfdpx.sampling.class_weights import multiply
from tfdpx.training import microbatches, replicas
from tfdpx.training.clipping import split_ids
from tfdpx.training.microbatches import Batch, Inputs, Totals
from tfdpx.training.preflight import prepare
from tfdpx.training.views import Views

# Each of these is folded into the key of a step, so the three uses get independent random numbers.
_NOISE, _VIEWS, _MASKS = 0, 1, 2


def private_train_step(optimizer, model, data):
    """Makes one update privately, in place of `keras.Model.train_step`.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled `keras.Model`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)`, nests of tensors [B, ...]. An example whose
            sample weight is zero is absent: it contributes exactly zero. Two kinds of weights only
            mark absent examples: weights of dtype bool, [B], and the flags of a plan's draws
            (`inputs.FLAGS`).

    Returns:
        Keras' logs: `loss` and the compiled metrics of the batch. These numbers are computed from
        private data without noise, so the guarantee does not cover them.
    """
    data, ids = split_ids(optimizer, data)
    inputs.check_batch(model, data)
    # In eager mode Keras hands over numpy arrays.
    data = tf.nest.map_structure(lambda t: None if t is None else tf.convert_to_tensor(t), data)
    data = inputs.same_rows(data)
    # The draws of the batch may depend on `iterations`, so it must be read before these advance.
    dependencies = tf.control_dependencies([t for t in tf.nest.flatten(data) if t is not None])
    with dependencies, tensorflow_internals.sharing_constants():
        try:
            return _step(optimizer, model, data, ids)
        except StopIteration as error:
            # Keras would take a StopIteration for the end of the data.
            raise RuntimeError(
                f"The model or the loss of '{model.name}' raised StopIteration in its first step, "
                "for example by `next(...)` of an empty iterator."
            ) from error


def _step(optimizer, model, data, ids):
    context = replicas.check_context(model)
    batch = _read(optimizer, data, ids)
    views = build_model(model, *batch.data)
    optimizer.trains(model)
    key = optimizer.step_key()
    batch = _draw_views(optimizer, model, views, batch, key, context)
    microbatch = prepare(optimizer, model, views, batch)
    batch = _weigh_classes(optimizer, model, batch, microbatch.output.y_pred)

    totals, logs = _sum_clipped_gradients(optimizer, model, views, microbatch, batch, key)
    reduced = _reduce(optimizer, batch, totals, context)
    gradients = _add_noise(optimizer, reduced, key)
    penalty = _apply(optimizer, model, gradients)
    return _show(optimizer, model, totals, penalty, logs)


def _read(optimizer, data, ids):
    """Returns a `Batch` made from `data`, the argument of `private_train_step`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    count = Rows(x).count
    is_drawn = optimizer.session is not None and optimizer.session.draws is not None
    return Batch(
        data=(x, y, inputs.without_flags(sample_weight, is_drawn)),
        present=inputs.present_rows(sample_weight, count),
        number=tf.range(count),
        ids=ids,
        clips=optimizer.clip_policy.clips(ids, count),
        present_of_users=inputs.present_of_users(sample_weight) if optimizer.of_users else None,
    )


def _draw_views(optimizer, model, views, batch, key, context):
    """Returns the batch with random choices for its views, a `Batch`."""
    if views.augment is None:
        return batch
    # Choices are drawn for all replicas, so an example's views do not depend on its replica.
    count = Rows(batch.data).count
    choices = views.draw(count * context.num_replicas_in_sync, noise.fold_in(key, _VIEWS))
    in_shards = replicas.is_interleaved(model, optimizer.session)
    return batch._replace(choices=replicas.select_replica_rows(choices, count, context, in_shards))


def _weigh_classes(optimizer, model, batch, y_pred):
    """Returns the batch with class weights, a `Batch`. Only the shape of `y_pred` is read."""
    weights, factors = class_factors(optimizer, model, batch.data[1], y_pred)
    if weights is None:
        factors = tf.ones([Rows(batch.data).count])
    clips = optimizer.clip_policy.before_weights(batch.clips, factors)
    return batch._replace(class_weights=weights, factors=factors, clips=clips)


def class_factors(optimizer, model, y, y_pred):
    """Returns the class weights of examples, and factors that multiply their clipped gradients.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`.
        y: Tensor [B], [B, 1] or [B, classes].
        y_pred: The model's output; only shapes are read.

    Returns:
        Pair of float32 tensors [B]; (None, None) if the model has never had class weights.
    """
    if model not in optimizer.weighted_models:
        return None, None
    table = optimizer.state.class_weights
    weights = table.of_labels(y)
    return weights, mechanism.weight_factors(weights, table.largest(y_pred))


def _sum_clipped_gradients(optimizer, model, views, microbatch, batch, key):
    """Returns the `Totals` of a batch, and Keras's logs if the batch is a single microbatch."""
    variables, count = model.trainable_variables, Rows(batch.data).count
    zero = Totals(
        # Vectors are NumPy arrays, which `microbatches.run` joins into one constant of the graph.
        sums=[(tf if len(v.shape) > 1 else np).zeros(v.shape, "float32") for v in variables],
        loss=tf.zeros([]),
        tracked=[tf.zeros([])] * model_internals.count_tracked(model),
        examples=tf.zeros([]),
        nonfinite=tf.zeros([]),
        squared_norms=tf.zeros([count]),
    )
    masks = tf.zeros([2], tf.int64)
    if microbatch.draws:
        # The key depends on the replica, so no two replicas have the same masks.
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        masks = noise.fold_in(key, _MASKS, replica)

    def one_microbatch(part, index):
        rows = _make_rows(optimizer, model, views, part)
        result = microbatch(
            Inputs(
                rows=rows,
                present=part.present,
                key=noise.fold_in(masks, index) if microbatch.draws else masks,
                weights=part.factors,
                clips=part.clips,
                shared=microbatch.update.tensors,
                row_weights=views.row_weights(part.present_of_users),
            )
        )
        return _add_up(model, views, part, rows, result, count)

    def sum_microbatches(batch):
        totals, logs = microbatches.run(one_microbatch, batch, microbatch.size, zero)
        sums = microbatch.update.apply_transforms(variables, totals.sums)
        return totals._replace(sums=sums), logs

    if replicas.compile_per_replica(model):
        # The whole step is not compiled, because XLA cannot compile the communication of replicas
        # on CPUs.
        sum_microbatches = tf.function(sum_microbatches, jit_compile=True, autograph=False)
    return sum_microbatches(batch)


def _make_rows(optimizer, model, views, part):
    """Returns all views of a microbatch: `(x, y, sample_weight)`, nests of tensors [n * K, ...]."""
    x, y, sample_weight = part.data

    def augment():
        return views.rows(x, part.choices), views.targets(y, part.choices)

    subjects = optimizer.prepared[model].checked
    x, y = call_without_metrics(model, "The augmentation", augment, subjects)
    return x, y, views.repeat(sample_weight)


def _add_up(model, views, part, rows, result, count):
    """Updates Keras's metrics. Returns the `Totals` of a microbatch, and Keras's logs.

    Args:
        model: The `keras.Model`.
        views: `Views`.
        part: `Batch` of the examples of the microbatch.
        rows: `(x, y, sample_weight)` of the views of these examples.
        result: `tfdpx.training.microbatches.Outcome`.
        count: Int or scalar tensor, the number of examples in the whole batch.
    """
    (x, y, sample_weight), losses, norms = rows, result.losses, result.squared_norms
    # None if every row is present. Keras's metrics then read the whole batch.
    is_counted = part.present if part.present_of_users is None else part.present_of_users
    weights, present = part.class_weights, part.present
    if weights is not None and present is not None:
        weights = tf.where(present, weights, 0.0)
    is_counted, weights = views.repeat((is_counted, weights))
    if weights is not None:
        losses, sample_weight = losses * weights, multiply(sample_weight, weights)
    logs = metric_internals.compute_metrics(model, x, y, result.y_pred, sample_weight, is_counted)
    if present is None:
        present = tf.ones([Rows(part.data).count], tf.bool)
    row_weights = views.row_weights(part.present_of_users)

    def total(losses):
        losses = losses if is_counted is None else tf.where(is_counted, losses, 0.0)
        return tf.reduce_sum(losses * (1 / views.count if row_weights is None else row_weights))

    places = part.number[:, tf.newaxis]
    totals = Totals(
        sums=result.sums,
        loss=total(losses),
        tracked=[total(losses) for losses in result.tracked],
        examples=tf.reduce_sum(tf.cast(present, "float32")),
        nonfinite=tf.reduce_sum(tf.cast(present & ~tf.math.is_finite(norms), "float32")),
        squared_norms=tf.scatter_nd(places, tf.where(present, norms, 0.0), [count]),
    )
    return totals, logs


def _reduce(optimizer, batch, totals, context):
    """Returns the `Totals` of all replicas, or zeros if the budget does not allow the update."""
    policy, present = optimizer.clip_policy, batch.present
    # Without sample weights, every row is an example. There may be at most `batch_size` of them.
    most = optimizer.batch_size if present is None and optimizer.noise_multiplier else None
    if present is None:
        present = tf.ones([Rows(batch.data).count], tf.bool)
    norms = policy.after_weights(totals.squared_norms, batch.factors)
    measured = policy.measure(batch.ids, present, norms, batch.clips)
    reduced = Totals(totals.sums, totals.examples, totals.nonfinite, measured)
    reduced = replicas.sum_over_replicas(reduced, context)
    return optimizer.state.mask_after_budget(reduced, reduced.examples, most)


def _add_noise(optimizer, reduced, key):
    """Returns the private gradients, one for each trained variable, and counts the update."""
    policy, count = optimizer.clip_policy, len(reduced.sums)
    sums, sigma = [*reduced.sums, *reduced.measured.noisy], policy.gradient_noise_multiplier
    noisy = mechanism.privatize(sums, sigma, optimizer.batch_size, noise.fold_in(key, _NOISE))
    gradients, queries = noisy[:count], noisy[count:]
    optimizer.record(tf.linalg.global_norm([g.tensor for g in gradients]), reduced.nonfinite)
    policy.update(reduced.measured._replace(noisy=[query.tensor for query in queries]))
    return gradients


def _apply(optimizer, model, gradients):
    """Applies private gradients plus those of regularisers. Returns the regularisers' penalty."""
    variables = model.trainable_variables

    def apply():
        penalty, penalty_gradients = regularization(variables)
        pairs = zip(gradients, penalty_gradients, strict=True)
        optimizer.apply([g if p is None else g + p for g, p in pairs], variables)
        return penalty

    if not tf.executing_eagerly():
        return apply()
    return call_without_metrics(model, "The update", apply, optimizer.prepared[model].checked)


def _show(optimizer, model, totals, penalty, logs):
    """Returns Keras's logs. Checks that the weights' update reads neither data nor metrics."""
    show_losses(model, totals.loss, totals.tracked, totals.examples, penalty)
    logs = {**(logs or {}), **model.get_metrics_result()}
    if not tf.executing_eagerly():
        check_update(tf.compat.v1.get_default_graph(), model)
    check_log_names(logs, optimizer)
    return logs


def show_losses(model, loss, tracked, examples, penalty):
    """Adds the losses of a batch to the metrics that Keras shows.

    Args:
        model: A compiled, built `keras.Model`.
        loss: Float32 scalar, the sum of the losses of present examples.
        tracked: List of float32 scalars, the sums of `RowLosses.tracked` over present examples.
        examples: Float32 scalar, the number of present examples.
        penalty: Float32 scalar, the penalty of weight regularisers.
    """
    count = tf.maximum(examples, 1.0)
    model_internals.update_loss_tracker(model, loss / count + penalty, examples)
    output_trackers = model_internals.output_loss_trackers(model)
    for tracker, total in zip(output_trackers, tracked, strict=False):
        tracker.update_state(total / count, sample_weight=examples)
    variables = [v for t in model_internals.own_trackers(model) for v in (t.total, t.count)]
    for variable, total in zip(variables, tracked[len(output_trackers) :], strict=True):
        variable.assign_add(tf.cast(total, variable.dtype))


def build_model(model, x, y, sample_weight):
    """Builds a model for batches with the shapes of `x`, `y` and `sample_weight`.

    Args:
        model: A `keras.Model`, compiled with a tfdpx optimizer.
        x: Nest of tensors [B, ...]; only shapes and dtypes are read.
        y: As `x`, or None.
        sample_weight: As `x`, or None.

    Returns:
        The `Views` of such batches.
    """
    optimizer = model_internals.innermost(model.optimizer)
    arguments = optimizer.augment, optimizer.augmult, x, optimizer.of_users
    views = Views(*arguments, optimizer.augment_targets)
    targets = views.target_specs(x, y, sample_weight)
    model_internals.build(model, (views.example_rows(x), *targets))
    return views


def regularization(variables):
    """Returns the penalty of weight regularisers, and a list of its gradients.

    The list has a float32 tensor, or None, for each of `variables`. No data is read, so the
    gradients need no noise.
    """
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return 0.0, [None] * len(variables)
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), "float32") for v in regularized])
    gradients = tape.gradient(penalty, [v.value for v in variables])
    return penalty, [None if g is None else tf.cast(g, "float32") for g in gradients]
