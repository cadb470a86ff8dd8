"""Scattering2D against Kymatio and the definition; graphs, gradients, errors, private training."""

import keras
import kymatio_scattering
import numpy as np
import pytest
import tensorflow as tf
from cases import slow
from oracle import assert_matches_batches_of_one

from tfdpx.layers import Scattering2D
from tfdpx.per_example import explain


def images(*shape, seed=0):
    return np.random.default_rng(seed).uniform(size=shape).astype("float32")


def kymatio(x, J, L=8, max_order=2):
    """Returns Kymatio's features `[..., channels * paths]` of [batch, height, width, channels]."""
    transform = kymatio_scattering.Scattering2D(J, x.shape[1:3], L, max_order)
    features = np.moveaxis(transform(np.ascontiguousarray(np.moveaxis(x, -1, 1))), (3, 4), (1, 2))
    return features.reshape(*features.shape[:3], -1)


KYMATIO_CASES = [
    dict(J=1, size=(9, 13)),
    dict(J=3, size=(29, 33)),
    dict(J=4, size=(40, 35), L=4),
    dict(J=2, size=(17, 20), L=5, max_order=1),
    dict(J=2, size=(4, 5)),
    dict(J=1, size=(2, 2), L=1),
]


@pytest.mark.parametrize("case", KYMATIO_CASES, ids=str)
def test_equals_kymatio(case):
    size, arguments = case["size"], {k: v for k, v in case.items() if k != "size"}
    x, layer = images(2, *size, 3), Scattering2D(**arguments)
    np.testing.assert_allclose(layer(x), kymatio(x, **arguments), rtol=1e-5, atol=1e-6)
    assert layer.compute_output_shape(x.shape) == layer(x).shape
    transposed = Scattering2D(**arguments, data_format="channels_first")
    first = transposed(np.moveaxis(x, -1, 1))
    np.testing.assert_allclose(np.moveaxis(first, 1, -1), layer(x), atol=1e-6)
    assert transposed.compute_output_shape((2, 3, *size)) == first.shape


def test_zeros_beyond_the_edge_are_kymatios_padding():
    x = images(3, 16, 16, 1)
    features = Scattering2D(J=2, L=8, padding="zeros")(x)
    # Kymatio is given the size without the margin of 2**J: these images contain the margin.
    padded = np.pad(x[..., 0], ((0, 0), (4, 4), (4, 4)))
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


def features_and_gradient(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        features = layer(x)
        loss = tf.reduce_sum(features**2)
    return features, tape.gradient(loss, x)


@pytest.mark.parametrize("jit_compile", [False, slow(True)])
def test_graphs_and_parts_of_a_batch_equal_the_whole(jit_compile):
    x, layer = tf.constant(images(7, 12, 9, 2)), Scattering2D(2, 3)
    whole = features_and_gradient(layer, x)
    if not jit_compile:
        layer._rows_at_a_time = 5
    traced = tf.function(features_and_gradient, jit_compile=jit_compile)
    for features, wanted in zip(traced(layer, x), whole, strict=True):
        np.testing.assert_allclose(features, wanted, atol=1e-6)


def test_gradients_are_derivatives_and_those_of_black_are_finite():
    x = images(1, 8, 8, 1).astype("float64")
    layer = Scattering2D(2, 3, dtype="float64")
    analytic, numeric = tf.test.compute_gradient(
        lambda v: tf.reduce_sum(layer(v) ** 2), [x], delta=1e-5
    )
    np.testing.assert_allclose(analytic[0], numeric[0], atol=1e-7)
    x = images(2, 8, 8, 1)
    x[0] = 0.0
    features, gradient = features_and_gradient(Scattering2D(2), tf.constant(x))
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


@pytest.mark.slow
def test_per_example_gradients_before_and_after_it():
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Conv2D(2, 3), Scattering2D(2, 3)]
    )
    model.add(keras.layers.Flatten())  # The convolution leaves 6x6 pixels.
    model.add(keras.layers.Dense(3))
    y = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    assert_matches_batches_of_one(model, images(5, 8, 8, 1), y, norms=("auto",))
    assert [c.rule for c in explain(model, images(5, 8, 8, 1))] == ["Conv2DRule", "DenseRule"]
