"""Describes the size, epsilon and time of a run without data and without training."""

import functools
import math
import time
import types

import keras
import numpy as np
from absl import flags

import tfdpx
from tfdpx import accounting
from tfdpx.layers.few_weights import last_layer
from tfdpx.train import defaults, fitting
from tfdpx.train.data import tfds
from tfdpx.train.errors import UserError, did_you_mean
from tfdpx.train.start_from import Start

_DRY_RUN = flags.DEFINE_bool(
    "dry_run",
    False,
    "Only print the size of the run and its epsilon, without reading data.",
)
_SECONDS_PER_UPDATE = flags.DEFINE_float(
    "seconds_per_update",
    None,
    "With --dry_run: the measured seconds of an update, to estimate the hours.",
)
_MEASURE = flags.DEFINE_integer(
    "measure",
    None,
    "With --dry_run: time this many updates on black images here, to estimate the hours.",
    lower_bound=1,
)


def from_flags(settings):
    """Returns the dict of `describe` if --dry_run is set, else None.

    Raises:
        UserError: See `describe`; also if --seconds_per_update is invalid, or set for a real run.
    """
    seconds, updates = _SECONDS_PER_UPDATE.value, _MEASURE.value
    if updates is not None and (seconds is not None or not _DRY_RUN.value):
        raise UserError(
            "Flag --measure belongs to --dry_run, and takes the place of --seconds_per_update. "
            f"Received: --measure={updates} --seconds_per_update={seconds} "
            f"--dry_run={_DRY_RUN.value}."
        )
    if seconds is not None and not (_DRY_RUN.value and 0 < seconds < math.inf):
        raise UserError(
            "Flag --seconds_per_update must be positive and finite, and belongs to --dry_run. "
            f"Received: --seconds_per_update={seconds} --dry_run={_DRY_RUN.value}."
        )
    return describe(settings, seconds, updates) if _DRY_RUN.value else None


def describe(settings, seconds_per_update=None, updates_to_time=None):
    """Describes the run of `settings`.

    Args:
        settings: A `settings.Settings`.
        seconds_per_update: Optional float, the seconds that an update takes.
        updates_to_time: Optional int, the number of updates to time here instead.

    Returns:
        Dict. `epsilon` is by `accountant`, the accountant of the run. `epsilon_rdp` and
        `epsilon_pld` differ because they are two bounds for the same updates; they are None if the
        accountant cannot resolve so small a loss, and infinite without privacy. `images_per_update`
        is the mean number of views. `estimated_hours` is None without a time.

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
    start = Start(settings, settings.pixels, settings.batch_norm, settings.features)
    shape = _image_shape(settings, start, entry)
    sketch = functools.partial(start.sketch, shape=shape, num_classes=entry.num_classes)
    settings, _ = defaults.complete(start.settings, num_examples, sketch=sketch)
    plan = settings.privacy_plan(num_examples)
    fitting.check(settings, plan, shape)
    if updates_to_time:
        start.settings = settings
        about = dict(num_classes=entry.num_classes, centre=127.5, deviation=127.5)
        data = types.SimpleNamespace(image_shape=shape, **about)
        seconds_per_update = _seconds_per_update(start.build(data), settings, plan, updates_to_time)
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
        "seconds_per_update": seconds_per_update,
        "estimated_hours": seconds_per_update and plan.steps * seconds_per_update / 3600,
    }


class _BlackImages:
    """A source of all-zero inputs of a model, with labels."""

    def __init__(self, model, count):
        [inputs] = model.inputs
        self._count = count
        self._input = np.zeros(inputs.shape[1:], inputs.dtype)

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return self._input, np.int64(0)


def _seconds_per_update(model, settings, plan, updates):
    """Returns the mean time of updates in seconds; the first update is not timed."""
    if not settings.augmult and (features := fitting.features_of(model)):
        # A run computes the features once, and trains the last layer on them.
        model = keras.Sequential([keras.Input(features.output_shape[1:]), last_layer(model)])
    loss = fitting.crossentropy(settings.label_smoothing)
    optimizer = fitting.private_optimizer(settings, plan, None)
    model.compile(optimizer, loss, jit_compile=settings.keras_jit_compile)
    images = tfdpx.RandomAccess(_BlackImages(model, plan.num_examples))
    batches, ended = plan.batches(images, optimizer=optimizer), []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ended.append(time.perf_counter())
    )
    steps = min(updates + 1, plan.steps)
    model.fit(batches, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=[note])
    return (ended[-1] - ended[0]) / (len(ended) - 1) if len(ended) > 1 else None


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
