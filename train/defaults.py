"""The model, steps, rates and clip of a private run, where the user leaves them open.

The rule for a linear classifier on fixed features was fitted on generated problems
(`docs/features.md`) and reads nothing of the data but their number. With features of norm one and
most gradients clipped, the weights move by up to `steps * learning_rate`, and the noise on a logit
is a multiple of that over epsilon * N. So the best product grows with epsilon * N. It is bounded,
shared by many updates, and the weights are averaged, because large updates go to and fro along a
direction that all images share, such as a mean colour: a larger budget then gave a worse result.
"""

import dataclasses

from tfdpx.train.errors import UserError

# Values of `model`: chosen for the user; for `features`; the file of `init_from` as it is.
AUTO, LINEAR_ON_FEATURES, OF_FILE = "auto", "linear_on_features", "of init_from"
# Beyond so many, training a network costs less than a full batch and learns more.
MOST_IMAGES = 20_000
# As if the budget were that, where the noise is given and not epsilon, or the run is not private.
_EPSILON = 8.0
# Of epsilon * N: the product of steps and learning rate, up to a bound.
_MOVE, _LARGEST_MOVE = 0.28, 3600.0
# Of networks; with less noise the updates themselves are what is too large.
_LARGEST_RATE = 4.0


def complete(settings, num_examples, replicas=1):
    """The settings of a run with every open one chosen, and the words to say so.

    A value that the user or the preset gave stays as it is.

    Args:
        settings: A `settings.Settings`.
        num_examples: Int, N, training images, or people; public, as in the plan.
        replicas: Int, the devices that share a batch evenly.

    Returns:
        A `settings.Settings` that leaves nothing open, and a string, empty if nothing was.

    Raises:
        UserError: If nothing can be chosen for so many images.
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
    budget = settings.epsilon or _EPSILON
    fixed = model in ("scatter_linear", LINEAR_ON_FEATURES)
    fixed = fixed or (model == OF_FILE and settings.trainable == "last")
    if fixed:
        values, reason = _for_features(budget, num_examples)
    else:
        values, reason = for_networks(budget, num_examples)
        if settings.individual:  # It clips each example below a constant.
            values["l2_norm_clip"] = 1.0
    values["batch_size"] -= values["batch_size"] % replicas
    # A budget and a noise leave the steps to be solved for, or with these the batch size.
    if settings.epsilon is not None and settings.noise_multiplier is not None:
        del values["steps" if settings.steps is None else "batch_size"]
    chosen = {name: value for name, value in values.items() if getattr(settings, name) is None}
    if settings.model == AUTO:
        chosen = {"model": model, **chosen}
    settings = dataclasses.replace(settings, **chosen)
    if settings.learning_rate is None:
        chosen["learning_rate"] = learning_rate(settings.privacy_plan(num_examples))
        settings = dataclasses.replace(settings, learning_rate=chosen["learning_rate"])
    listed = " ".join(
        f"--{name}={value}" if isinstance(value, str) else f"--{name}={value:g}"
        for name, value in chosen.items()
    )
    units = "images" if settings.user is None else "people"
    return settings, f"Chosen for {num_examples:,} {units}: {listed} ({reason}). Flags win over it."


def _for_features(epsilon, num_examples):
    """Values for a linear classifier on features of norm one, and why."""
    steps, move = 200, min(_MOVE * epsilon * num_examples, _LARGEST_MOVE)
    values = dict(
        batch_size=num_examples,
        steps=steps,
        learning_rate=float(f"{move / steps:.2g}"),
        l2_norm_clip=0.1,
        ema_momentum=0.9,
    )
    return values, (
        "fixed features cost no privacy; full batches; steps * learning_rate = "
        f"{_MOVE:g} * epsilon * N, at most {_LARGEST_MOVE:g}"
    )


def learning_rate(plan):
    """Returns the rate of `DPSGD` that a plan suggests for a network, a float of two digits."""
    return float(f"{min(plan.suggested_learning_rate, _LARGEST_RATE):.2g}")


def for_networks(epsilon, num_examples):
    """Returns values for a network, a dict, and the reason; the plan suggests the learning rate.

    Args:
        epsilon: Float, the budget.
        num_examples: Int, of at most `MOST_IMAGES` the rule was fitted on.
    """
    values = dict(
        batch_size=min(1024, num_examples),
        steps=100 if epsilon > 5 else 60,
        l2_norm_clip="automatic",
        ema_momentum=0.9999,
    )
    return values, (
        "learning_rate = 0.18 batch_size / (noise_multiplier sqrt(steps)), for small networks; "
        "test half and twice of it on public images"
    )
