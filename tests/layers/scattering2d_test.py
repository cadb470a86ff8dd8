"""Scattering2D against Kymatio and the definition; graphs, gradients, errors, private training."""

import itertools
import math
import re

import keras
import kymatio_scattering
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_matches_batches_of_one

import tfdpx
from tfdpx.layers import Scattering2D, scattering2d


def images(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape).astype("float32")


def kymatio(x, J, L=8, max_order=2, out_type="array"):
    """What Kymatio gives for images [batch, height, width, channels]: [..., channels * paths]."""
    transform = kymatio_scattering.Scattering2D(J, x.shape[1:3], L, max_order)
    features = np.moveaxis(transform(np.ascontiguousarray(np.moveaxis(x, -1, 1))), (3, 4), (1, 2))
    return features.reshape(*features.shape[:3], -1)


def wavelet_by_definition(shape, j, t, L):
    """The Fourier transform of one wavelet, from its formula on five periods an axis."""
    y, x = (np.arange(-2 * n, 3 * n) for n in shape)
    turn = (int(L / 2 - 1) - t) * np.pi / L
    sigma, slant = 0.8 * 2**j, 4 / L
    along = y[:, None] * np.cos(turn) + x * np.sin(turn)
    across = -y[:, None] * np.sin(turn) + x * np.cos(turn)
    gauss = np.exp(-(along**2 + slant**2 * across**2) / (2 * sigma**2))
    wave = np.exp(0.75j * np.pi / 2**j * along)
    values = gauss * (wave - (gauss * wave).sum() / gauss.sum())
    values *= slant / (2 * 3.1415 * sigma**2)
    return np.fft.fft2(values.reshape(5, shape[0], 5, shape[1]).sum((0, 2))).real


def convolve(x, spectrum):
    """`x` with every n-th pixel, convolved with the frequencies of a full filter that it has."""
    for axis, size in enumerate(x.shape):
        frequencies = np.fft.fftfreq(spectrum.shape[axis], 1 / spectrum.shape[axis])
        kept = (frequencies >= -size / 2) & (frequencies < size / 2)
        spectrum = np.compress(kept, spectrum, axis)
    return np.fft.ifft2(np.fft.fft2(x) * spectrum)


def by_definition(x, J, L, max_order, padding):
    """The features of one image [height, width], by loops over the wavelets: [paths, ...]."""
    margins = []
    for n in x.shape:
        total = (n // 2**J + 2) * 2**J - n
        margins.append((total // 2, total - total // 2))
    x = np.pad(x, margins, "reflect" if padding == "reflect" else "constant")
    y, z = (np.arange(-2 * n, 3 * n) for n in x.shape)
    sigma = 0.8 * 2 ** (J - 1)
    phi = np.exp(-(y[:, None] ** 2 + z**2) / (2 * sigma**2)) / (2 * 3.1415 * sigma**2)
    phi = np.fft.fft2(phi.reshape(5, x.shape[0], 5, x.shape[1]).sum((0, 2)))
    wavelets = [(j, t) for j in range(J) for t in range(L)]
    psi = {(j, t): wavelet_by_definition(x.shape, j, t, L) for j, t in wavelets}

    def average(u, j):
        step = 2 ** (J - j)
        return convolve(u, phi).real[::step, ::step][1:-1, 1:-1]

    first = {(j, t): np.abs(convolve(x, psi[j, t]))[:: 2**j, :: 2**j] for j, t in wavelets}
    features = [average(x, 0), *(average(first[j, t], j) for j, t in wavelets)]
    for (j1, t1), (j2, t2) in itertools.product(wavelets, wavelets):
        if max_order == 2 and j2 > j1:
            step = 2 ** (j2 - j1)
            second = np.abs(convolve(first[j1, t1], psi[j2, t2]))[::step, ::step]
            features.append(average(second, j2))
    return np.stack(features)


@st.composite
def cases(draw):
    """A layer's arguments and the shape of images that it takes."""
    J = draw(st.integers(1, 3))
    size = st.integers(2**J, 2**J + 12)
    arguments = dict(
        J=J,
        L=draw(st.integers(1, 6)),
        max_order=draw(st.sampled_from([1, 2])),
        padding=draw(st.sampled_from(["reflect", "zeros"])),
    )
    return arguments, (draw(st.integers(1, 2)), draw(size), draw(size), draw(st.integers(1, 2)))


@given(cases())
@settings(max_examples=15)
def test_equals_the_definition(case):
    arguments, shape = case
    x = np.random.default_rng(0).normal(size=shape)
    layer = Scattering2D(**arguments, dtype="float64")
    wanted = np.stack(
        [np.concatenate([by_definition(c, **arguments) for c in np.moveaxis(i, -1, 0)]) for i in x]
    )
    got = layer(x)
    np.testing.assert_allclose(got, np.moveaxis(wanted, 1, -1), rtol=0, atol=1e-12)
    assert layer.compute_output_shape(shape) == got.shape
    assert got.shape[-1] == layer.num_paths * shape[-1]


KYMATIO_CASES = [
    dict(J=2, size=(32, 32)),
    dict(J=1, size=(9, 13)),
    dict(J=3, size=(29, 33)),
    dict(J=4, size=(40, 35), L=4),
    dict(J=2, size=(17, 20), L=5, max_order=1),
    dict(J=2, size=(4, 5)),
    dict(J=2, size=(20, 20), L=16),
    dict(J=1, size=(2, 2), L=1),
]


@pytest.mark.parametrize("case", KYMATIO_CASES, ids=str)
def test_equals_kymatio(case):
    size, arguments = case["size"], {k: v for k, v in case.items() if k != "size"}
    x = images(2, *size, 3)
    np.testing.assert_allclose(
        Scattering2D(**arguments)(x), kymatio(x, **arguments), rtol=1e-5, atol=1e-6
    )


@pytest.mark.planted("a fault in the wavelets")
@pytest.mark.parametrize(
    "name, wrong",
    [
        ("_PI", lambda right: math.pi),
        ("_SIGMA", lambda right: 0.81),
        ("_FREQUENCY", lambda right: right * 1.001),
        ("wavelets", lambda right: lambda *a: right(*a)[::-1]),
        ("wavelets", lambda right: lambda *a: np.roll(right(*a), 1, axis=0)),
        ("wavelets", lambda right: lambda *a: np.swapaxes(right(*a), 1, 2)),
        ("low_pass", lambda right: lambda *a: np.roll(right(*a), 1, axis=0)),
        ("at_resolution", lambda right: lambda s, r, **k: np.roll(right(s, r, **k), 1)),
    ],
)
def test_a_planted_fault_is_seen(monkeypatch, name, wrong):
    x = images(2, 16, 16, 1)
    monkeypatch.setattr(scattering2d, name, wrong(getattr(scattering2d, name)))
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(Scattering2D(2)(x), kymatio(x, 2), rtol=1e-5, atol=1e-6)


def test_the_features_of_small_digits_on_black():
    digits = images(3, 8, 8, 1)
    enlarged = tf.image.resize(digits, (16, 16)).numpy()
    features = Scattering2D(J=2, L=8, padding="zeros")(enlarged)
    assert features.shape == (3, 4, 4, 81) and math.prod(features.shape[1:]) == 1296
    # Kymatio's size is that without the margin of 2**J, which is here already.
    padded = np.pad(enlarged[..., 0], ((0, 0), (4, 4), (4, 4)))
    wanted = kymatio_scattering.Scattering2D(2, (16, 16), pre_pad=True)(padded)
    np.testing.assert_allclose(features, np.moveaxis(wanted, 1, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("J, L, max_order", [(1, 3, 2), (2, 8, 2), (3, 2, 2), (3, 4, 1)])
def test_paths_say_what_each_channel_is(J, L, max_order):
    layer = Scattering2D(J, L, max_order)
    transform = kymatio_scattering.Scattering2D(J, (8, 8), L, max_order, out_type="list")
    theirs = [(path["j"], path["theta"]) for path in transform(np.zeros((1, 8, 8), "float32"))]
    assert [(path.scales, path.angles) for path in layer.paths] == theirs
    assert all(path.order == len(path.scales) for path in layer.paths)
    pairs = L**2 * J * (J - 1) // 2 if max_order == 2 else 0
    assert layer.num_paths == len(theirs) == 1 + J * L + pairs


def test_a_wave_is_seen_by_the_wavelet_of_its_direction_and_scale():
    layer = Scattering2D(3, 8, 1)
    for j, t in [(0, 0), (1, 3), (2, 5)]:
        turn = (3 - t) * math.pi / 8
        y, x = np.mgrid[:64, :64]
        wave = np.cos(0.75 * math.pi / 2**j * (y * math.cos(turn) + x * math.sin(turn)))
        features = layer(wave[None, ..., None])[0, 4, 4]
        assert layer.paths[1 + np.argmax(features[1:])] == (1, (j,), (t,))


def test_colours_stay_apart_and_in_order():
    x = images(2, 9, 8, 3)
    layer = Scattering2D(1, 4)
    alone = Scattering2D(1, 4)
    features = layer(x).numpy()
    for c in range(3):
        own = features[..., c * layer.num_paths : (c + 1) * layer.num_paths]
        np.testing.assert_allclose(own, alone(x[..., c : c + 1]), atol=1e-7)


def test_channels_first_is_the_same_transposed():
    x = images(2, 9, 12, 3)
    last = Scattering2D(2, 3)(x)
    layer = Scattering2D(2, 3, data_format="channels_first")
    first = layer(np.moveaxis(x, -1, 1))
    np.testing.assert_allclose(np.moveaxis(first, 1, -1), last, atol=1e-7)
    assert layer.compute_output_shape((None, 3, 9, 12)) == (None, *first.shape[1:])


def features_and_gradient(layer):
    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            features = layer(x)
            loss = tf.reduce_sum(features**2)
        return features, tape.gradient(loss, x)

    return call


@pytest.mark.parametrize(
    "batch, rows_at_a_time, jit_compile",
    [(None, 5, False), slow(7, 5, True), slow(None, None, True)],
)
def test_graphs_and_parts_of_a_batch_equal_the_whole(jit_compile, rows_at_a_time, batch):
    x = images(7, 12, 9, 2)
    layer = Scattering2D(2, 3)
    features, gradient = features_and_gradient(layer)(tf.constant(x))
    if rows_at_a_time is not None:
        layer._rows_at_a_time = rows_at_a_time
    traced = tf.function(
        features_and_gradient(layer),
        jit_compile=jit_compile,
        autograph=False,
        input_signature=[tf.TensorSpec([batch, 12, 9, 2])],
    )
    got = traced(x)
    np.testing.assert_allclose(got[0], features, atol=1e-6)
    np.testing.assert_allclose(got[1], gradient, atol=1e-6)
    assert traced.get_concrete_function().output_shapes[0] == [batch, 3, 2, 2 * layer.num_paths]


@pytest.mark.parametrize("padding", ["reflect", "zeros"])
def test_no_images_give_no_features(padding):
    assert Scattering2D(2, 3, padding=padding)(np.zeros((0, 8, 8, 1))).shape == (0, 2, 2, 16)


def test_memory_does_not_grow_with_the_batch():
    layer = Scattering2D(2)
    traced = tf.function(layer, autograph=False, jit_compile=True)
    text = traced.experimental_get_compiler_ir(tf.zeros((1000, 32, 32, 3)))(stage="optimized_hlo")
    sizes = {
        math.prod(map(int, dimensions.split(","))) * {"f32": 4, "c64": 8}[dtype]
        for dtype, dimensions in re.findall(r"\b(f32|c64)\[([\d,]+)\]", text)
    }
    # The last moduli of all images would be 614 MB, the features are 62 MB.
    assert 60e6 < max(sizes) < 100e6


def test_gradient_is_the_derivative():
    x = images(1, 8, 8, 1).astype("float64")
    layer = Scattering2D(2, 3, dtype="float64")
    weights = np.random.default_rng(1).normal(size=layer(x).shape)
    analytic, numeric = tf.test.compute_gradient(
        lambda v: tf.reduce_sum(layer(v) * weights), [x], delta=1e-5
    )
    np.testing.assert_allclose(analytic[0], numeric[0], atol=1e-8)


@pytest.mark.parametrize("jit_compile", [False, slow(True)])
def test_black_has_features_of_zero_and_a_finite_gradient(jit_compile):
    x = images(2, 8, 8, 1)
    x[0] = 0.0
    call = tf.function(features_and_gradient(Scattering2D(2)), jit_compile=jit_compile)
    features, gradient = call(x)
    np.testing.assert_allclose(features[0], 0.0, atol=1e-15)
    np.testing.assert_allclose(gradient[0], 0.0, atol=1e-15)
    assert np.all(np.isfinite(gradient)) and np.abs(gradient[1]).max() > 0.01


def test_features_keep_float32_under_a_policy_of_16_bits():
    x = images(2, 16, 16, 1)
    wanted = Scattering2D(2)(x).numpy()
    for policy, step in [("mixed_float16", 2**-11), ("mixed_bfloat16", 2**-8)]:
        features = Scattering2D(2, dtype=policy)(x)
        assert features.dtype == policy.removeprefix("mixed_")
        # Only the result is rounded.
        np.testing.assert_allclose(tf.cast(features, "float32"), wanted, rtol=step, atol=1e-7)


def test_bytes_are_taken_as_numbers():
    x = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), "uint8")
    np.testing.assert_array_equal(Scattering2D(2)(x), Scattering2D(2)(x.astype("float32")))


def test_survives_saving_without_weights(tmp_path):
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), Scattering2D(2, 3, padding="zeros"), keras.layers.Dense(2)]
    )
    assert model.layers[0].weights == [] and model.layers[0].count_params() == 0
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    x = images(2, 8, 8, 1)
    np.testing.assert_array_equal(restored(x), model(x))
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), model(x), atol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(J=0), "`J` must be a positive integer. Received: J=0. Use 2"),
        (dict(J=1.5), "`J` must be a positive integer. Received: J=1.5"),
        (dict(J=2, L=0), "`L` must be a positive integer. Received: L=0. Use 8"),
        (dict(J=2, max_order=3), r"`max_order` must be one of \[1, 2\]. Received: max_order=3"),
        (dict(J=2, padding="same"), "`padding` must be one of .*Received: padding='same'"),
        (dict(J=2, data_format="last"), "`data_format` must be one of .*data_format='last'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scattering2D(**arguments)


@pytest.mark.parametrize(
    "shape, message",
    [
        ((None, 8, 7, 1), r"`J` must be .*7 pixels here. Received: J=3. Use J=2."),
        ((None, 8, 1, 1), r"has 1 pixels here. Received: J=3. Use larger images."),
        ((None, None, 8, 1), r"`input_shape` must .*known height.*\(None, None, 8, 1\). Use, e.g."),
        ((None, 8, 8, None), r"`input_shape` must .*Received: input_shape=\(None, 8, 8, None\)"),
        ((None, 8, 8), r"`input_shape` must have four axes.*\(None, 8, 8\)"),
    ],
)
def test_unfit_images_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        Scattering2D(3).build(shape)


def test_images_of_another_size_are_refused():
    layer = Scattering2D(2)
    layer(np.zeros((1, 8, 8, 1)))
    with pytest.raises(ValueError, match="expected shape=.*8, 8, 1.*found shape=.*8, 12, 1"):
        layer(np.zeros((1, 8, 12, 1)))


def classifier(*first):
    return [*first, Scattering2D(2, 3), keras.layers.Flatten(), keras.layers.Dense(3)]


@pytest.mark.parametrize("mode", ["chosen", slow("whole")])
def test_per_example_gradients_before_and_after_it(mode):
    model = keras.Sequential([keras.Input((8, 8, 1)), *classifier(keras.layers.Conv2D(2, 3))])
    # The convolution leaves 6x6 pixels.
    y = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    assert_matches_batches_of_one(model, images(5, 8, 8, 1), y, mode=mode)


@pytest.mark.slow
def test_a_private_step_trains_what_comes_after_it():
    x, y = images(16, 8, 8, 1), np.arange(16) % 3
    plan = tfdpx.PrivacyPlan(16, 8, 2, noise_multiplier=1.0, delta=1e-3)
    model = small.model(tfdpx.DPSGD(1.0, plan=plan, l2_norm_clip=1.0, seed=0), classifier)
    model.build((None, 8, 8, 1))
    before = small.weights(model)
    model.fit(plan.batches(x, y, seed=0), verbose=0)
    assert len(model.trainable_variables) == 2
    after = small.weights(model)
    assert np.all(np.isfinite(after)) and np.abs(after - before).max() > 0
    assert model.optimizer.ledger.steps == 2


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
def test_a_private_step_clips_the_gradient_of_each_example():
    x, y = images(4, 8, 8, 1), np.arange(4) % 3
    clip = 0.1
    model = small.model(
        layers=classifier, batch_size=4, noise_multiplier=0.0, l2_norm_clip=clip, seed=0
    )
    change = small.step(model, x, y)
    reference = small.model(layers=classifier, optimizer=keras.optimizers.SGD(1.0))
    reference.build((None, 8, 8, 1))
    total = 0.0
    for i in range(4):
        start = reference.get_weights()
        gradient = -small.step(reference, x[i : i + 1], y[i : i + 1])
        reference.set_weights(start)
        total = total + gradient / max(np.linalg.norm(gradient), clip)
    np.testing.assert_allclose(change, -total / 4, rtol=1e-3, atol=1e-6)
