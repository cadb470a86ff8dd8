"""The model, steps, rates and clip of a private run, where the user leaves them open.

The rule for a linear classifier on fixed features was fitted on generated problems, of classes of
distorted strokes and shapes (`docs/features.md`), and reads nothing of the data but their number.
With features of norm one and a clip well below the gradients, the weights move by up to
`steps * learning_rate`, and the noise on a logit is a multiple of that over epsilon * N. So the
best product grows with epsilon * N, and more steps than such a move needs only cost time.
"""

import dataclasses

from tfdpx.train.errors import UserError
from tfdpx.train.settings import AUTO, LINEAR_ON_FEATURES, OF_FILE

# Beyond so many, training a network costs less than a full batch and learns more.
MOST_IMAGES = 20_000
# As if the budget were that, where the noise is given and not epsilon, or the run is not private.
_EPSILON = 8.0
# Of epsilon * N: the product of steps and learning rate, and the steps; both within bounds.
_MOVE, _LEAST_MOVE, _LARGEST_MOVE = 0.3, 100.0, 6000.0
_EXAMPLES_A_STEP, _FEWEST_STEPS, _MOST_STEPS = 140, 10, 120
# Of networks; with less noise the updates themselves are what is too large.
_LARGEST_RATE = 4.0
# Of people, who are few: ten large steps overshoot (docs/users.md).
_FEWEST_STEPS_OF_PEOPLE = 50


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
        values, reason = _for_features(budget, num_examples, settings.user is not None)
    else:
        values, reason = _for_networks(budget, num_examples)
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
        rate = settings.privacy_plan(num_examples).suggested_learning_rate
        chosen["learning_rate"] = float(f"{min(rate, _LARGEST_RATE):.2g}")
        settings = dataclasses.replace(settings, learning_rate=chosen["learning_rate"])
    listed = " ".join(
        f"--{name}={value}" if isinstance(value, str) else f"--{name}={value:g}"
        for name, value in chosen.items()
    )
    units = "images" if settings.user is None else "people"
    return settings, f"Chosen for {num_examples:,} {units}: {listed} ({reason}). Flags win over it."


def steps_and_move(size, of_people=False):
    """Steps, and steps times learning rate, for epsilon times the number of examples or people."""
    fewest = _FEWEST_STEPS_OF_PEOPLE if of_people else _FEWEST_STEPS
    steps = round(min(max(size / _EXAMPLES_A_STEP, fewest), _MOST_STEPS))
    return steps, min(max(_MOVE * size, _LEAST_MOVE), _LARGEST_MOVE)


def _for_features(epsilon, num_examples, of_people):
    """Values for a linear classifier on features of norm one, and why."""
    steps, move = steps_and_move(epsilon * num_examples, of_people)
    values = dict(
        batch_size=num_examples,
        steps=steps,
        learning_rate=round(move / steps, 1),
        l2_norm_clip=0.02,
        ema_momentum=0.0,
    )
    return values, (
        "fixed features cost no privacy; full batches; steps * learning_rate = "
        f"{_MOVE:g} * epsilon * images, from {_LEAST_MOVE:g} to {_LARGEST_MOVE:g}"
    )


def _for_networks(epsilon, num_examples):
    """Values for a network, and why; the plan then suggests the learning rate."""
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
