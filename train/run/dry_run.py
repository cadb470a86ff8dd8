"""What a run would be: its size, its epsilon and its time, without data and without training."""

import functools
import math

from absl import flags

from tfdpx import accounting
from tfdpx.train.data import tfds
from tfdpx.train.errors import UserError, did_you_mean
from tfdpx.train.run import auto_settings, classifiers, finetuning, fitting

_DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Only say how large the run is and what epsilon it spends, without data."
)
_SECONDS_PER_UPDATE = flags.DEFINE_float(
    "seconds_per_update",
    None,
    "With --dry_run: what an update takes, as measured, to estimate the hours.",
)


def from_flags(settings):
    """Returns what `describe` does if the flags ask for a dry run, else None.

    Raises:
        UserError: As `describe`, or if --seconds_per_update is unfit, or given for a real run.
    """
    seconds = _SECONDS_PER_UPDATE.value
    if seconds is not None and not (_DRY_RUN.value and 0 < seconds < math.inf):
        raise UserError(
            "Flag --seconds_per_update must be positive and finite, and belongs to --dry_run. "
            f"Received: --seconds_per_update={seconds} --dry_run={_DRY_RUN.value}."
        )
    return describe(settings, seconds) if _DRY_RUN.value else None


def describe(settings, seconds_per_update=None):
    """Returns what the run of `settings` would be.

    Args:
        settings: A `training.Training`.
        seconds_per_update: Optional float, what an update takes.

    Returns:
        Dict. `epsilon` is what `accountant`, the one of the run, gives. Both accountants judge the
        same updates, so `epsilon_rdp` and `epsilon_pld` differ whichever of the two solved for the
        missing quantity; None where the accountant cannot resolve so small a loss, infinity without
        privacy. `images_per_update` counts views, on average. `estimated_hours` is None if no time
        is given.

    Raises:
        UserError: If the size of the data set is not known, or the values do not go together.
    """
    entry = tfds.find(settings.dataset)
    if entry is None or entry.train_images is None:
        known = [entry.source for entry in tfds.ENTRIES if entry.train_images]
        raise UserError(
            f"The size of the data set {settings.dataset!r} is not known without reading it."
            f"{did_you_mean(settings.dataset, tfds.KNOWN)} "
            f"--dry_run knows: {', '.join(known)}."
        )
    num_examples = entry.train_images - _held_out(entry.train_images, settings.validation)
    source = None
    if settings.init_from:
        settings, source = finetuning.source(finetuning.check(settings))
    takes = source.image_shape if source else (None, None, None)
    shape = [own or known for own, known in zip(takes, entry.image_shape, strict=True)]
    shape = _image_shape(settings, tuple(shape))
    settings, _ = auto_settings.complete(settings, num_examples)
    plan = settings.privacy_plan(num_examples)
    fitting.check_head_steps(settings, plan)
    return {
        "dataset": entry.source,
        "num_examples": num_examples,
        "image_height": shape[0],
        "image_width": shape[1],
        "model": settings.model,
        "pretrained_on": settings.pretrained_on,
        "trainable": settings.trainable,
        "head_steps": settings.head_steps,
        "parameters": source.classifier(shape, entry.num_classes).count_params()
        if source
        else _parameters(
            settings.model,
            shape,
            entry.num_classes,
            settings.group_norm,
            settings.weight_standardization,
            settings.relu_first,
        ),
        "private": settings.private,
        "batch_size": plan.batch_size,
        "augmult": settings.augmult,
        "images_per_update": plan.batch_size * max(settings.augmult, 1),
        "learning_rate": settings.learning_rate,
        "l2_norm_clip": settings.l2_norm_clip,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "epochs": plan.steps * plan.sampling_probability,
        "delta": plan.delta if settings.private else None,
        "accountant": plan.accountant,
        "epsilon": _epsilon(plan, plan.accountant),
        "epsilon_rdp": _epsilon(plan, "rdp"),
        "epsilon_pld": _epsilon(plan, "pld"),
        "epsilon_is_approximate": plan.is_approximate,
        "estimated_hours": seconds_per_update and plan.steps * seconds_per_update / 3600,
    }


def _held_out(images, validation):
    """How many of so many images `settings.RunSettings.validation` holds out."""
    held_out = math.ceil(validation * images) if validation < 1 else int(validation)
    if held_out >= images:
        raise UserError(
            f"Flag --validation must leave some of the {images} images to train on. Received: "
            f"--validation={validation:g}."
        )
    return held_out


def _image_shape(settings, shape):
    if settings.image_size:
        shape = (settings.image_size, settings.image_size, shape[2])
    if None in shape:
        raise UserError(
            f"The images of {settings.dataset!r} are of many sizes: give --image_size. Received: "
            f"--image_size={settings.image_size}."
        )
    if settings.augment_padding >= min(shape[:2]):
        raise UserError(
            f"Flag --augment_padding must be smaller than the images of {settings.dataset!r}, of "
            f"shape {shape}. Received: --augment_padding={settings.augment_padding}."
        )
    return shape


@functools.cache
def _parameters(name, shape, num_classes, group_norm, weight_standardization, relu_first):
    """Parameters of a model, counted on one that is built and thrown away."""
    model = classifiers.build(
        name,
        shape,
        num_classes,
        centre=127.5,
        group_norm=group_norm,
        weight_standardization=weight_standardization,
        relu_first=relu_first,
    )
    return model.count_params()


def _epsilon(plan, accountant):
    try:
        return accounting.epsilon(
            plan.noise_multiplier, plan.sampling_probability, plan.steps, plan.delta, accountant
        )
    except ValueError:  # The values are in range: `plan` checked them.
        return None
