"""Chooses the settings of a private run that the user leaves open, for example the model.

The rule for a linear classifier on fixed features depends only on epsilon and the number of
examples N. It was fitted on generated problems (`docs/features.md`). If features have norm one and
most gradients are clipped, the weights move by up to `steps * learning_rate`, and the noise on a
logit is proportional to `steps * learning_rate / (epsilon * N)`. So the best value of `steps *
learning_rate` is proportional to `epsilon * N`.

There is also an upper limit. Large updates would make the weights oscillate along a direction that
all images have in common, for example a mean colour. So `steps * learning_rate` has an upper bound
and is divided among many updates, and the weights are averaged. Without these measures a larger
budget gave a worse result.
"""

import dataclasses

from tfdpx.suggestion import (
    ADAM,
    CLIP,
    EMA_MOMENTUM,
    GOOD,
    SGD,
    TRAINED_SHARE,
    batch_and_steps,
    suggest,
)
from tfdpx.train.errors import UserError, with_flags
from tfdpx.train.objects import AUTO, LINEAR_ON_FEATURES, OF_FILE, OPTIMIZERS

# With more images, a network takes less time than full batches of features, and is more accurate.
MOST_IMAGES = 20_000
# The epsilon to assume if the user sets the noise in place of epsilon, or the run is not private.
_EPSILON = 8.0
# `steps * learning_rate` divided by `epsilon * N`, and the upper bound on `steps * learning_rate`.
# Then the least number of steps, and the largest learning rate.
_MOVE, _LARGEST_MOVE, _STEPS, _LARGEST_RATE = 0.28, 10_800.0, 200, 18.0
# The number of weights to assume if the network is unknown.
WEIGHTS = 10_000


def complete(settings, num_examples, replicas=1, sketch=None):
    """Chooses every setting of a run that the user and the preset left open.

    Args:
        settings: A `settings.Settings`.
        num_examples: Int, the number N of training images or people. It is public, as in the plan.
        replicas: Int, the number of devices. A chosen batch size is a multiple of this number.
        sketch: Optional function from the name of a model to a `keras.Model`. It is used to count
            the weights of a network, as the learning rate depends on this number. Without
            `sketch`, the number is assumed to be `WEIGHTS`.

    Returns:
        A `settings.Settings` without an open setting, and a sentence about the choices. The
        sentence is empty if no setting was open.

    Raises:
        UserError: If `model` is "auto" and there are more than `MOST_IMAGES` images.
    """
    if not settings.open:
        return settings, ""
    model = settings.model
    if model == AUTO:
        if num_examples > MOST_IMAGES:
            raise UserError(
                f"Flag --model={AUTO} chooses for up to {MOST_IMAGES:,} training images. Received: "
                f"{num_examples:,} images. Name a model, such as --model=scatter_cnn or "
                "--model=wrn_16_4, or start from a preset such as --preset=table12/eps8."
            )
        model = LINEAR_ON_FEATURES if settings.features else "scatter_linear"
    budget = settings.budget or _EPSILON
    fixed = model.partition(":")[0] in ("scatter_linear", LINEAR_ON_FEATURES)
    fixed = fixed or (model == OF_FILE and settings.trainable == "last")
    if fixed:
        values, reason = _for_features(budget, num_examples)
    else:
        values, reason = for_networks(num_examples)
        if settings.individual:  # Individual clips start from a constant.
            values["l2_norm_clip"] = 1.0
    values["batch_size"] -= values["batch_size"] % replicas
    # A budget and a noise together determine the steps or, if the steps are set, the batch size.
    if settings.budget is not None and settings.noise_multiplier is not None:
        del values["steps" if settings.steps is None else "batch_size"]
    chosen = {name: value for name, value in values.items() if getattr(settings, name) is None}
    if settings.model == AUTO:
        chosen = {"model": model, **chosen}
    settings = dataclasses.replace(settings, **chosen)
    if settings.learning_rate is None:
        plan, optimizer = settings.privacy_plan(num_examples), settings.optimizer
        network = sketch(model) if sketch else WEIGHTS
        suggestion = suggest(plan, network, SGD if optimizer.startswith("dpsgd") else ADAM)
        rate = suggestion.learning_rate * (1 - OPTIMIZERS.read(optimizer)[1].get("momentum", 0.0))
        if settings.warm_start and settings.trainable == "all":
            rate *= TRAINED_SHARE  # `suggest` does not know that the network will get a warm start.
        chosen["learning_rate"] = float(f"{rate:.2g}")
        reason = f"{reason}. {with_flags(suggestion.advice)}"
        if str(settings.init_from).endswith(".keras") and suggestion.outlook != GOOD:
            reason += (
                " Fixed features have few weights: leave --init_from out, and give --features="
                f"{settings.init_from} --whiten=synthetic."
            )
        settings = dataclasses.replace(settings, learning_rate=chosen["learning_rate"])
    listed = " ".join(
        f"--{name}={value}" if isinstance(value, str) else f"--{name}={value:g}"
        for name, value in chosen.items()
    )
    units = "people" if settings.has_people else "images"
    return (
        settings,
        f"Chosen for {num_examples:,} {units}: {listed} ({reason}). Flags override it.",
    )


def _for_features(epsilon, num_examples):
    """Returns a dict of settings for a linear classifier on features, and the reason for them."""
    move = min(_MOVE * epsilon * num_examples, _LARGEST_MOVE)
    steps = max(_STEPS, round(move / _LARGEST_RATE))
    values = dict(
        batch_size=num_examples,
        steps=steps,
        learning_rate=float(f"{move / steps:.2g}"),
        l2_norm_clip=0.1,
        ema_momentum=0.9,
    )
    return values, (
        "fixed features cost no privacy; full batches; steps * learning_rate = "
        f"{_MOVE:g} * epsilon * N, at most {_LARGEST_MOVE:,.0f}"
    )


def for_networks(num_examples):
    """Returns a dict of settings for a network, and a text with the reason for them.

    The dict has no learning rate. `tfdpx.suggest` chooses it.

    Args:
        num_examples: Int, the number of training examples.
    """
    size, steps = batch_and_steps(num_examples)
    values = dict(batch_size=size, steps=steps, l2_norm_clip=CLIP, ema_momentum=EMA_MOMENTUM)
    return (
        values,
        "by tfdpx.suggest for networks; also test half and twice the learning rate",
    )
