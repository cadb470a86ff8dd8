"""The models and training steps that the benchmark compares, and a function that times them."""

import dataclasses
import random
import time

import keras
import numpy as np
import tensorflow as tf

from tfdpx import PrivacyPlan, per_example
from tfdpx._keras import model_internals
from tfdpx.accounting import IndividualAccountant
from tfdpx.layers import trainable
from tfdpx.per_example import cost_model
from tfdpx.sampling.batch_sampler import sampler_of
from tfdpx.train import objects, start_from, startup
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.training import optimizers
from tfdpx.training.session import Session

IMAGE_SIZE = 32

NUM_IMAGE_CLASSES = 10
TOKENS, WIDTH = 64, 256
VOCABULARY = 30_522


def check_model(name, image_size):
    """Raises UserError unless `name` is a model that accepts inputs of this size.

    Args:
        name: Name of the model.
        image_size: Height and width of an image in pixels. None means 32, or that the model does
            not take images.
    """
    if name in _OF_VECTORS:
        if image_size is not None:
            raise UserError(
                f"Flag --image_size does not belong to --model={name}, which sees no images. "
                f"Received: --image_size={image_size}. Leave it out."
            )
        return
    if problems := objects.MODELS.problems(name):
        raise UserError(f"{' '.join(problems)} Or of: {', '.join(_OF_VECTORS)}.")


def build_model(name, image_size):
    """Returns an uncompiled model that ends in logits.

    Image models are built like in `tfdpx.train.classify`, for bytes and ten classes. The others
    are:

    - `dense_head`: one layer from feature vectors [2048] to 1,000 classes.
    - `transformer`: four pre-norm encoder blocks (width 256, 4 heads of 64, MLP of 1,024) on float
      tokens [64, 256]; the mean token is mapped to ten classes.
    - `lstm`: an `LSTM(128)` on [100, 32].
    - `mobilenet`: Keras's MobileNetV2 with frozen normalization, on images [64, 64, 3].
    - `vit_base` and `bert_base`: twelve encoder blocks (width 768, 12 heads, MLP of 3,072), on the
      196 patches of an image or on 128 tokens from a vocabulary of 30,522.
    - `billion`: 19 encoder blocks of width 2,048 on 64 tokens, with a billion weights in bfloat16.

    Args:
        name: Name of the model.
        image_size: As for `check_model`.

    Raises:
        UserError: If the model does not fit images of that size.
    """
    if name in _OF_VECTORS:
        return _OF_VECTORS[name][0]()
    return start_from.classifier(name, _image_shape(image_size), NUM_IMAGE_CLASSES, centre=127.5)


def make_arrays(name, image_size, rows):
    """Returns generated inputs [rows, ...] and labels [rows], the same on each call, in NumPy.

    Args:
        name: Name of the model.
        image_size: As for `check_model`.
        rows: Int.
    """
    generator = np.random.default_rng(0)
    if name in _OF_VECTORS:
        _, shape, classes = _OF_VECTORS[name]
        if name in _OF_TOKENS:
            x = generator.integers(0, VOCABULARY, size=(rows, *shape), dtype="int32")
        else:
            x = generator.normal(size=(rows, *shape)).astype("float32")
    else:
        shape, classes = _image_shape(image_size), NUM_IMAGE_CLASSES
        x = generator.integers(0, 256, size=(rows, *shape), dtype="uint8")
    return x, generator.integers(0, classes, size=rows)


def _image_shape(image_size):
    size = IMAGE_SIZE if image_size is None else image_size
    return (size, size, 3)


def _dense_head():
    return keras.Sequential(
        [keras.Input([2048]), keras.layers.Dense(1000, name="logits")], name="dense_head"
    )


def _blocks(x, blocks, heads, width, dtype=None):
    layers, arguments = keras.layers, {"dtype": dtype}
    for _ in range(blocks):
        normed = layers.LayerNormalization(**arguments)(x)
        x = x + layers.MultiHeadAttention(heads, width // heads, **arguments)(normed, normed)
        normed = layers.LayerNormalization(**arguments)(x)
        hidden = layers.Dense(4 * width, activation="gelu", **arguments)(normed)
        x = x + layers.Dense(width, **arguments)(hidden)
    return x


def _transformer():
    inputs = keras.Input([TOKENS, WIDTH])
    pooled = keras.layers.GlobalAveragePooling1D()(_blocks(inputs, 4, 4, WIDTH))
    return keras.Model(inputs, keras.layers.Dense(10)(pooled), name="transformer")


def _lstm():
    inputs = keras.Input([100, 32])
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.LSTM(128)(inputs)), name="lstm")


def _mobilenet():
    model = keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=10,
                                           classifier_activation=None)  # fmt: skip
    for layer in model.layers:
        layer.trainable = not isinstance(layer, keras.layers.BatchNormalization)
    return model


def _base(inputs, embedded, name):
    """Returns a model with the twelve blocks of ViT-Base, and a head on the first token."""
    layers = keras.layers
    positions = layers.Embedding(embedded.shape[1], 768)(keras.ops.arange(embedded.shape[1]))
    x = layers.LayerNormalization()(_blocks(embedded + positions, 12, 12, 768))
    return keras.Model(inputs, layers.Dense(10)(x[:, 0]), name=name)


def _vit_base():
    inputs = keras.Input([224, 224, 3])
    patches = keras.layers.Conv2D(768, 16, 16)(inputs)
    return _base(inputs, keras.layers.Reshape([196, 768])(patches), "vit_base")


def _bert_base():
    inputs = keras.Input([128], dtype="int32")
    return _base(inputs, keras.layers.Embedding(VOCABULARY, 768)(inputs), "bert_base")


def _billion():
    inputs = keras.Input([64], dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 2048, dtype="bfloat16")(inputs)
    x = _blocks(x, 19, 16, 2048, "bfloat16")
    return keras.Model(inputs, keras.layers.Dense(10)(x[:, 0]), name="billion")


# From a model's name to a function that builds it, the shape of an input, and the number of
# classes.
_OF_VECTORS = {
    "dense_head": (_dense_head, (2048,), 1000),
    "transformer": (_transformer, (TOKENS, WIDTH), 10),
    "mobilenet": (_mobilenet, (64, 64, 3), 10),
    "lstm": (_lstm, (100, 32), 10),
    "vit_base": (_vit_base, (224, 224, 3), 10),
    "bert_base": (_bert_base, (128,), 10),
    "billion": (_billion, (64,), 10),
}
_OF_TOKENS = ("bert_base", "billion")


KINDS = {
    "ordinary": "ordinary Keras",
    "private": "private, tfdpx",
    "mapped": "private, subclassed",
    "individual": "private, individual accounting",
    "users": "private, of people",
}

NORMS = ("auto", "instantiate", "ghost")
PRECISIONS = ("float32", "mixed_bfloat16")

# With this small rate weights hardly move, so the noise of many steps does not lead to NaN.
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a step. Each field is the value of the flag with the same name.

    Raises:
        UserError: If a value is out of range.
    """

    model: str
    images: int = 32
    augmult: int = 1
    image_size: int | None = None
    microbatch_size: int | None = None
    jit: bool = False
    norms: str = "auto"
    trainable: str = "all"
    precision: str = "float32"
    num_examples: int = 50_000

    def __post_init__(self):
        for name in ("images", "augmult", "image_size", "num_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"Flag --{name} must be at least 1. Received: --{name}={value}.")
        check_model(self.model, self.image_size)

    @property
    def rows(self):
        """The number of views of all examples in a step, which is the model's batch size."""
        return self.images * self.augmult


def make_model(kind, settings, plan=None):
    """Returns a compiled and built model. Its initial weights are the same for each kind.

    Args:
        kind: One of `KINDS`.
        settings: `Settings`.
        plan: Optional `tfdpx.PrivacyPlan` of the private optimizer. By default its batch size is
            `settings.images`, and its noise multiplier is one.

    Raises:
        UserError: If the settings do not suit the model or the optimizer.
    """
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(settings.precision)
    model = build_model(settings.model, settings.image_size)
    if settings.trainable != "all":
        with checking_flags():
            trainable(model, settings.trainable)
    if kind == "mapped":
        model = Subclassed(model)
    individual = None
    if kind in ("individual", "users"):
        unit = "user" if kind == "users" else "example"
        sizes = settings.num_examples, settings.images, 1000
        plan = PrivacyPlan(*sizes, noise_multiplier=1.0, delta=1e-5, unit=unit)
        individual = IndividualAccountant(plan) if kind == "individual" else None
    views = settings.augmult if settings.augmult > 1 and kind != "users" else 0
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
                augmult=views,
            )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=settings.jit,
    )
    model_internals.build(model, (*make_rows(dataclasses.replace(settings, images=1)), None))
    return model


class Subclassed(keras.Model):
    """Wraps a model in a class that tfdpx does not know, so tfdpx maps it over examples."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, inputs, training=None):
        """Returns the outputs of the model."""
        return self.model(inputs, training=training)


def make_rows(settings):
    """Returns the batch of an ordinary step: tensors [images * augmult, ...] and labels."""
    x, y = make_arrays(settings.model, settings.image_size, settings.rows)
    # The views of an example share its label.
    return tf.constant(x), tf.constant(np.repeat(y[:: settings.augmult], settings.augmult))


def make_batch(kind, settings):
    """Returns the batch of `make_rows` in the form that a step of `kind` takes.

    For a private step inputs are [images, augmult, ...], if there are views.
    """
    x, y = make_rows(settings)
    if kind == "ordinary" or settings.augmult == 1:
        return x, y
    x = tf.reshape(x, [settings.images, settings.augmult, *x.shape[1:]])
    if kind == "users":  # The examples of a person, and a mask: none of them is missing.
        y = tf.reshape(y, x.shape[:2])
        return x, y, tf.ones(y.shape)
    return x, y[:: settings.augmult]


def trace(function, arguments, settings):
    """Returns a function without arguments that runs `function` as a graph and waits for it.

    Args:
        function: Python function of tensors.
        arguments: Tuple of its arguments, nests of tensors.
        settings: `Settings`; only `jit` and `norms` matter.
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
    """Returns a traced training step, a function without arguments.

    The step runs `keras.Model.train_step` in a `tf.function`, as `fit` does, on one batch that
    stays in memory. It includes the forward and backward pass and the update; for a private step,
    also norms, clipped sums and noise.

    Args:
        kind: One of `KINDS`.
        settings: `Settings`.
    """
    startup.keep_freed_memory()  # The programs of tfdpx do the same.
    model, batch = make_model(kind, settings), make_batch(kind, settings)
    if kind == "individual":
        plan = model.optimizer.plan
        draws = sampler_of(plan.batches(np.zeros([plan.num_examples], "uint8")))
        model.optimizer.session = Session(model.optimizer, draws, None)  # `fit` does the same.
        ids = np.random.default_rng(0).permutation(plan.num_examples)[: settings.images]
        batch = (*batch, tf.ones([settings.images]), tf.constant(ids, tf.int32))
    return trace(model.train_step, (batch,), settings)


def layer_choices(settings):
    """Returns `per_example.LayerChoice`s: the way to compute each layer's norm and clipped sum."""
    model = make_model("private", settings)
    with cost_model.forced_norms(settings.norms):
        return per_example.explain(model, make_rows(settings)[0], settings.augmult)


def interleaved(steps, repeats, clock=time.perf_counter):
    """Times each step once per repeat, in random order, so disturbances affect all steps equally.

    First each step runs twice without being timed.

    Args:
        steps: `{name: function without arguments}`.
        repeats: Int, the number of timed runs of each step.
        clock: Function that returns the time in seconds.

    Returns:
        `{name: list of seconds}`, with one number for each repeat, in order.
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
