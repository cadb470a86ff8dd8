"""The training steps that the benchmark compares, and how they are timed against each other."""

import dataclasses
import random
import time

import keras
import numpy as np
import tensorflow as tf

from experiments.benchmark import models
from tfdpx import per_example
from tfdpx._keras import model_internals
from tfdpx.layers import trainable
from tfdpx.per_example import cost_model
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.training import allocator, optimizers

KINDS = {
    "ordinary": "ordinary Keras",
    "private": "private, tfdpx",
    "mapped": "private, subclassed",
}

NORMS = ("auto", "instantiate", "ghost")

# Small, so that the weights hardly move: noise of many steps must not end in NaN or denormals.
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a step is made of; each field is the flag of that name.

    Raises:
        UserError: If a value is out of its range.
    """

    model: str
    images: int = 32
    augmult: int = 1
    users: int | None = None
    image_size: int | None = None
    microbatch_size: int | None = None
    jit: bool = False
    norms: str = "auto"
    trainable: str = "all"

    def __post_init__(self):
        for name in ("images", "augmult", "users", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"Flag --{name} must be at least 1. Received: --{name}={value}.")
        models.check(self.model, self.image_size)

    @property
    def rows(self):
        """Rows that the model sees in a step: every view of every example."""
        return self.images * self.augmult


def make_model(kind, settings, plan=None, individual=None):
    """A compiled and built model; the weights are the same for each kind.

    Args:
        kind: One of `KINDS`.
        settings: `Settings`.
        plan: Optional `tfdpx.PrivacyPlan` of the private optimizer; by default its batches are of
            `settings.images`, and sigma is one.
        individual: Optional `tfdpx.accounting.IndividualAccountant` of the plan.

    Raises:
        UserError: If the settings do not suit the model or the optimizer.
    """
    keras.utils.set_random_seed(0)
    model = models.build(settings.model, settings.image_size)
    if settings.trainable != "all":
        with checking_flags():
            trainable(model, settings.trainable)
    if kind == "mapped":
        model = Subclassed(model)
    if kind == "ordinary":
        optimizer = keras.optimizers.SGD(LEARNING_RATE)
    else:
        with checking_flags():
            optimizer = optimizers.DPSGD(
                LEARNING_RATE,
                plan=plan,
                individual=individual,
                batch_size=settings.images,
                noise_multiplier=1.0,
                l2_norm_clip=1.0,
                microbatch_size=settings.microbatch_size,
                augmult=settings.augmult if settings.augmult > 1 else 0,
            )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=settings.jit,
    )
    model_internals.build(model, (*make_rows(dataclasses.replace(settings, images=1)), None))
    return model


class Subclassed(keras.Model):
    """A user-defined class around the model. Its examples are mapped, because it is not known."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, inputs, training=None):
        """The outputs of the model."""
        return self.model(inputs, training=training)


def make_rows(settings):
    """What an ordinary step sees: tensors [images * augmult, ...] and labels, in memory."""
    x, y = models.batch(settings.model, settings.image_size, settings.rows)
    # The views of an example share its label.
    return tf.constant(x), tf.constant(np.repeat(y[:: settings.augmult], settings.augmult))


def make_batch(kind, settings):
    """The same rows as a step of `kind` takes them: private ones as [images, augmult, ...]."""
    x, y = make_rows(settings)
    if kind == "ordinary" or settings.augmult == 1:
        return x, y
    x = tf.reshape(x, [settings.images, settings.augmult, *x.shape[1:]])
    return x, y[:: settings.augmult]


def trace(function, arguments, settings):
    """A function of no arguments that runs `function` as a graph and waits for the result.

    Args:
        function: Python function of tensors.
        arguments: Tuple of what it takes, nests of tensors.
        settings: `Settings`, of which `jit` and `norms` count.
    """
    traced = tf.function(function, jit_compile=settings.jit, autograph=False)
    with cost_model.forced_norms(settings.norms):
        graph = traced.get_concrete_function(*arguments)

    def call():
        result = graph(*arguments)
        tf.test.experimental.sync_devices()
        return result

    return call


def make_step(kind, settings):
    """A traced training step, a function of no arguments.

    It is `keras.Model.train_step` in a `tf.function`, as in `fit`: forward, backward, for a private
    one norms, clipped sums and noise, and the update; on one batch that stays in memory.

    Args:
        kind: One of `KINDS`.
        settings: `Settings`.
    """
    allocator.keep_freed_memory()  # As the first private `fit` of a process does, for all kinds.
    model = make_model(kind, settings)
    return trace(model.train_step, (make_batch(kind, settings),), settings)


def layer_choices(settings):
    """How each layer's norm and clipped sum are formed: a list of `per_example.LayerChoice`."""
    model = make_model("private", settings)
    with cost_model.forced_norms(settings.norms):
        return per_example.explain(model, make_rows(settings)[0], settings.augmult)


def interleaved(steps, repeats, clock=time.perf_counter):
    """Times each step once a repeat, in a random order, so that disturbances meet all alike.

    Two runs of each come before, which are not timed.

    Args:
        steps: `{name: function of no arguments}`.
        repeats: Int. Runs of each.
        clock: Function that gives the time in seconds.

    Returns:
        `{name: list of seconds}`, one a repeat, in the order of repeats.
    """
    for step in steps.values():
        step()
        step()
    order = random.Random(0)
    seconds = {name: [] for name in steps}
    for _ in range(repeats):
        for name in order.sample(list(steps), len(steps)):
            start = clock()
            steps[name]()
            seconds[name].append(clock() - start)
    return seconds
