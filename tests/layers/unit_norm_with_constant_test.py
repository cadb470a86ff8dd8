"""UnitNormWithConstant: norms of one, the bounded gradient that it is for, and its edges."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_matches_batches_of_one, batch_of_one_gradients

from tfdpx.layers import UnitNormWithConstant


def rows_by_hand(inputs, constant):
    rows = []
    for row in np.asarray(inputs, "float64").reshape(len(inputs), -1):
        row = row / max(np.linalg.norm(row), 1e-300)
        row = np.append(row, constant)
        rows.append(row / np.linalg.norm(row))
    return np.array(rows)


@given(
    shape=st.sampled_from([(1,), (7,), (2, 3), (2, 2, 3)]),
    constant=st.floats(1e-3, 10),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_equals_the_definition(shape, constant, dtype):
    inputs = np.random.default_rng(0).normal(size=(5, *shape))
    outputs = UnitNormWithConstant(constant, dtype=dtype)(inputs)
    tolerance = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(outputs, rows_by_hand(inputs, constant), atol=tolerance)
    composed = keras.layers.UnitNormalization()(inputs.reshape(5, -1))
    composed = np.append(composed, np.full((5, 1), constant), axis=1)
    composed = keras.layers.UnitNormalization()(composed)
    np.testing.assert_allclose(outputs, composed, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0, 1e-42, 1e-18, 1, 1e37])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_norms_are_one_at_every_scale(scale, jit_compile):
    inputs = scale * np.random.default_rng(0).uniform(-1, 1, size=(6, 500))
    layer = tf.function(UnitNormWithConstant(), jit_compile=jit_compile)
    outputs = layer(tf.constant(inputs, "float32")).numpy()
    np.testing.assert_allclose(np.linalg.norm(outputs, axis=1), 1, atol=1e-6)
    if 1e-30 < scale:
        np.testing.assert_allclose(outputs[:, -1], 0.1 / np.sqrt(1.01), rtol=1e-5)


def test_a_row_of_zeros_is_the_constant_with_finite_gradients():
    inputs = tf.Variable([[0.0, 0.0], [0.0, 5.0], [-3.0, 4.0]])
    with tf.GradientTape() as tape:
        outputs = UnitNormWithConstant()(inputs)
        total = tf.reduce_sum(outputs[:, 0])
    np.testing.assert_array_equal(outputs[0], [0, 0, 1])
    gradient = np.asarray(tape.gradient(total, inputs))
    # Across the direction of a row the unit vector turns by 1 / norm, along it not at all.
    wanted = np.array([[1 / 5, 0], [16 / 125, 12 / 125]]) / np.sqrt(1.01)
    np.testing.assert_allclose(gradient[1:], wanted, atol=1e-6)
    assert np.isfinite(gradient).all()


def model_with_head(weight=30.0):
    model = keras.Sequential(
        [keras.Input((4, 3)), UnitNormWithConstant(), keras.layers.Dense(5, use_bias=False)]
    )
    kernel = model.layers[-1].kernel
    kernel.assign(weight * np.random.default_rng(1).normal(size=kernel.shape))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("scale", [0.0, 1e6])
def test_the_gradient_of_a_softmax_head_is_at_most_the_root_of_two(scale):
    rng = np.random.default_rng(0)
    x = (scale * rng.normal(size=(40, 4, 3))).astype("float32")
    gradients = batch_of_one_gradients(
        model_with_head(), tf.constant(x), tf.constant(rng.integers(0, 5, 40)), None, 1
    )
    norms = np.linalg.norm(gradients, axis=1)
    # The bound is reached where a wrong class is certain.
    assert 1.3 < norms.max() <= np.sqrt(2) * (1 + 1e-6)


def test_trains_privately():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 4, 3)).astype("float32"), rng.integers(0, 5, 16)
    assert_matches_batches_of_one(model_with_head(0.1), x, y)
    stack = [UnitNormWithConstant(), keras.layers.Dense(5, use_bias=False)]
    assert np.all(small.step(small.model(layers=stack), x, y) != 0)


def test_what_is_refused():
    for constant in (0, np.inf, "0.1"):
        with pytest.raises(ValueError, match="`constant` must be a positive, finite.* Use 0.1"):
            UnitNormWithConstant(constant)
    with pytest.raises(ValueError, match=r"'unit' needs .*\(None, None, 3\). Give keras.Input"):
        UnitNormWithConstant(name="unit")(keras.Input((None, 3)))
