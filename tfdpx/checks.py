"""What makes a model or a loss unfit for private training, and how to mend it.

Every check runs before the first step, on made-up data of the right shapes and dtypes: no private
example is read. Each error names the layer and the mend.
"""

import warnings

import keras
import numpy as np
import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.per_example import ENGINES
from tfdpx.per_example.mixing import find_mixing_operation
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.probe import restored
from tfdpx.per_example.rows import Rows, synthetic

_EXAMPLES = 3
# Random layers may mix other rows, or by little, in any one draw.
_DRAWS = 6


class UnfitForPrivacy(ValueError):
    """A model, loss or option with which the privacy guarantee would not hold."""


def check_step(model, optimizer, rows, y, sample_weight, views):
    """Raises unless `optimizer` can train `model` privately on batches like these.

    Args:
        model: A compiled, built `keras.Model`.
        optimizer: The tfdpx optimizer.
        rows: Nest of tensors [rows, ...], the model's input; only shapes and dtypes are read.
        y: Nest of tensors [B, ...]; only shapes and dtypes are read.
        sample_weight: As `y`, or None.
        views: Int K.

    Raises:
        UnfitForPrivacy: With the reason and the mend.
    """
    check_precision(model)
    check_train_step(model)
    check_layers(model)
    if not model.trainable_variables:
        raise UnfitForPrivacy(
            f"Model '{model.name}' has no trainable variables, so there is nothing to train. Set "
            "`trainable = True` on a layer and compile again."
        )
    # Two views show what sixteen do.
    keras_hook.eagerly(_check_runs, model, optimizer, rows, y, sample_weight, min(views, 2))


def _check_runs(model, optimizer, rows, y, sample_weight, views):
    # Losses of several outputs update metrics as they are computed.
    with restored([*model.non_trainable_variables, *model.metrics_variables]):
        x = synthetic(rows, _EXAMPLES * views, seed=0)
        y, sample_weight = synthetic((y, sample_weight), _EXAMPLES * views, seed=1)
        check_state(model, x)
        with keras_hook.still():
            check_repeatable(model, x)
            check_rows_do_not_mix(model, x)
            check_loss(model, x, y, sample_weight)
            check_gradients(model, optimizer, x, y, sample_weight, views)
        check_random_layers(model, x)


def check_precision(model):
    """Refuses float16's dynamic loss scaling."""
    if model.optimizer is not keras_hook.innermost(model.optimizer):
        raise UnfitForPrivacy(
            f"The optimizer is wrapped in {type(model.optimizer).__name__}. Scaling the loss by "
            "what the gradients look like uses the data beyond what the guarantee covers. "
            'Use the "mixed_bfloat16" policy in place of "mixed_float16" (or no wrapper).'
        )


def check_train_step(model):
    """Refuses a `train_step` of the model's own that calls Keras' with data it may have mixed."""
    if type(model).train_step is not keras.Model.train_step:
        raise UnfitForPrivacy(
            f"Model '{model.name}' (of type {type(model).__name__}) has a `train_step` of its own. "
            "What it does to the batch (mixing examples, for one) cannot be checked. Remove it; "
            "change data in the input pipeline or by `augment`, and the loss by `compute_loss`."
        )


def check_augment(augment, x):
    """Refuses an augmentation that mixes examples.

    Args:
        augment: An object with `draw` and `apply`.
        x: Nest of one tensor [B, ...]; only shape and dtype are read.
    """
    keras_hook.eagerly(_check_augment, augment, x)


def _check_augment(augment, x):
    [images] = tf.nest.flatten(synthetic(x, _EXAMPLES, seed=0))
    [others] = tf.nest.flatten(synthetic(x, _EXAMPLES, seed=1))
    changed = tf.concat([others[:1], images[1:]], axis=0)
    choices = augment.draw(_EXAMPLES, 2, tf.zeros([2], tf.int64))
    variables = getattr(getattr(augment, "layer", None), "variables", [])

    def others(batch):
        return [augment.apply(batch, choices)[1:]]

    with restored(variables):
        unrepeatable = _depends_on_first(others, images, images, variables)
        mixes = not unrepeatable and _depends_on_first(others, images, changed, variables)
    if unrepeatable:
        warnings.warn(
            "The augmentation draws random numbers outside of any keras.random.SeedGenerator, so "
            "it could not be checked that it keeps examples apart.",
            stacklevel=2,
        )
    if mixes:
        raise UnfitForPrivacy(
            f"The augmentation {augment.get_config()} makes the view of one example depend on "
            "another (as MixUp and CutMix do), so clipping each example bounds nothing. Use one "
            "that treats images one by one."
        )


def check_layers(model):
    """Refuses layers known to couple examples: batch statistics, activity regularisers."""
    for layer in keras_hook.flatten_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise UnfitForPrivacy(
                f"Layer '{layer.name}' is a trainable BatchNormalization, which mixes the examples "
                "of a batch. Train `tfdpx.layers.replace_batch_norm(model)`, a clone with "
                "GroupNorm in its place, or freeze the layer with `trainable = False`."
            )
        if getattr(layer, "activity_regularizer", None) is not None:
            raise UnfitForPrivacy(
                f"Layer '{layer.name}' has an activity regulariser, a loss over the whole batch. "
                "Build the layer without `activity_regularizer`; weight regularisers are fine."
            )


def check_state(model, x):
    """Refuses a training pass that changes non-trainable state or adds losses.

    Args:
        model: A built `keras.Model`.
        x: Nest of eager tensors [rows, ...].
    """
    random = {id(generator.state) for generator in keras_hook.seed_generators(model)}
    state = [v for v in model.non_trainable_variables if id(v) not in random]
    before = [v.numpy() for v in state]
    keras_hook.clear_added_losses(model)
    keras_hook.call_model(model, x)
    added = keras_hook.added_losses(model)
    keras_hook.clear_added_losses(model)
    changed = [
        v.path for v, old in zip(state, before, strict=True) if not np.array_equal(v.numpy(), old)
    ]
    if changed:
        raise UnfitForPrivacy(
            f"The training pass changes non-trainable variables: {changed}. What they take from "
            "the data would leave the model without noise. Freeze the layers that own them with "
            "`trainable = False`, or replace them (BatchNormalization: "
            "`tfdpx.layers.replace_batch_norm(model)`)."
        )
    if added:
        names = [layer.name for layer in added]
        raise UnfitForPrivacy(
            f"These layers call `add_loss`: {names}. Such a loss is not known by example. Put a "
            "loss on weights into a `kernel_regularizer`, one on data into `compile(loss=...)`."
        )


def check_repeatable(model, x):
    """Refuses a model that draws random numbers where tfdpx cannot hold them still.

    Args:
        model: A built `keras.Model`.
        x: Nest of eager tensors [rows, ...].
    """
    first, second = (Outputs(keras_hook.call_model(model, x)).tensors for _ in range(2))
    if not all(_close(a, b) for a, b in zip(first, second, strict=True)):
        raise UnfitForPrivacy(
            f"Model '{model.name}' draws random numbers outside of any keras.random.SeedGenerator, "
            "so it cannot be checked that its examples do not mix. Give its random layers an "
            "attribute `seed_generator = keras.random.SeedGenerator()`, as Keras' own have, and "
            "draw from that."
        )


def check_rows_do_not_mix(model, x):
    """Refuses a model whose output for one example depends on the others.

    Args:
        model: A built `keras.Model`.
        x: Nest of eager tensors [rows, ...].
    """
    whole = Outputs(keras_hook.call_model(model, x)).tensors
    rows = Rows(x)
    for i in range(rows.count):
        alone = Outputs(keras_hook.call_model(model, rows.map(lambda t, i=i: t[i : i + 1]))).tensors
        if not all(_close(w[i : i + 1], a) for w, a in zip(whole, alone, strict=True)):
            culprit = find_mixing_operation(model, x)
            raise UnfitForPrivacy(
                f"{culprit} makes the output for one example depend on the other examples of the "
                "batch, so clipping each example bounds nothing. Use a layer that treats examples "
                "one by one (GroupNorm or LayerNormalization in place of batch statistics)."
            )


def check_random_layers(model, x):
    """Refuses random layers that mix examples in training, as MixUp inside a model does.

    The other checks hold random layers still. This one lets them draw, the same numbers twice.

    Args:
        model: A built `keras.Model`.
        x: Nest of eager tensors [rows, ...].
    """
    if not keras_hook.seed_generators(model):
        return
    changed = Rows(x).map(lambda t: tf.concat([t[-1:], t[1:]], axis=0))

    def others(inputs):
        outputs = Outputs(keras_hook.call_model(model, inputs))
        return [t[1:] for t in outputs.select(outputs.tensors)]

    if _depends_on_first(others, x, changed, model.non_trainable_variables):
        raise UnfitForPrivacy(
            f"A random layer of model '{model.name}' makes the output for one example depend on "
            "the other examples of the batch in training (as MixUp and CutMix do), so clipping "
            "each example bounds nothing. Remove it."
        )


def _depends_on_first(function, batch, changed, variables):
    """Whether `function` tells `batch` from `changed` at the same state of `variables`."""
    for _ in range(_DRAWS):
        made = []
        for inputs in (batch, changed):
            with restored(variables):
                made.append(function(inputs))
        if not all(_close(a, b) for a, b in zip(*made, strict=True)):
            return True
        function(batch)  # The generators move on.
    return False


def check_loss(model, x, y, sample_weight):
    """Refuses a loss whose value for one example depends on another.

    If the loss is a sum over examples, its gradient at one prediction does not change when another
    example's target and prediction do.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of eager tensors [rows, ...].
        y: As `x`.
        sample_weight: As `x`, or None.
    """
    predictions = Outputs(keras_hook.call_model(model, x))
    # A shift keeps equal predictions apart, as a head that starts at zero gives.
    changed = [_change_first(p) for p in predictions.tensors]
    targets = Rows(y)
    swapped = targets.map(lambda t: tf.concat([t[1:2], t[1:]], axis=0))
    first = _loss_gradient(model, x, y, predictions, predictions.tensors, sample_weight)
    second = _loss_gradient(model, x, swapped, predictions, changed, sample_weight)
    if not all(_close(a[1:], b[1:]) for a, b in zip(first, second, strict=True)):
        raise UnfitForPrivacy(
            "The loss of one example depends on the other examples of the batch (as in contrastive "
            "or ranking losses, or a division by a batch statistic), so no example's gradient can "
            "be clipped. Use a loss that is a sum or mean over examples."
        )


def check_gradients(model, optimizer, x, y, sample_weight, views):
    """Compares the engine's norms with ordinary gradients of batches of one example.

    Args:
        model: A compiled, built `keras.Model`.
        optimizer: The tfdpx optimizer, which names the engine.
        x: Nest of eager tensors [rows, ...], `views` rows an example.
        y: As `x`.
        sample_weight: As `x`, or None.
        views: Int.
    """
    engine = ENGINES[optimizer.per_example_engine](model, x, views)
    norms = np.sqrt(engine(x, y, sample_weight).squared_norms)
    batch = Rows((x, y, sample_weight))
    wanted = []
    for i in range(len(norms)):
        views_of_one = [
            batch.map(lambda t, j=j: t[j : j + 1]) for j in range(i * views, (i + 1) * views)
        ]
        wanted.append(_ordinary_norm(model, views_of_one))
    wanted = np.asarray(wanted)
    finite = np.isfinite(wanted)
    if not wanted[finite].any():
        warnings.warn(
            "The per-example gradients could not be checked: on made-up data all are zero or not "
            "finite.",
            stacklevel=2,
        )
        return
    tolerance = 1e-3 if _is_full_precision(model) else 0.1
    scale = tolerance * wanted[finite].max()
    if not np.allclose(norms[finite], wanted[finite], rtol=tolerance, atol=scale):
        raise UnfitForPrivacy(
            "Per-example gradient norms disagree with those of batches of one example: "
            f"{norms.tolist()} against {wanted.tolist()}. A layer treats a batch and its examples "
            "differently, or a rule given to `tfdpx.per_example.register` is wrong. Try "
            '`per_example_engine="vmap"`, and report the model if that passes.'
        )


def _ordinary_norm(model, views_of_one):
    values = [v.value for v in model.trainable_variables]
    with (
        tf.GradientTape() as tape,
        keras_hook.without_weight_regularizers(model.trainable_variables),
    ):
        losses = []
        for x, y, sample_weight in views_of_one:
            y_pred = keras_hook.call_model(model, x)
            loss = keras_hook.compute_loss(model, x, y, y_pred, sample_weight)
            losses.append(tf.cast(tf.reduce_sum(loss), "float32"))
        mean = tf.reduce_mean(losses)
    gradients = [g for g in tape.gradient(mean, values) if g is not None]
    return float(
        tf.linalg.global_norm([tf.cast(tf.convert_to_tensor(g), "float32") for g in gradients])
    )


def _loss_gradient(model, x, y, predictions, tensors, sample_weight):
    wanted = predictions.select(tensors)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(wanted)
        y_pred = predictions.rebuild(tensors)
        loss = tf.reduce_sum(keras_hook.compute_loss(model, x, y, y_pred, sample_weight))
    return tape.gradient(loss, wanted, unconnected_gradients=tf.UnconnectedGradients.ZERO)


def _change_first(tensor):
    """`tensor` with another first row, inside [0, 1] if it was: probabilities stay valid."""
    if not tensor.dtype.is_floating:
        return tensor
    first = tf.reverse(tensor[:1], axis=[-1]) if tensor.shape.rank > 1 else tensor[:1]
    return tf.concat([first * 0.9 + 0.05, tensor[1:]], axis=0)


def _is_full_precision(model):
    return all(
        layer.compute_dtype not in ("float16", "bfloat16")
        for layer in keras_hook.flatten_layers(model)
    )


def _close(a, b):
    if not a.dtype.is_floating:
        return np.array_equal(a, b)
    a, b = np.asarray(tf.cast(a, "float64")), np.asarray(tf.cast(b, "float64"))
    if a.shape != b.shape:
        return False
    return np.allclose(
        a, b, rtol=1e-3, atol=1e-3 * (np.abs(b).max(initial=0.0) + 1e-6), equal_nan=True
    )
