"""Algorithm 1 of De et al. 2022 (arXiv:2204.13650): one private update on a whole logical batch.

In order, with the module for each part: the inputs are checked (`inputs`); the model is built, and
its microbatch is traced and checked (`preflight`, `checks`); each microbatch makes K views of its
examples (`views`), their gradients (`per_example`) and clipped sums (`clipping`, `microbatches`,
`mechanism`); the sums are added over microbatches and replicas (`replicas`); noise is added once
(`mechanism`, `noise`), keyed and counted (`session`); and the Keras optimizer applies the result.
"""

import typing

import keras
import tensorflow as tf

from tfdpx import mechanism, noise
from tfdpx._keras import metric_internals, model_internals
from tfdpx.checks.callbacks import check_log_names
from tfdpx.checks.state import call_without_metrics, check_update
from tfdpx.per_example.rows import Rows
from tfdpx.sampling import inputs
from tfdpx.sampling.class_weights import multiply
from tfdpx.training import microbatches, replicas
from tfdpx.training.clipping import split_ids
from tfdpx.training.microbatches import BatchTotals, Inputs
from tfdpx.training.preflight import Batch, prepare
from tfdpx.training.views import Views

# Independent streams of one step's seed.
_NOISE, _VIEWS, _MASKS = 0, 1, 2


class _ByExample(typing.NamedTuple):
    """Decisions for each example, which travel with its rows into their microbatch.

    Attributes:
        number: int32 [B], the example's place in the batch.
        views: Nest of tensors [B, ...], the random choices of its views; or None.
        clips: float32 [B], of the clip policy; or None.
        present_of_users: bool [B, k], the examples of each person that are there; or None.
        class_weights: float32 [B], for the losses and metrics that Keras shows; or None.
        factors: float32 [B] in [0, 1], by which its clipped gradient is multiplied.
    """

    number: tf.Tensor
    views: typing.Any
    clips: tf.Tensor | None
    present_of_users: tf.Tensor | None
    class_weights: tf.Tensor | None
    factors: tf.Tensor


class _BatchSums(typing.NamedTuple):
    """Sums over the batch, and then over all replicas, that an update is made of.

    Attributes:
        gradients: List of float32 tensors, clipped sums over B, one a trained variable.
        measured: `tfdpx.training.clipping.Measured`.
        examples: float32 scalar.
        nonfinite: float32 scalar, examples without a finite gradient.
    """

    gradients: list
    measured: typing.Any
    examples: tf.Tensor
    nonfinite: tf.Tensor


def private_train_step(optimizer, model, data):
    """Makes one update privately, in place of `keras.Model.train_step`.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled `keras.Model`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)`, nests of tensors [B, ...]. An example whose
            sample weight is zero is absent: it contributes exactly zero. Weights of type bool, [B],
            and `inputs.FLAGS` of a plan's draws mark absent examples and have no other effect.

    Returns:
        Keras' logs: `loss` and the compiled metrics of the batch. They are functions of the private
        data that the guarantee does not cover.
    """
    data, ids = split_ids(optimizer, data)
    inputs.check_batch(model, data)
    # In eager mode Keras hands over numpy arrays.
    data = tf.nest.map_structure(lambda t: None if t is None else tf.convert_to_tensor(t), data)
    data = inputs.same_rows(data)
    # Batches may be keyed by `iterations`: it must not advance before the batch was read.
    with tf.control_dependencies([t for t in tf.nest.flatten(data) if t is not None]):
        try:
            return _step(optimizer, model, data, ids)
        except StopIteration as error:
            # Keras would take it for the end of the data.
            raise RuntimeError(
                f"The model or the loss of '{model.name}' raised StopIteration in its first step, "
                "for example by `next(...)` of an empty iterator."
            ) from error


def _step(optimizer, model, data, ids):
    context = replicas.check_context(model)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    count = Rows(x).count
    present = inputs.present_rows(sample_weight, count)
    present_of_users = inputs.present_of_users(sample_weight) if optimizer.of_users else None
    is_drawn = optimizer.session is not None and optimizer.session.draws is not None
    sample_weight = inputs.without_flags(sample_weight, is_drawn)
    data = x, y, sample_weight
    views = build_model(model, x, y, sample_weight)
    variables = model.trainable_variables
    optimizer.trains(model)
    seed, policy = optimizer.step_key(), optimizer.clip_policy
    # Drawn for the rows of all replicas, so that an example's views do not depend on its replica.
    choices = None
    if views.augment is not None:
        choices = views.draw(count * context.num_replicas_in_sync, noise.fold_in(seed, _VIEWS))
    in_shards = replicas.is_interleaved(model, optimizer.session)
    choices = replicas.select_replica_rows(choices, count, context, in_shards)
    clips = policy.clips(ids, count)
    batch = Batch(views, data, present is not None, clips is not None)
    microbatch, size = prepare(optimizer, model, batch)
    weights, factors = class_factors(optimizer, y, microbatch.output.y_pred)
    if weights is None:
        factors = tf.ones([count])
    clips = policy.before_weights(clips, factors)
    by_example = _ByExample(tf.range(count), choices, clips, present_of_users, weights, factors)
    # Microbatches are counted over all replicas: no two have the same masks.
    masks = None
    if microbatch.draws:
        masks = noise.fold_in(seed, _MASKS, context.replica_id_in_sync_group)
    one_microbatch = _OneMicrobatch(optimizer, model, views, microbatch, count, masks)

    def run_microbatches(data, by_example, present):
        totals, logs = microbatches.run(
            one_microbatch, data, by_example, present, size, one_microbatch.zero()
        )
        return totals._replace(
            sums=microbatch.update.apply_transforms(variables, totals.sums)
        ), logs

    if replicas.compile_per_replica(model):
        # XLA cannot compile the communication of replicas on CPUs.
        run_microbatches = tf.function(run_microbatches, jit_compile=True, autograph=False)
    totals, logs = run_microbatches(data, by_example, present)

    all_present = tf.ones([count], tf.bool) if present is None else present
    squared_norms = policy.after_weights(totals.squared_norms, factors)
    measured = policy.measure(ids, all_present, squared_norms, clips)
    batch_sums = _BatchSums(totals.sums, measured, totals.examples, totals.nonfinite)
    batch_sums = replicas.sum_over_replicas(batch_sums, context)
    # Without weights every row is an example, and the number of them is what was declared.
    max_examples = optimizer.batch_size if present is None and optimizer.noise_multiplier else None
    batch_sums = optimizer.state.mask_after_budget(batch_sums, batch_sums.examples, max_examples)
    sums = [*batch_sums.gradients, *batch_sums.measured.noisy]
    sigma, key = policy.gradient_noise_multiplier, noise.fold_in(seed, _NOISE)
    noisy = mechanism.privatize(sums, sigma, optimizer.batch_size, key)
    gradients, queries = noisy[: len(variables)], noisy[len(variables) :]
    optimizer.record(tf.linalg.global_norm([g.tensor for g in gradients]), batch_sums.nonfinite)
    policy.update(batch_sums.measured._replace(noisy=[query.tensor for query in queries]))

    def apply():
        penalty, penalty_gradients = regularization(variables)
        pairs = zip(gradients, penalty_gradients, strict=True)
        optimizer.apply([g if p is None else g + p for g, p in pairs], variables)
        return penalty

    if tf.executing_eagerly():
        penalty = call_without_metrics(
            model, "The update", apply, optimizer.prepared[model].checked
        )
    else:
        penalty = apply()

    show_losses(model, totals.loss, totals.tracked, totals.examples, penalty)
    logs = {**(logs or {}), **model.get_metrics_result()}
    if not tf.executing_eagerly():
        check_update(tf.compat.v1.get_default_graph(), model)
    check_log_names(logs, optimizer)
    return logs


def class_factors(optimizer, y, y_pred):
    """Returns the class weights of examples, and the factors of their clipped gradients.

    Args:
        optimizer: The tfdpx optimizer.
        y: Tensor [B], [B, 1] or [B, classes].
        y_pred: The model's output; only shapes are read.

    Returns:
        Pair of float32 tensors [B]; or of None where there are no class weights.
    """
    class_weight = optimizer.class_weight
    if class_weight is None:
        return None, None
    weights = class_weight.of_labels(y)
    return weights, mechanism.weight_factors(weights, class_weight.largest(y_pred))


def show_losses(model, loss, tracked, examples, penalty):
    """Adds the losses of a batch to the metrics that Keras shows.

    Args:
        model: A compiled, built `keras.Model`.
        loss: Float32 scalar, the sum over the examples that are present.
        tracked: List of float32 scalars, such sums of `RowLosses.tracked`.
        examples: Float32 scalar, how many are present.
        penalty: Float32 scalar, of the weight regularisers.
    """
    count = tf.maximum(examples, 1.0)
    model_internals.update_loss_tracker(model, loss / count + penalty, examples)
    output_trackers = model_internals.output_loss_trackers(model)
    for tracker, total in zip(output_trackers, tracked, strict=False):
        tracker.update_state(total / count, sample_weight=examples)
    variables = [v for t in model_internals.own_trackers(model) for v in (t.total, t.count)]
    for variable, total in zip(variables, tracked[len(output_trackers) :], strict=True):
        variable.assign_add(tf.cast(total, variable.dtype))


class _OneMicrobatch:
    """One microbatch: views, gradients, clipping, metrics."""

    def __init__(self, optimizer, model, views, microbatch, count, masks):
        self._optimizer, self._model, self._views = optimizer, model, views
        self._microbatch, self._count, self._masks = microbatch, count, masks

    def __call__(self, data, by_example, present, index):
        """The `BatchTotals` of a microbatch, and Keras' metric logs; `present` None: every row is.

        Its number `index` keys its random layers' draws.
        """
        model, views, present_of_users = self._model, self._views, by_example.present_of_users
        x, y, sample_weight = data
        subjects = self._optimizer.prepared[model].checked
        choices = by_example.views
        x, y = call_without_metrics(
            model,
            "The augmentation",
            lambda: (views.rows(x, choices), views.targets(y, choices)),
            subjects,
        )
        # If every row is present, Keras's metrics see the whole batch.
        is_counted = present if present_of_users is None else present_of_users
        weights = by_example.class_weights
        if weights is not None and present is not None:
            weights = tf.where(present, weights, 0.0)
        sample_weight, is_counted, weights = views.repeat((sample_weight, is_counted, weights))
        shares = views.shares(present_of_users)
        result = self._microbatch(
            Inputs(
                rows=(x, y, sample_weight),
                present=present,
                key=self._key(index),
                weights=by_example.factors,
                clips=by_example.clips,
                shared=self._microbatch.update.tensors,
                shares=shares,
            )
        )
        losses, norms = result.losses, result.squared_norms
        if weights is not None:
            losses, sample_weight = losses * weights, multiply(sample_weight, weights)
        logs = metric_internals.compute_metrics(
            model, x, y, result.y_pred, sample_weight, is_counted
        )
        if present is None:
            present = tf.ones([Rows(data).count], tf.bool)

        def total(losses):
            losses = losses if is_counted is None else tf.where(is_counted, losses, 0.0)
            return tf.reduce_sum(losses * (1 / views.count if shares is None else shares))

        places = by_example.number[:, tf.newaxis]
        totals = BatchTotals(
            sums=result.sums,
            loss=total(losses),
            tracked=[total(losses) for losses in result.tracked],
            examples=tf.reduce_sum(tf.cast(present, "float32")),
            nonfinite=tf.reduce_sum(tf.cast(present & ~tf.math.is_finite(norms), "float32")),
            squared_norms=tf.scatter_nd(places, tf.where(present, norms, 0.0), [self._count]),
        )
        return totals, logs

    def _key(self, index):
        """The key of a microbatch's draws; zeros where it draws nothing."""
        if self._masks is None:
            return tf.zeros([2], tf.int64)
        return noise.fold_in(self._masks, index)

    def zero(self):
        """Returns the zero element of `BatchTotals`, for summing over microbatches."""
        return BatchTotals(
            sums=[tf.zeros(v.shape, "float32") for v in self._model.trainable_variables],
            loss=tf.zeros([]),
            tracked=[tf.zeros([])] * model_internals.count_tracked(self._model),
            examples=tf.zeros([]),
            nonfinite=tf.zeros([]),
            squared_norms=tf.zeros([self._count]),
        )


def build_model(model, x, y, sample_weight):
    """Builds a model compiled with a tfdpx optimizer for batches like these.

    Args:
        model: A compiled `keras.Model`.
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
    """Returns the weight regularisers' penalty and its gradients, which need no noise."""
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return 0.0, [None] * len(variables)
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), "float32") for v in regularized])
    gradients = tape.gradient(penalty, [v.value for v in variables])
    return penalty, [None if g is None else tf.cast(g, "float32") for g in gradients]
