"""Adding one example moves the clipped sum by at most C, rounding included."""

import bench
import cancelling
import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf
from cases import slow

import tfdpx
from tfdpx import mechanism
from tfdpx._keras import lora
from tfdpx.layers import GroupNorm, WSConv2D
from tfdpx.per_example import rounding
from tfdpx.per_example.rules import contraction
from tfdpx.training.clipping import NormStatistics

layers = keras.layers
BOUND = 1.0 + 1e-5
FAN_IN, FAN_OUT, EXAMPLES = 8, 8, 6
BOTH = ("instantiate", "ghost")


def image_model(inputs, layer):
    images = layers.Reshape((inputs.shape[1], 1, FAN_IN))(inputs)
    return layers.Reshape((inputs.shape[1], FAN_OUT))(layer(images))


def einsum(inputs, equation, shape, bias_axes):
    outputs = layers.EinsumDense(equation, shape, bias_axes=bias_axes)(inputs)
    return layers.Reshape((inputs.shape[1], FAN_OUT))(outputs)


def called_twice(inputs):
    layer, half = layers.Dense(FAN_OUT), inputs.shape[1] // 2
    return layers.Concatenate(axis=1)([layer(inputs[:, :half]), layer(inputs[:, half:])])


class Tied(layers.Layer):
    """A model with two rules for one kernel, which are joined by adding instances."""

    def __init__(self, dense):
        super().__init__()
        self.dense = dense
        self.offset = self.add_weight(shape=(FAN_OUT,))

    def call(self, x):
        return tf.matmul(x, self.dense.kernel) + self.offset


def tied(inputs):
    layer, half = layers.Dense(FAN_OUT), inputs.shape[1] // 2
    return layers.Concatenate(axis=1)([layer(inputs[:, :half]), Tied(layer)(inputs[:, half:])])


def with_lora(layer, inputs):
    outputs = layer(inputs)
    layer.enable_lora(2)
    _, b = lora.factors(layer)
    b.assign(np.random.default_rng(0).normal(size=b.shape))  # Zero at first.
    return outputs


LAYERS = {
    "dense": (lambda x: layers.Dense(FAN_OUT)(x), BOTH),
    "dense called twice": (called_twice, BOTH),
    "tied": (tied, BOTH[:1]),
    "einsum": (lambda x: einsum(x, "abc,cd->abd", (None, FAN_OUT), "d"), BOTH),
    "einsum with groups": (lambda x: einsum(x, "abc,cd->abcd", (None, FAN_IN, 1), "c"), BOTH),
    "convolution": (lambda x: image_model(x, layers.Conv2D(FAN_OUT, (3, 1), padding="same")), BOTH),
    "standardized": (lambda x: image_model(x, WSConv2D(FAN_OUT, (3, 1), padding="same")), BOTH),
    "depthwise": (lambda x: image_model(x, layers.DepthwiseConv2D(1)), BOTH[:1]),
    "generic": (lambda x: layers.Conv1D(FAN_OUT, 1)(x), BOTH[:1]),
    "recurrent": (lambda x: layers.SimpleRNN(FAN_OUT, "linear", return_sequences=True)(x), BOTH),
    "layer normalization": (lambda x: layers.LayerNormalization()(x), BOTH[:1]),
    "group normalization": (lambda x: GroupNorm(2)(x), BOTH[:1]),
    "embedding": (lambda x: layers.Embedding(3, FAN_OUT)(x), BOTH),
    "lora dense": (lambda x: with_lora(layers.Dense(FAN_OUT), x), BOTH[:1]),
    "lora einsum": (
        lambda x: with_lora(layers.EinsumDense("abc,cd->abd", (None, FAN_OUT)), x), BOTH[:1]
    ),
    "lora embedding": (lambda x: with_lora(layers.Embedding(3, FAN_OUT), x), BOTH),
}  # fmt: skip


def largest(name, norm, jit_compile, positions=8, views=2, trials=15, policy="float32", clip=1.0):
    """Returns the largest sensitivity to an example of each pattern and its neighbour, over C.

    The neighbour matters because it may be absorbed by the hostile example.
    """
    seeds.fix(0)
    keras.config.set_dtype_policy(policy)
    try:
        tokens = name.endswith("embedding")
        inputs = keras.Input((positions,) if tokens else (positions, FAN_IN))
        model = cancelling.model_of(inputs, LAYERS[name][0](inputs))
    finally:
        keras.config.set_dtype_policy("float32")
    rng, sums, worst = np.random.default_rng(1), None, 0.0
    shape = (EXAMPLES, views * positions)
    for trial in range(trials):
        pattern = cancelling.PATTERNS[trial % len(cancelling.PATTERNS)]
        size = 10.0 ** rng.uniform(2, 8 if trial < trials // 2 else 18)
        x, y = rng.normal(size=(*shape, FAN_IN)), rng.normal(size=(*shape, FAN_OUT))
        y *= 10.0 ** rng.uniform(-3, 0)
        hostile = rng.integers(EXAMPLES)
        x[hostile], y[hostile] = cancelling.worst(
            rng, pattern, size, views * positions, FAN_IN, FAN_OUT
        )
        x = x.reshape(-1, positions, FAN_IN).astype("float32")
        if tokens:
            x = rng.integers(0, 3, size=shape)
            x[hostile] = 0
            x = x.reshape(-1, positions)
        y = clip * y.reshape(-1, positions, FAN_OUT).astype("float32")
        sums = sums or cancelling.clipped_sums(model, x, views, norm, jit_compile, clip)
        for example in hostile, (hostile + 1) % EXAMPLES:
            worst = max(worst, cancelling.sensitivity(sums, x, y, EXAMPLES, example))
    return worst


CASES = [(name, norm, False) for name, (_, norms) in LAYERS.items() for norm in norms]
UNDER_XLA = [
    (name, norm, True)
    for name, norm in (
        ("dense", "ghost"),
        ("standardized", "ghost"),
        ("layer normalization", "instantiate"),
        ("embedding", "instantiate"),
    )
]


@pytest.mark.parametrize("name, norm, jit_compile", CASES + [slow(*case) for case in UNDER_XLA])
def test_gradients_that_cancel(name, norm, jit_compile):
    # The sum comes near the bound, so the test would notice a larger allowance as well.
    assert 0.95 < largest(name, norm, jit_compile) <= BOUND


@pytest.mark.parametrize(
    "name, positions, views", [("dense", 2, 1), ("embedding", 3, 3), ("dense", 64, 1)]
)
def test_few_and_many_positions(name, positions, views):
    assert largest(name, "ghost", False, positions, views) <= BOUND


def test_layers_that_compute_in_bfloat16():
    assert largest("standardized", "ghost", False, policy="mixed_bfloat16") <= BOUND


@pytest.mark.parametrize("clip", [1e-9, 1e6])
def test_small_and_large_clips(clip):
    assert largest("dense", "ghost", False, positions=2, views=1, clip=clip) <= BOUND


@pytest.mark.planted("norms without an allowance for rounding")
@pytest.mark.parametrize("name", ["dense", "embedding"])
def test_norms_without_an_allowance_are_rejected(monkeypatch, name):
    monkeypatch.setattr(rounding, "UNIT", 0.0)
    monkeypatch.setattr(rounding, "product_error", lambda: 0.0)
    monkeypatch.setattr(rounding, "_LARGEST_CANCELLATION", np.inf)
    assert largest(name, "ghost", False) > 1.0 + 1e-3


def truncate(tensor):
    """Rounds `tensor` to the 10 bits of mantissa of TF32."""
    bits = tf.bitcast(tensor, tf.int32)
    return tf.bitcast((bits + 0x1000) & ~0x1FFF, tf.float32)


@pytest.mark.parametrize("norm", BOTH)
def test_matrix_products_in_tf32(monkeypatch, norm):
    multiply = tf.matmul
    monkeypatch.setattr(
        contraction.tf, "matmul", lambda a, b, **kw: multiply(truncate(a), truncate(b), **kw)
    )
    if norm == "ghost":
        assert largest("dense", norm, False) > BOUND
    # Reports a GPU, and TF32 is TensorFlow's default on GPUs.
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind=None: [kind] * (kind == "GPU")
    )
    assert rounding.product_error() == 2.0**-10
    assert largest("dense", norm, False) <= BOUND


def test_the_precision_of_products_is_that_of_the_device(monkeypatch):
    assert rounding.product_error() == rounding.UNIT
    present = "GPU"
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind=None: [kind] * (kind == present)
    )
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: False)
    assert rounding.product_error() == rounding.UNIT
    present = "TPU"
    assert rounding.product_error() == 2.0**-7


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
@pytest.mark.parametrize("arguments", [{"run_eagerly": True}, slow({"jit_compile": True})])
def test_the_whole_update(arguments):
    rng, updates = np.random.default_rng(0), []
    x, y = rng.normal(size=(5, 2, FAN_IN)), 0.1 * rng.normal(size=(5, 2, FAN_OUT))
    x[3], y[3] = cancelling.worst(rng, "nearly equal inputs", 1e2, 2, FAN_IN, FAN_OUT)
    y[3] += 5.0
    x, y = x.astype("float32"), y.astype("float32")
    inputs = keras.Input((2, FAN_IN))
    # Zero weights keep the update to the last bit.
    outputs = layers.Dense(FAN_OUT, kernel_initializer="zeros")(inputs)
    optimizer = tfdpx.DPSGD(1.0, batch_size=1, noise_multiplier=0.0)
    model = cancelling.model_of(inputs, outputs, optimizer, **arguments)
    start = model.get_weights()
    for weights in np.ones(5), np.arange(5) != 3:
        model.set_weights(start)
        updates.append(small.step(model, x, y, weights.astype("float32")).astype("float64"))
    assert 0.1 < np.linalg.norm(updates[0] - updates[1]) <= BOUND


def flat(tensors):
    return np.concatenate([np.ravel(t) for t in tensors]).astype("float64")


def check_public(monkeypatch, x, layers=None, shape=(6,), optimizer=tfdpx.DPSGD, **arguments):
    """A hostile example moves all releases of an optimizer by at most C, and its update is counted.

    Releases other than gradients count too: each is divided by its noise, and all are joined.
    """
    sums, privatize = [], mechanism.privatize

    def noted(tensors, noise_multiplier, *rest):
        sums.append(flat(tensors) / noise_multiplier)
        return privatize(tensors, noise_multiplier, *rest)

    monkeypatch.setattr(mechanism, "privatize", noted)
    every, y = np.ones(len(x), "float32"), np.eye(3)[np.arange(len(x)) % 3]
    x[3] *= 1e4
    eagerly = {"run_eagerly": True}  # Releases can be read outside of a graph.
    instance = None
    for weights in every, np.where(np.arange(len(x)) == 3, 0, every):
        if instance is None or "augment" in arguments:  # A second update draws other views.
            instance = optimizer(0.1, batch_size=1, noise_multiplier=1.0, seed=1, **arguments)
            trained = bench.Bench(instance, layers, "mse", shape, compile_arguments=eagerly)
        steps = instance.ledger.steps
        trained.step(x, y, weights)
        assert instance.ledger.steps == steps + 1
    assert 0.1 < np.linalg.norm(sums[0] - sums[1]) <= BOUND


def public(module, kind):
    """Returns `{name: class}` of the classes of a kind that a module lists."""
    listed = {name: getattr(module, name) for name in module.__all__}
    return {n: c for n, c in listed.items() if isinstance(c, type) and issubclass(c, kind)}


OPTIMIZERS = {
    **public(tfdpx, keras.optimizers.Optimizer),
    "make_private": tfdpx.make_private(keras.optimizers.Adagrad),
}
AUGMENTATIONS = {
    "LayerViews": lambda: tfdpx.augment.LayerViews(layers.RandomFlip()),
    "MixViews": lambda: tfdpx.augment.MixViews(tfdpx.augment.RandomCropFlip(1), 1),
    "RandomCropFlip": lambda: tfdpx.augment.RandomCropFlip(1),
    "ResizeCropFlip": lambda: tfdpx.augment.ResizeCropFlip(4),
}


CLIPS = {
    "automatic": "automatic",
    "adaptive": tfdpx.AdaptiveClip(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(monkeypatch, name):
    check_public(monkeypatch, small.data()[0], optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("name", CLIPS)
def test_every_clip(monkeypatch, name):
    check_public(monkeypatch, small.data()[0], l2_norm_clip=CLIPS[name])


@pytest.mark.planted("a count of unclipped examples that is not bounded")
def test_an_indicator_that_is_not_bounded_is_noticed(monkeypatch):
    def measure(self, ids, present, squared_norms, clips):
        below = tf.where(present, 1.0 - tf.sqrt(squared_norms) / clips, 0.0)
        return NormStatistics(noisy=[tf.reduce_sum(below) * (self._weight / self._batch_size)])

    monkeypatch.setattr(tfdpx.AdaptiveClip, "measure", measure)
    with pytest.raises(AssertionError):
        test_every_clip(monkeypatch, "adaptive")


@pytest.mark.slow
@pytest.mark.parametrize("name", public(tfdpx.augment, object))
def test_every_augmentation(monkeypatch, name):
    x = np.random.default_rng(0).uniform(size=(6, 5, 5, 1)).astype("float32")

    def stack():
        ends = [layers.GlobalAveragePooling2D(), layers.Dense(3)]
        return [layers.Conv2D(2, 3), *ends]

    shape = None, None, 1
    check_public(monkeypatch, x, stack, shape, augment=AUGMENTATIONS[name](), augmult=3)


SIZES = [(1e-20, 1e19), (1e-25, 1e25), (1e30, 1e-30), (1e30, 1e30), (1e-23, 1.0), (1e-30, 1e-30)]


@pytest.mark.parametrize("positions", [1, 2])
def test_squares_that_overflow_or_vanish(positions):
    inputs = keras.Input((positions, FAN_IN))
    model = cancelling.model_of(inputs, layers.Dense(FAN_OUT, use_bias=False)(inputs))
    x, y = np.zeros((2, positions, FAN_IN), "float32"), np.zeros((2, positions, FAN_OUT), "float32")
    for norm in BOTH:
        sums = cancelling.clipped_sums(model, x, norm=norm, clip=1e-9)
        for size_in, size_out in SIZES:
            rng = np.random.default_rng(0)
            x = (size_in * rng.normal(size=x.shape)).astype("float32")
            y = (size_out * rng.normal(size=y.shape)).astype("float32")
            moved = cancelling.sensitivity(sums, x, y, 2, 0)
            assert np.isfinite(moved) and moved <= BOUND, (size_in, size_out, norm)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_many_small_entries_beside_a_large_one_count(jit_compile):
    # Each square is below half a unit in the last place of the first one.
    gradient = np.full((1, 1024, 1024), 2.0**-12.6, "float32")
    gradient[0, 0, 0] = 1.0
    norms = tf.function(lambda g: rounding.squared_norms([g]), jit_compile=jit_compile)
    wanted = np.square(gradient.astype("float64")).sum()
    assert wanted <= float(norms(tf.constant(gradient))[0]) <= wanted * (1 + 3e-4)


@pytest.mark.parametrize("positions, most", [(2, 32), (256, 64)])
def test_terms_that_cancel_are_added_at_so_many_clips_at_most(positions, most):
    """A small sum is not enough: a partial sum with a long term absorbs the terms of others."""
    inputs = tf.ones([1, 1, positions, FAN_IN])
    signs = tf.where(tf.range(positions) % 2 == 0, 1.0, -1.0)[:, tf.newaxis]
    outputs = signs * tf.ones([1, 1, positions, FAN_OUT])
    norm = np.sqrt(rounding.add_up([contraction.ghost_product_norms(inputs, outputs)]))
    lengths = positions * np.sqrt(FAN_IN * FAN_OUT)
    assert lengths / norm <= most * (1 + 1e-5)


def test_norms_are_raised_by_what_rounding_can_hide():
    terms, magnitude = 4096, 20.0
    [allowed] = np.sqrt(rounding.allow(tf.ones([1]), tf.fill([1], magnitude), terms))
    assert allowed >= 1 + (terms + rounding.EXTRA) * rounding.UNIT * magnitude


def test_a_clip_too_small_for_float32_is_refused():
    with pytest.raises(ValueError, match="`l2_norm_clip` must be at least 1e-09"):
        mechanism.clip_factors(tf.ones([2]), 1e-30, 1)


TOKENS = [
    [[0, -1, 2], [-4, -2, -2]],
    [[4, 1, 1], [-5, 0, 2**31 + 1]],
    [[2**32 + 1, 1, -(2**31)], [0, 3, 2]],
]


def test_tokens_that_are_negative_or_in_no_table():
    # An example with a token outside of the table contributes nothing, although XLA reads some row.
    inputs = keras.Input((3,), dtype="int64")
    layer = layers.Embedding(4, 2)
    model = cancelling.model_of(inputs, layer(inputs))
    y = tf.constant(np.random.default_rng(0).normal(size=(2, 3, 2)), "float32")

    @tf.function(jit_compile=True)
    def ordinary(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) * y)
        return tf.convert_to_tensor(tape.gradient(loss, layer.embeddings.value))

    sample = tf.constant(TOKENS[0], "int64")
    each_sums = [
        cancelling.clipped_sums(model, sample, norm=norm, jit_compile=True, clip=1e-6)
        for norm in BOTH
    ]
    for rows in TOKENS:
        x = tf.constant(rows, "int64")
        gradients = [ordinary(x[i : i + 1], y[i : i + 1]) for i in range(2)]
        in_table = [all(-4 <= token < 4 for token in row) for row in rows]
        directions = [g / tf.norm(g) for g, flag in zip(gradients, in_table, strict=True) if flag]
        wanted = np.ravel(sum(directions, tf.zeros([4, 2])))
        for sums in each_sums:
            summed = sums(x, y, np.ones(2, bool))
            np.testing.assert_allclose(summed, wanted, rtol=1e-4, atol=1e-5)
