"""Losses and per-example gradients against what batches of one example give."""

import numpy as np
import tensorflow as tf

from tfdpx import keras_internals
from tfdpx._warnings import warn
from tfdpx.checks.closeness import close, is_full_precision
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.rows import Rows

_WRONG_RULE = (
    "A layer treats a batch and its examples differently, or a rule given to "
    "`tfdpx.per_example.register` is wrong. Try "
    '`per_example_engine="vmap"`, and report the model if that passes.'
)


def problems_of_loss(model, x, y, sample_weight, y_pred, examples):
    """Texts of a loss whose value for one example depends on another.

    If the loss is a sum over examples, its gradient at one prediction does not change when other
    examples' targets and predictions do.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of eager tensors [rows, ...].
        y: As `x`.
        sample_weight: As `x`, or None.
        y_pred: What the model gives for `x`.
        examples: Int, of the batch that the loss is tried on; `x` is repeated to give it.
    """
    few = Outputs(y_pred)
    many = tf.range(examples) % Rows(x).count
    x, y, sample_weight = Rows((x, y, sample_weight)).map(lambda t: tf.gather(t, many))
    tensors = [tf.gather(t, many) for t in few.tensors]
    predictions = Outputs(few.rebuild(tensors))
    half = examples // 2
    # A shift keeps equal predictions apart, as a head that starts at zero gives.
    changed = [_change_first(t, half) for t in tensors]
    swapped = Rows(y).map(lambda t: tf.concat([_other_targets(t[:half]), t[half:]], axis=0))
    first = _loss_gradient(model, x, y, predictions, tensors, sample_weight)
    second = _loss_gradient(model, x, swapped, predictions, changed, sample_weight)
    if not all(close(a[half:], b[half:]) for a, b in zip(first, second, strict=True)):
        yield (
            "The loss of one example depends on the other examples of the batch (as in contrastive "
            "or ranking losses, or a division by a batch statistic), so no example's gradient can "
            "be clipped. Use a loss that is a sum or mean over examples."
        )


def problems_of_gradients(model, engine, x, y, sample_weight, views):
    """Texts of how the engine differs from ordinary gradients of batches of one example.

    Its norms, and its sum with a factor of its own for each example, of which the first is zero.

    Args:
        model: A compiled, built `keras.Model`.
        engine: The per-example engine.
        x: Nest of eager tensors [rows, ...], `views` rows an example.
        y: As `x`.
        sample_weight: As `x`, or None.
        views: Int.
    """
    # Of these only the sum stays, before the engine runs: all gradients at once need memory.
    wanted, factors, sums = _of_batches_of_one(model, x, y, sample_weight, views)
    finite = np.isfinite(wanted)
    if not wanted[finite].any():
        warn(
            "The per-example gradients could not be checked: on made-up data all are zero or not "
            "finite.",
        )
        return
    tolerance = 1e-3 if is_full_precision(model) else 0.1
    scale = tolerance * wanted[finite].max()
    found = engine(x, y, sample_weight)
    norms = np.sqrt(found.squared_norms)
    if not np.allclose(norms[finite], wanted[finite], rtol=tolerance, atol=scale):
        yield (
            "Per-example gradient norms disagree with those of batches of one example: "
            f"{norms.tolist()} against {wanted.tolist()}. {_WRONG_RULE}"
        )
        return
    clipped = found.clipped_sums(tf.constant(factors))
    for variable, ours, ordinary in zip(model.trainable_variables, clipped, sums, strict=True):
        if not np.allclose(ours, ordinary, rtol=tolerance, atol=scale):
            yield (
                f"The clipped sum of gradients at '{variable.path}' disagrees with that of batches "
                f"of one example. {_WRONG_RULE}"
            )


def _of_batches_of_one(model, x, y, sample_weight, views):
    """Norms and factors, float arrays [examples], and the sums of gradients times factors.

    The factor of the first is zero, as it is where a gradient is not finite.
    """
    batch = Rows((x, y, sample_weight))
    norms, factors = [], np.arange(batch.count // views, dtype="float32")
    sums = [np.zeros(v.shape, "float32") for v in model.trainable_variables]
    for i in range(len(factors)):
        views_of_one = [
            batch.map(lambda t, j=j: t[j : j + 1]) for j in range(i * views, (i + 1) * views)
        ]
        gradient = _ordinary_gradient(model, views_of_one)
        norms.append(float(tf.linalg.global_norm(gradient)))
        if not np.isfinite(norms[i]):
            factors[i] = 0.0
        elif factors[i]:
            for total, each in zip(sums, gradient, strict=True):
                total += factors[i] * np.asarray(each)
    return np.array(norms), factors, sums


def _ordinary_gradient(model, views_of_one):
    """The gradient of one example, a list of float32 tensors, one a trained variable."""
    values = [v.value for v in model.trainable_variables]
    with (
        tf.GradientTape() as tape,
        keras_internals.without_weight_regularizers(model.trainable_variables),
    ):
        losses = []
        for x, y, sample_weight in views_of_one:
            y_pred = keras_internals.call_model(model, x)
            loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight)
            losses.append(tf.cast(tf.reduce_sum(loss), "float32"))
        mean = tf.reduce_mean(losses)
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(mean, values, unconnected_gradients=zero)
    return [tf.cast(tf.convert_to_tensor(g), "float32") for g in gradients]


def _loss_gradient(model, x, y, predictions, tensors, sample_weight):
    wanted = predictions.select(tensors)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(wanted)
        y_pred = predictions.rebuild(tensors)
        loss = tf.reduce_sum(keras_internals.compute_loss(model, x, y, y_pred, sample_weight))
    return tape.gradient(loss, wanted, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def _change_first(tensor, count):
    """`tensor` with `count` other first rows, inside [0, 1] if it was: probabilities stay valid."""
    if not tensor.dtype.is_floating:
        return tensor
    first = tf.reverse(tensor[:count], axis=[-1]) if tensor.shape.rank > 1 else tensor[:count]
    return tf.concat([first * 0.9 + 0.05, tensor[count:]], axis=0)


def _other_targets(tensor):
    """Valid targets of another sum: made-up ones lie in [0, 1]."""
    if tensor.dtype in (tf.string, tf.bool):
        return tf.reverse(tensor, axis=[0])
    return tf.repeat(1 - tensor[:1], tf.shape(tensor)[0], axis=0)
