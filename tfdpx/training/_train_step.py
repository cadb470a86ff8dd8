"""Algorithm 1 of De et al. 2022 (arXiv:2204.13650): one private update on a whole logical batch.

The story in order, and who does what: the inputs are looked at (`inputs`), the model is built and
its microbatch traced and checked (`views`, `preparation`, `checks`); each microbatch makes K
views of its examples (`views`), their gradients (`per_example`) and clipped sums (`microbatch`,
`mechanism`); the sums are added over microbatches and replicas (`microbatches`, `replicas`); noise
is added once (`mechanism`, `noise`), keyed and counted (`run`); and the Keras optimizer applies the
result.
"""

import keras
import tensorflow as tf

from tfdpx import mechanism, noise
from tfdpx._keras import metric_internals, model_internals
from tfdpx.checks.callbacks import check_log_names
from tfdpx.checks.state import check_update, without_metrics
from tfdpx.per_example.rows import Rows
from tfdpx.sampling import inputs
from tfdpx.training import _microbatches, replicas
from tfdpx.training._microbatch import Inputs
from tfdpx.training._microbatches import BatchTotals
from tfdpx.training.clip_policy import UpdateClip
from tfdpx.training.preparation import Batch, prepare
from tfdpx.training.views import build

# Independent streams of one step's seed.
_NOISE, _VIEWS, _MASKS, _PUBLIC = 0, 1, 2, 3


def private_train_step(optimizer, model, data):
    """What `keras.Model.train_step` does, privately.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled `keras.Model`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)`, nests of tensors [B, ...]. An example whose
            sample weight is zero is absent: it contributes exactly zero. Those of type
            bool or `inputs.FLAGS`, [B], say that and nothing else.

    Returns:
        Keras' logs: `loss` and the compiled metrics of the batch. They are functions of the private
        data that the guarantee does not cover.
    """
    data, ids = optimizer.clip_policy.split(data, optimizer.session)
    inputs.check_batch(model, data)
    # In eager mode Keras hands over numpy arrays.
    data = tf.nest.map_structure(lambda t: None if t is None else tf.convert_to_tensor(t), data)
    data = inputs.same_rows(data)
    # Batches may be keyed by `iterations`: it must not advance before the batch was read.
    with tf.control_dependencies([t for t in tf.nest.flatten(data) if t is not None]):
        return _step(optimizer, model, data, ids)


def _step(optimizer, model, data, ids):
    context = replicas.check_context(model)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    present = inputs.present_rows(sample_weight, Rows(x).count)
    given = inputs.present_of_users(sample_weight) if optimizer.of_users else None
    sample_weight = inputs.without_flags(sample_weight)
    data = x, y, sample_weight
    views = build(model, x, y, sample_weight)
    variables = model.trainable_variables
    optimizer.trains(model)
    seed = optimizer.step_key()
    # Drawn for the rows of all replicas: which of them has an example does not change its views.
    count = Rows(x).count
    choices = views.draw(count * context.num_replicas_in_sync, noise.fold_in(seed, _VIEWS))
    dealt = replicas.is_dealt(model, optimizer.session)
    choices = replicas.own_rows(choices, count, context, dealt)
    policy = optimizer.clip_policy
    choices = (choices, policy.of_rows(ids, count), given)
    # Microbatches are counted over all replicas: no two have the same masks.
    masks = noise.fold_in(seed, _MASKS, context.replica_id_in_sync_group)
    one_microbatch = _OneMicrobatch(optimizer, model, views, count, masks)
    batch = Batch(views, data, present is not None)
    one_microbatch.microbatch, size = prepare(optimizer, model, batch)
    key, engine = noise.fold_in(seed, _PUBLIC), one_microbatch.microbatch.engine
    clip = policy.begin(model, engine, views.example_rows(x), y, context, key)
    one_microbatch.clip = clip
    update = one_microbatch.microbatch.update

    def all_passes(data, choices, present):
        totals, logs = _microbatches.run(
            one_microbatch, data, choices, present, size, one_microbatch.zero()
        )
        return totals._replace(sums=update.finished(variables, totals.sums)), logs

    if replicas.compile_apart(model):
        # XLA cannot compile what replicas on CPUs say to each other.
        all_passes = tf.function(all_passes, jit_compile=True, autograph=False)
    totals, logs = all_passes(data, choices, present)

    sums = [*totals.sums, *policy.to_release(totals.measured, optimizer.batch_size)]
    exact = [
        totals.nonfinite,
        totals.examples,
        *policy.to_share(ids, present, totals.measured, context),
    ]
    totals_of_all = replicas.sum_over_replicas([*sums, *exact], context)
    examples = totals_of_all[len(sums) + 1]
    # Without weights every row is an example, and the number of them is what was declared.
    most = optimizer.batch_size if present is None and optimizer.noise_multiplier else None
    masked = optimizer.state.mask_after_budget(totals_of_all, examples, most)
    sums, (nonfinite, _, *exact) = masked[: len(sums)], masked[len(sums) :]
    sigma = policy.noise_of_gradients(optimizer.noise_multiplier)
    noisy = mechanism.privatize(sums, sigma, optimizer.batch_size, noise.fold_in(seed, _NOISE))
    gradients = clip.finish(noisy[: len(variables)])
    optimizer.record(tf.linalg.global_norm([g.tensor for g in gradients]), nonfinite)
    policy.learn(*(each.tensor for each in noisy[len(variables) :]), *exact)

    def apply():
        penalty, penalty_gradients = regularization(variables)
        pairs = zip(gradients, penalty_gradients, strict=True)
        optimizer.apply([g if p is None else g.plus(p) for g, p in pairs], variables)
        return penalty

    if tf.executing_eagerly():
        penalty = without_metrics(model, "The update", apply, optimizer.prepared[model].checked)
    else:
        penalty = apply()

    show_losses(model, totals.loss, totals.tracked, totals.examples, penalty)
    logs = {**(logs or {}), **model.get_metrics_result()}
    if not tf.executing_eagerly():
        check_update(tf.compat.v1.get_default_graph(), model)
    check_log_names(logs, optimizer)
    return logs


def show_losses(model, loss, tracked, examples, penalty):
    """Adds the losses of a batch to what Keras shows.

    Args:
        model: A compiled, built `keras.Model`.
        loss: Float32 scalar, the sum over the examples that are present.
        tracked: List of float32 scalars, such sums of what `RowLosses.tracked` lists.
        examples: Float32 scalar, how many are present.
        penalty: Float32 scalar, of the weight regularisers.
    """
    count = tf.maximum(examples, 1.0)
    model_internals.update_loss_tracker(model, loss / count + penalty, examples)
    outputs = model_internals.output_loss_trackers(model)
    for tracker, total in zip(outputs, tracked, strict=False):
        tracker.update_state(total / count, sample_weight=examples)
    own = [v for t in model_internals.own_trackers(model) for v in (t.total, t.count)]
    for variable, total in zip(own, tracked[len(outputs) :], strict=True):
        variable.assign_add(tf.cast(total, variable.dtype))


class _OneMicrobatch:
    """One microbatch: views, gradients, clipping, metrics.

    Attributes:
        microbatch: What computes clipped sums.
        clip: The `UpdateClip` of the update.
    """

    def __init__(self, optimizer, model, views, count, masks):
        self.microbatch, self.clip = None, UpdateClip()
        self._optimizer = optimizer
        self._model = model
        self._views = views
        self._count = count
        self._masks = masks

    def __call__(self, data, choices, present, index):
        """The `BatchTotals` of a microbatch, and Keras' metric logs; `present` None: every row is.

        Its number `index` keys its random layers' draws.
        """
        model, views = self._model, self._views
        choices, of_rows, given = choices
        policy = self._optimizer.clip_policy
        x, y, sample_weight = data
        checked = self._optimizer.prepared[model].checked
        x = without_metrics(model, "The augmentation", lambda: views.rows(x, choices), checked)
        # Where every row is present, Keras counts as it always does.
        counted = present if given is None else given
        y, sample_weight, counted = views.repeat((y, sample_weight, counted))
        shares = views.shares(given)
        key, clips = noise.fold_in(self._masks, index), policy.clips(of_rows, self.clip)
        shared = self.microbatch.update.tensors
        rows = x, y, sample_weight
        result = self.microbatch(Inputs(rows, present, key, clips, shared, shares))
        logs = metric_internals.compute_metrics(model, x, y, result.y_pred, sample_weight, counted)
        if present is None:
            present = tf.ones([Rows(data).count], tf.bool)

        def total(losses):
            losses = losses if counted is None else tf.where(counted, losses, 0.0)
            return tf.reduce_sum(losses * (1 / views.count if shares is None else shares))

        bad = present & ~tf.math.is_finite(result.squared_norms)
        return (
            BatchTotals(
                sums=result.sums,
                loss=total(result.losses),
                tracked=[total(losses) for losses in result.tracked],
                examples=tf.reduce_sum(tf.cast(present, "float32")),
                nonfinite=tf.reduce_sum(tf.cast(bad, "float32")),
                measured=policy.measured(
                    result.squared_norms, present, of_rows, clips, self._count
                ),
            ),
            logs,
        )

    def zero(self):
        """The `BatchTotals` of no microbatch at all."""
        return BatchTotals(
            sums=[tf.zeros(v.shape, "float32") for v in self._model.trainable_variables],
            loss=tf.zeros([]),
            tracked=[tf.zeros([])] * model_internals.count_tracked(self._model),
            examples=tf.zeros([]),
            nonfinite=tf.zeros([]),
            measured=self._optimizer.clip_policy.nothing_measured(self._count),
        )


def regularization(variables):
    """The weight regularisers' penalty and its gradients; they read no data, so need no noise."""
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return 0.0, [None] * len(variables)
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), "float32") for v in regularized])
    gradients = tape.gradient(penalty, [v.value for v in variables])
    return penalty, [None if g is None else tf.cast(g, "float32") for g in gradients]
