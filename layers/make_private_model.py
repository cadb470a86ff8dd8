"""From a compiled Keras model to a private one in one call."""

from __future__ import annotations

from typing import Any

import keras

from tfdpx._arguments import require
from tfdpx._keras import layer_internals, model_internals
from tfdpx.accounting import PrivacyPlan
from tfdpx.layers.replace_batch_norm import replace_batch_norm
from tfdpx.training.optimizers import make_private

_BATCH_SIZE = 256
# What Keras's optimizers have and a private one refuses.
_DROPPED = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")


def make_private_model(
    model: keras.Model,
    *,
    num_examples: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    l2_norm_clip: Any = 1.0,
    learning_rate: Any = None,
    accountant: str = "pld",
    groups: int = 16,
    **arguments: Any,
) -> tuple[keras.Model, PrivacyPlan]:
    """A private twin of a compiled model, and the plan that it is to be trained by.

    The twin has the weights of `model`, a `GroupNorm` in place of each `BatchNormalization`
    (`tfdpx.layers.replace_batch_norm`), the same loss and metrics, and the private variant of its
    optimizer: `keras.optimizers.Adam` becomes `tfdpx.DPAdam` with the same arguments. Train it by
    `model.fit(x, y, epochs=epochs)`. Weights that were trained on the private data before tell of
    them already: they must be fresh or public.

    Guarantee: the same as `tfdpx.PrivacyPlan`.

    Args:
        model: A compiled `keras.Model`; with batch normalization it must be Functional or
            Sequential, and built. Without it, `model` itself is compiled anew and returned.
        num_examples: Int. Number of private examples, which is public.
        delta: Float in (0, 1), well below 1/num_examples.
        epsilon: Float. The budget; the noise is solved for it.
        noise_multiplier: Float, in place of `epsilon`.
        epochs: Float. Passes over the data.
        steps: Int, model updates, in place of `epochs`.
        batch_size: Int. Expected examples an update; 256 if left out, or all if there are fewer.
        l2_norm_clip: As of `tfdpx.DPSGD`: the bound on each example's gradient.
        learning_rate: Optional float or schedule, in place of the optimizer's own. Gradients are
            divided by `l2_norm_clip`, so one that suits ordinary SGD seldom suits here.
        accountant: As for `tfdpx.PrivacyPlan`.
        groups: As for `tfdpx.layers.replace_batch_norm`.
        **arguments: More arguments of `tfdpx.DPSGD`, such as `augment`, `augmult` and
            `microbatch_size`.

    Returns:
        `(model, plan)`: a compiled `keras.Model` and its `tfdpx.PrivacyPlan`.

    Raises:
        TypeError: If the optimizer has no private variant.
        ValueError: If the model is not compiled, or an argument is out of its range.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> model.add(keras.layers.BatchNormalization())
    >>> model.compile("adam", "mse")
    >>> private, plan = make_private_model(
    ...     model, num_examples=1000, epsilon=3.0, delta=1e-5, epochs=2, batch_size=100
    ... )
    >>> private.layers[-1].__class__.__name__, private.optimizer.name, plan.steps
    ('GroupNorm', 'dp_adam', 20)
    """
    require(isinstance(model, keras.Model), "model", model, "be a keras.Model")
    if not model.compiled:
        raise ValueError(
            f"Argument `model` must be compiled: its optimizer, loss and metrics are what becomes "
            f"private. Received: model {model.name!r}. Call `model.compile(...)` first."
        )
    if batch_size is None:
        batch_size = min(_BATCH_SIZE, num_examples)
    plan = PrivacyPlan(
        num_examples,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
    )
    optimizer = _private(model.optimizer, learning_rate, plan, l2_norm_clip, arguments)
    compiled = model_internals.compile_arguments(model)
    for name in ("metrics", "weighted_metrics"):
        compiled[name] = keras.tree.map_structure(_fresh, compiled[name])
    has_batch_norm = any(
        isinstance(layer, keras.layers.BatchNormalization)
        for layer in layer_internals.flatten_layers(model)
    )
    twin = replace_batch_norm(model, groups) if has_batch_norm else model
    twin.compile(**{**compiled, "optimizer": optimizer})
    return twin, plan


def _fresh(metric):
    """A metric without what it has measured; names and functions as they are."""
    is_object = isinstance(metric, keras.metrics.Metric)
    return type(metric).from_config(metric.get_config()) if is_object else metric


def _private(optimizer, learning_rate, plan, l2_norm_clip, arguments):
    """The private variant of a Keras optimizer, with its arguments, unused."""
    inner = model_internals.innermost(optimizer)
    if hasattr(inner, "private_train_step"):
        raise ValueError(
            f"Argument `model` is private already: its optimizer is {type(inner).__name__}. "
            "Compile it with another plan by `model.compile(tfdpx.DPSGD(..., plan=plan), ...)`."
        )
    config = inner.get_config()
    refused = [name for name in _DROPPED if config.pop(name, None) is not None]
    if refused:
        raise ValueError(
            f"The optimizer of `model` has {', '.join(refused)}, which would change the privacy "
            "mechanism. Compile `model` without, and give `l2_norm_clip`."
        )
    config.pop("loss_scale_factor", None)
    for name in ("name", "is_legacy_optimizer", "jit_compile"):
        config.pop(name, None)
    rate = config["learning_rate"] if learning_rate is None else learning_rate
    if isinstance(rate, dict):
        rate = keras.saving.deserialize_keras_object(rate)
    config["learning_rate"] = rate
    private = make_private(type(inner))
    return private(plan=plan, l2_norm_clip=l2_norm_clip, **config, **arguments)
