"""Suggests settings for private training from the plan and the model, without reading data."""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np

from tfdpx._arguments import check_choice, is_integer, require
from tfdpx._keras import layer_internals
from tfdpx.accounting import PrivacyPlan
from tfdpx.accounting.ledger import USER

SGD, ADAM = "sgd", "adam"
GOOD, HARD, HOPELESS = "good", "hard", "hopeless"
DENSE, ATTENTION, TRAINED, OTHER = "dense", "attention", "trained before", "other"

# The total noise that all updates add to a weight. The best learning rates keep it constant for
# networks of up to `_FEW_WEIGHTS` trained weights (experiments/settings). For larger networks it
# falls with the cube root of the number of weights, but not below `_LEAST_SHARE` of this value
# unless the weights were trained before.
_NOISE = {SGD: 0.18, ADAM: 0.15}
_FEW_WEIGHTS, _LEAST_SHARE = 1e5, 0.5
# Weights that were trained before get this part of the total noise.
TRAINED_SHARE = 0.5
# With little noise, the rule above would give rates so large that training diverges. So there is a
# largest rate. For each kind of network, `_LARGEST` has the largest rate for `_OF_WEIGHTS` weights,
# and the power of the number of weights with which this rate falls. Networks with attention that
# were not trained before have another largest rate.
_OF_WEIGHTS, _LARGEST = 26_000, {DENSE: (5.0, 0.15), OTHER: (4.0, 0.4)}
_LEAST_LARGEST, _MOST_LARGEST = 1.0, 6.0
_LARGEST_OF_ATTENTION = {SGD: 0.5, ADAM: 0.004}
# The least `Suggestion.signal` for the outlook "good" and for the outlook "hard".
_GOOD_FROM, HARD_FROM = 12.0, 2.0
# Layers that `make_private_model` replaces by others.
_CHANGED = (keras.layers.BatchNormalization, keras.layers.GlobalAveragePooling2D)
CLIP, EMA_MOMENTUM = 0.1, 0.9999
_LEAST_BATCH, _MOST_BATCH, _STEPS, _EPOCHS = 1024, 4096, 200, 10


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Settings for the private training of a network, which `tfdpx.suggest` returns.

    Attributes:
        learning_rate: Float, the learning rate of `DPSGD` without momentum, or of `DPAdam`, for
            training with the plan that was passed to `suggest`.
        l2_norm_clip: Float, a clip that is smaller than the norms of most gradients.
        ema_momentum: Float, the momentum of the weights' moving average, with `use_ema=True`.
        batch_size: Int, the expected batch size that is suggested for a new plan.
        steps: Int, the number of updates with `batch_size`, at the same epsilon and delta.
        signal: Float, the largest possible length of the sum of all updates without noise, divided
            by the length of the sum of all noise:
            `batch_size * sqrt(steps) / (noise_multiplier * sqrt(weights))`.
        outlook: "good", "hard" or "hopeless", which depends only on the signal.
        advice: String, a sentence about the outlook. It names remedies, some as code.
    """

    learning_rate: float
    l2_norm_clip: float
    ema_momentum: float
    batch_size: int
    steps: int
    signal: float
    outlook: str
    advice: str


def suggest(plan: PrivacyPlan, model: keras.Model | int, optimizer: str = SGD) -> Suggestion:
    """Suggests settings for private training, and tells how well the model can learn.

    No example is read, so the suggestion costs no privacy. The suggestion follows a rule that was
    fitted to simulated trainings of networks of 650 to 10 million weights. The inputs had values
    around zero, or were mostly dark images such as MNIST. `experiments/settings` has the results,
    and docs/choosing.md tells how good the rule is for other networks and images. Centre the values
    of your images around zero. For bright images in [0, 1], which are not centred, the best
    learning rate of `DPSGD` is a third of the suggested one. Try half and twice the learning rate
    on public data as well.

    Args:
        plan: A `tfdpx.PrivacyPlan`, for the training.
        model: A built `keras.Model`, or an int, the number of its trained weights.
        optimizer: "sgd" for `DPSGD` without momentum, or "adam" for `DPAdam` and `DPAdamW`.

    Returns:
        A `Suggestion`.

    Raises:
        ValueError: If an argument is invalid, or the model has no trainable weights.

    Example:
    >>> plan = tfdpx.PrivacyPlan(4000, 1024, steps=200, epsilon=3.0, delta=1e-5)
    >>> suggestion = tfdpx.suggest(plan, 26_000)
    >>> suggestion.learning_rate, suggestion.outlook
    (2.5, 'good')
    """
    require(isinstance(plan, PrivacyPlan), "plan", plan, "be a tfdpx.PrivacyPlan")
    check_choice("optimizer", optimizer, (SGD, ADAM))
    kind = OTHER
    if isinstance(model, keras.Model):
        must = "be built and have weights that train"
        require(model.built and model.trainable_variables, "model", model, must)
        weights, kind = sum(math.prod(v.shape) for v in model.trainable_variables), _kind(model)
    else:
        must = "be a keras.Model, or an int >= 1, its number of trained weights"
        require(is_integer(model, 1), "model", model, must)
        weights = int(model)
    noise = plan.noise_multiplier / plan.batch_size
    rate = learning_rate(noise, plan.steps, weights, optimizer, kind)
    signal = signal_of(plan, weights)
    outlook = GOOD if signal >= _GOOD_FROM else HARD if signal >= HARD_FROM else HOPELESS
    size, steps = batch_and_steps(plan.num_examples)
    return Suggestion(
        learning_rate=float(f"{rate:.2g}"),
        l2_norm_clip=CLIP,
        ema_momentum=EMA_MOMENTUM,
        batch_size=size,
        steps=steps,
        signal=signal,
        outlook=outlook,
        advice=_advice(outlook, plan, weights, model),
    )


def learning_rate(
    noise: float, steps: int, weights: int, optimizer: str = SGD, kind: str = OTHER
) -> float:
    """Returns the learning rate that the rule of `suggest` gives.

    The rule chooses the distance by which the noise of all updates together moves a weight. The
    distance is the same for all small networks, and smaller for large networks. With DP-SGD, the
    distance is about `rate * noise * sqrt(steps)`. With DP-Adam, it is about `rate * sqrt(steps)`,
    because Adam divides each gradient by the root of its mean square, which is mostly noise. If
    there is little noise, the rate of DP-SGD is limited by a largest value.

    Args:
        noise: Float, the noise multiplier divided by the batch size.
        steps: Int, the number of updates.
        weights: Int, the number of trained weights.
        optimizer: "sgd" or "adam".
        kind: "dense", "attention", "trained before" or "other", the kind of network.
    """
    share = min((_FEW_WEIGHTS / weights) ** (1 / 3), 1.0)
    share = TRAINED_SHARE * share if kind == TRAINED else max(share, _LEAST_SHARE)
    unit = (noise if optimizer == SGD else 1.0) * math.sqrt(steps)
    rate = _NOISE[optimizer] * share / unit if unit else math.inf
    if kind == ATTENTION:
        return min(rate, _LARGEST_OF_ATTENTION[optimizer])
    if optimizer == ADAM:
        return rate
    largest, power = _LARGEST[DENSE if kind == DENSE else OTHER]
    largest *= (_OF_WEIGHTS / weights) ** power
    return min(rate, max(min(largest, _MOST_LARGEST), _LEAST_LARGEST))


def signal_of(plan: PrivacyPlan, weights: int) -> float:
    """Returns `Suggestion.signal`, a float, which is infinite without noise.

    Args:
        plan: A `tfdpx.PrivacyPlan`.
        weights: Int, the number of trained weights.
    """
    noise = plan.noise_multiplier / plan.batch_size
    return math.sqrt(plan.steps / weights) / noise if noise else math.inf


def batch_and_steps(num_examples: int) -> tuple[int, int]:
    """Returns the suggested batch size and number of updates for `num_examples` examples."""
    size = min(num_examples, max(_LEAST_BATCH, min(num_examples // 4, _MOST_BATCH)))
    return size, max(_STEPS, math.ceil(_EPOCHS * num_examples / size))


def _kind(model):
    """Returns the kind of a network, the argument `kind` of `learning_rate`."""
    layers = layer_internals.flatten_layers(model)
    if trained_before(model):
        return TRAINED
    if any(_is_attention(layer) and layer.trainable_variables for layer in layers):
        return ATTENTION
    is_dense = all(type(layer) is keras.layers.Dense for layer in _training_layers(model))
    return DENSE if is_dense else OTHER


def _is_attention(layer):
    return "Attention" in type(layer).__name__


def _advice(outlook, plan, weights, model):
    """Returns `Suggestion.advice`, a string."""
    protected = "people" if plan.unit == USER else "examples"
    budget = f"{plan.num_examples:,} {protected} at epsilon {plan.epsilon:.3g}"
    if outlook == GOOD:
        return f"Good: {budget} can train {weights:,} weights."
    remedies, is_model = [], isinstance(model, keras.Model)
    layers = layer_internals.flatten_layers(model) if is_model else []
    if not is_model or len(_training_layers(model)) > 1:
        few = "lora" if any(map(_is_attention, layers)) else "last"
        remedies = [f'`tfdpx.layers.trainable(model, "{few}")`']
    shape, outputs = getattr(model, "input_shape", None), getattr(model, "output_shape", None)
    classifies = isinstance(outputs, tuple) and len(outputs) == 2 and isinstance(outputs[1], int)
    if classifies and isinstance(shape, tuple) and len(shape) == 4 and not trained_before(model):
        is_ordinary = any(isinstance(layer, _CHANGED) for layer in layers)
        change = f"`tfdpx.make_private_model(model, num_examples={plan.num_examples}, ...)`"
        remedies = [
            *([change] if is_ordinary else []),
            *remedies,
            "`tfdpx.synthetic.warm_start(model)`",
            f"`tfdpx.models.ScatterLinear({outputs[1]}, {shape[1:]})`",
        ]
    remedies += ["more examples", "a larger epsilon"]
    expected = {
        HARD: f"Hard: the noise that {budget} need hides a part of what {weights:,} weights learn.",
        HOPELESS: f"Hopeless, unless the classes are easy to tell apart: the noise that {budget} "
        f"need hides most of what {weights:,} weights learn.",
    }[outlook]
    return f"{expected} Remedies, the first first: {', '.join(remedies)}."


def _training_layers(model):
    """Returns a list of the layers that directly hold trainable weights."""
    layers = layer_internals.flatten_layers(model)
    return [layer for layer in layers if layer_internals.own_trainable_variables(layer)]


def trained_before(model: keras.Model) -> bool:
    """Returns whether the weights of a model look as if they were trained before.

    They look trained if a bias or `beta` of a trainable layer has values that usual initializers do
    not give: the values differ from each other, and at least one is neither 0 nor 1. A model
    without biases counts as new.

    Args:
        model: A built `keras.Model`.
    """
    for layer in _training_layers(model):
        for variable in layer_internals.own_weights(layer):
            value = np.array(variable)
            if variable.name in ("bias", "beta") and np.ptp(value) and set(value.flat) - {0.0, 1.0}:
                return True
    return False
