"""Algorithm 1 of De et al. 2022 (arXiv:2204.13650): one private update on a whole logical batch.

The story in order, and who does what: the inputs are looked at (`inputs`), the model is built and
checked once (`views`, `checks`); each pass makes K views of its examples (`views`), their gradients
(`per_example`) and clipped sums (`mechanism`); the sums are added over passes and replicas
(`replicas`); noise is added once (`mechanism`, `noise`), keyed and counted (`run`, `account`); and
the Keras optimizer applies the result.
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdpx import checks, keras_internals, mechanism, noise
from tfdpx.augmult import build
from tfdpx.checks.callbacks import check_log_names
from tfdpx.data import inputs
from tfdpx.memory import pass_size
from tfdpx.per_example import ENGINES
from tfdpx.per_example.rows import Rows
from tfdpx.replication import replicas

# Independent streams of one step's seed.
_NOISE, _VIEWS = 0, 1


@dataclasses.dataclass
class _Totals:
    """What the passes add up; every field a tensor or a list of tensors."""

    sums: list  # clipped sums over B, one float32 a variable
    loss: tf.Tensor  # of the present rows
    output_losses: list
    examples: tf.Tensor  # present
    nonfinite: tf.Tensor  # float32 count of present examples whose gradient is not finite


def private_train_step(optimizer, model, data):
    """What `keras.Model.train_step` does, privately.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled `keras.Model`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)`, nests of tensors [B, ...]. An example whose
            sample weight is zero is absent: it contributes exactly zero.

    Returns:
        Keras' logs: `loss` and the compiled metrics of the batch. They are functions of the private
        data that the guarantee does not cover.
    """
    inputs.check_batch(model, data)
    # In eager mode Keras hands over numpy arrays.
    data = tf.nest.map_structure(lambda t: None if t is None else tf.convert_to_tensor(t), data)
    data = inputs.same_rows(data)
    # Batches may be keyed by `iterations`: it must not advance before the batch was read.
    with tf.control_dependencies([t for t in tf.nest.flatten(data) if t is not None]):
        return _step(optimizer, model, data)


def _step(optimizer, model, data):
    context = replicas.check_context(model)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    views = build(model, x, y, sample_weight)
    variables = model.trainable_variables
    optimizer.account.follow(model.variables)
    optimizer.account.trains(variables)
    prepared = _prepare(optimizer, model, views, x, y, sample_weight)
    seed = optimizer.run.step_seed()
    # Drawn for the rows of all replicas: which of them has a row does not change its views.
    count = Rows(x).count
    choices = views.draw(count * context.num_replicas_in_sync, noise.fold_in(seed, _VIEWS))
    choices = replicas.own_rows(choices, count, context)
    present = _present(sample_weight, count)
    if sample_weight is None and not isinstance(count, int) and optimizer.noise_multiplier:
        present = _of_declared_size(present, count, optimizer.batch_size)
    batch = (x, y, sample_weight, choices, present)
    one_pass = _Pass(optimizer, model, prepared.engine, views)
    size = optimizer.microbatch_size
    if size == pass_size.AUTO:
        size = prepared.fitting(one_pass.traced, batch, optimizer.batch_size, variables)
    if replicas.compile_apart(model):
        totals, logs = _compiled_passes(one_pass, batch, size)
    else:
        totals, logs = _run_passes(one_pass, batch, size)

    *totals.sums, totals.nonfinite = replicas.sum_over_replicas(
        [*totals.sums, totals.nonfinite], context
    )
    gradients = mechanism.privatize(
        totals.sums, optimizer.noise_multiplier, optimizer.batch_size, noise.fold_in(seed, _NOISE)
    )
    optimizer.record(tf.linalg.global_norm([g.tensor for g in gradients]), totals.nonfinite)
    penalty, penalty_gradients = regularization(variables)
    gradients = [
        g if p is None else g.plus(p) for g, p in zip(gradients, penalty_gradients, strict=True)
    ]
    optimizer.apply(gradients, variables)

    show_losses(model, totals.loss, totals.output_losses, totals.examples, penalty)
    logs = {**(logs or {}), **model.get_metrics_result()}
    check_log_names(logs, optimizer)
    return logs


def show_losses(model, loss, output_losses, examples, penalty):
    """Adds the losses of a batch to what Keras shows.

    Args:
        model: A compiled, built `keras.Model`.
        loss: Float32 scalar, the sum over the examples that are present.
        output_losses: List of float32 scalars, such sums for each tracked output.
        examples: Float32 scalar, how many are present.
        penalty: Float32 scalar, of the weight regularisers.
    """
    count = tf.maximum(examples, 1.0)
    keras_internals.update_loss_tracker(model, loss / count + penalty, examples)
    for tracker, each in zip(
        keras_internals.output_loss_trackers(model), output_losses, strict=True
    ):
        tracker.update_state(each / count, sample_weight=examples)


class _Pass:
    """One microbatch: views, gradients, clipping, metrics."""

    def __init__(self, optimizer, model, engine, views):
        self._optimizer = optimizer
        self._model = model
        self._engine = engine
        self._views = views

    def __call__(self, x, y, sample_weight, choices, present):
        """A `_Totals` of this pass, and Keras' metric logs."""
        model, views = self._model, self._views
        x = views.rows(x, choices)
        y, sample_weight, rows_present = views.repeat((y, sample_weight, present))
        result = self._engine(x, y, sample_weight)
        factors = mechanism.clip_factors(
            result.squared_norms, present, self._optimizer.l2_norm_clip, self._optimizer.batch_size
        )
        # Without weights and padding every row is present, and Keras counts as it always does.
        all_present = sample_weight is None and self._optimizer.microbatch_size is None
        counted = None if all_present else rows_present
        logs = keras_internals.compute_metrics(model, x, y, result.y_pred, sample_weight, counted)

        def total(losses):
            return tf.reduce_sum(tf.where(rows_present, losses, 0.0)) / views.count

        bad = present & ~tf.math.is_finite(result.squared_norms)
        return (
            _Totals(
                sums=result.clipped_sums(factors),
                loss=total(result.losses),
                output_losses=[total(losses) for losses in result.output_losses],
                examples=tf.reduce_sum(tf.cast(present, "float32")),
                nonfinite=tf.reduce_sum(tf.cast(bad, "float32")),
            ),
            logs,
        )

    def traced(self, *part):
        """The call as TensorFlow traces it: a nest of tensors."""
        return _as_dict(self(*part)[0])

    def zero(self):
        """The `_Totals` of no pass at all."""
        return _Totals(
            sums=[tf.zeros(v.shape, "float32") for v in self._model.trainable_variables],
            loss=tf.zeros([]),
            output_losses=[tf.zeros([]) for _ in keras_internals.output_loss_trackers(self._model)],
            examples=tf.zeros([]),
            nonfinite=tf.zeros([]),
        )


def _run_passes(one_pass, batch, size):
    """Totals over all microbatches, and the metric logs if there was just one."""
    rows = Rows(batch)
    if size is None or (isinstance(rows.count, int) and rows.count <= size):
        return one_pass(*batch)
    padding = -rows.count % size
    passes = (rows.count + padding) // size

    def cut(tensor):
        # The padding's `present` is False, so it contributes exactly zero.
        tensor = tf.pad(tensor, [[0, padding]] + [[0, 0]] * (tensor.shape.rank - 1))
        return tf.reshape(tensor, tf.concat([[passes, size], tf.shape(tensor)[1:]], axis=0))

    pieces = [cut(t) for t in rows.tensors]
    for piece, tensor in zip(pieces, rows.tensors, strict=True):
        piece.set_shape([None, size, *tensor.shape[1:]])

    def body(index, *totals):
        more, _ = one_pass(*rows.pack([piece[index] for piece in pieces]))
        new = [a + b for a, b in zip(totals, tf.nest.flatten(_as_dict(more)), strict=True)]
        return (index + 1, *new)

    structure = _as_dict(one_pass.zero())
    start = (tf.constant(0), *tf.nest.flatten(structure))
    _, *flat = tf.while_loop(lambda i, *_: i < passes, body, start, parallel_iterations=1)
    return _Totals(**tf.nest.pack_sequence_as(structure, flat)), None


def _compiled_passes(one_pass, batch, size):
    """`_run_passes` under XLA, which cannot compile what replicas on CPUs say to each other."""

    @tf.function(jit_compile=True, autograph=False)
    def compiled(batch):
        totals, logs = _run_passes(one_pass, batch, size)
        return _as_dict(totals), logs

    totals, logs = compiled(batch)
    return _Totals(**totals), logs


def _as_dict(totals):
    return {f.name: getattr(totals, f.name) for f in dataclasses.fields(totals)}


@dataclasses.dataclass
class _Prepared:
    """What is found out once for a model and the shapes of its batches."""

    key: tuple
    engine: Callable
    checked: set = dataclasses.field(default_factory=set)  # examples of a pass
    fitting: pass_size.Fitting = dataclasses.field(default_factory=pass_size.Fitting)


def _prepare(optimizer, model, views, x, y, sample_weight):
    """The `_Prepared` for this model and these shapes, made and checked once for each."""
    rows = views.example_rows(x)
    # The loss too: a model may be compiled again with the same optimizer.
    key = (
        model.loss,
        tuple(id(v) for v in model.trainable_variables),
        tuple((t.shape[1:], t.dtype) for t in tf.nest.flatten(rows)),
    )
    size = _examples_of_pass(optimizer, x)
    known = optimizer.prepared.get(model)
    is_new = known is None or known.key != key
    if is_new or size not in known.checked:
        if views.augment is not None:
            checks.check_augment(views.augment, x, size)
        checks.check_step(model, optimizer, rows, y, sample_weight, views.count, size)
    if is_new:
        engine = ENGINES[optimizer.per_example_engine](model, rows, views.count)
        known = optimizer.prepared[model] = _Prepared(key, engine)
    known.checked.add(size)
    return known


def _of_declared_size(present, count, batch_size):
    """`present`, where the batch is no larger than declared; an error where it is.

    XLA leaves assertions out: there, nothing of such a batch is taken.
    """
    fits = count <= batch_size
    message = f"This batch is too large: the optimizer counts on batch_size={batch_size}."
    with tf.control_dependencies([tf.debugging.Assert(fits, [message, count])]):
        return present & fits


def _examples_of_pass(optimizer, x):
    """Examples of one pass through the model, an int; the expected ones where none are known."""
    count, size = Rows(x).count, optimizer.microbatch_size
    if not isinstance(count, int):
        count = -(-optimizer.batch_size // tf.distribute.get_strategy().num_replicas_in_sync)
    return count if size in (None, pass_size.AUTO) else min(count, size)


def _present(sample_weight, count):
    """Which examples, bool [B], have any sample weight other than zero."""
    weights = [w for w in tf.nest.flatten(sample_weight) if w is not None]
    if not weights:
        return tf.ones([count], tf.bool)
    each = [tf.reduce_any(tf.reshape(w, [count, -1]) != 0, axis=1) for w in weights]
    return tf.reduce_any(tf.stack(each), axis=0)


def regularization(variables):
    """The weight regularisers' penalty and its gradients; they read no data, so need no noise."""
    regularized = [v for v in variables if v.regularizer is not None]
    if not regularized:
        return 0.0, [None] * len(variables)
    with tf.GradientTape() as tape:
        penalty = tf.add_n([tf.cast(v.regularizer(v), "float32") for v in regularized])
    gradients = tape.gradient(penalty, [v.value for v in variables])
    return penalty, [None if g is None else tf.cast(g, "float32") for g in gradients]
