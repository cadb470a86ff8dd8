"""Describes the size and epsilon of a run without data and without training."""

import functools
import math

from absl import flags

from tfdpx import accounting
from tfdpx.train import defaults, fitting
from tfdpx.train.data import tfds
from tfdpx.train.errors import UserError, did_you_mean
from tfdpx.train.start_from import Start

_DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "Only print the size of the run and its epsilon, without reading data.",
)


def from_flags(settings):
    """Returns the dict of `describe` if --dry_run is set, else None."""
    return describe(settings) if _DRY_RUN.value else None


def describe(settings):
    """Describes the run of `settings`.

    Args:
        settings: A `settings.Settings`.

    Returns:
        Dict. `epsilon` is by `accountant`, the accountant of the run. `epsilon_rdp` and
        `epsilon_pld` differ because they are two bounds for the same updates; they are None if the
        accountant cannot resolve so small a loss, and infinite without privacy. `images_per_update`
        is the mean number of views.

    Raises:
        UserError: If the size of the data set is unknown, or the values contradict each other.
    """
    entry = tfds.find(settings.dataset)
    if entry is None or entry.train_images is None:
        names = [entry.source for entry in tfds.ENTRIES if entry.train_images]
        raise UserError(
            f"The size of the data set {settings.dataset!r} is not known without reading it."
            f"{did_you_mean(settings.dataset or '', tfds.KNOWN)} "
            f"--dry_run knows: {', '.join(names)}."
        )
    num_examples = entry.train_images - _held_out(entry.train_images, settings.validation)
    start = Start(settings)
    shape = _image_shape(settings, start, entry)
    sketch = functools.partial(start.sketch, shape=shape, num_classes=entry.num_classes)
    settings, _ = defaults.complete(start.settings, num_examples, sketch=sketch)
    plan = settings.privacy_plan(num_examples)
    fitting.check(settings, plan, shape)
    return {
        "dataset": entry.source,
        "num_examples": num_examples,
        "image_height": shape[0],
        "image_width": shape[1],
        "model": settings.model,
        "pretrained_on": settings.pretrained_on,
        "trainable": settings.trainable,
        "head_steps": settings.head_steps,
        "parameters": sketch(settings.model).count_params(),
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
    }


def _held_out(images, validation):
    """Returns the number of images that `--validation` holds out."""
    held_out = math.ceil(validation * images) if validation < 1 else int(validation)
    if held_out >= images:
        raise UserError(
            f"Flag --validation must leave some of the {images} images to train on. Received: "
            f"--validation={validation:g}."
        )
    return held_out


def _image_shape(settings, start, entry):
    sizes = zip(start.image_shape, entry.image_shape, strict=True)
    shape = tuple(of_model or of_data for of_model, of_data in sizes)
    side = settings.center_crop or settings.image_size
    if side:
        shape = (side, side, shape[2])
    if None in shape:
        raise UserError(
            f"The images of {settings.dataset!r} are of many sizes: give --image_size. Received: "
            f"--image_size={settings.image_size}."
        )
    return shape


def _epsilon(plan, accountant):
    try:
        return accounting.epsilon(
            plan.noise_multiplier, plan.sampling_probability, plan.steps, plan.delta, accountant
        )
    except ValueError:  # Not because of values out of range: `plan` has checked them.
        return None
