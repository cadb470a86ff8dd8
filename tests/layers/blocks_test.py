"""GroupNorm, SkipInit and UnitNormWithConstant: their definitions, and private gradients."""

import keras
import numpy as np
import pytest
import reference_ops
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_matches_batches_of_one, batch_of_one_gradients

from tfdpx.layers import GroupNorm, SkipInit, UnitNormWithConstant
from tfdpx.per_example import explain


@given(st.sampled_from([1, 3, 4, 16]), st.integers(1, 3), st.sampled_from([1e-5, 1e-3, 0.1]))
def test_group_norm_equals_the_definition(groups, width, epsilon):
    images = np.random.default_rng(0).normal(2.0, 3.0, size=(3, 4, 5, groups * width))
    # Sixteen groups are the default.
    layer = GroupNorm(*([] if groups == 16 else [groups]), epsilon=epsilon, dtype="float64")
    wanted = reference_ops.group_norm(images, groups, 1.0, 0.0, epsilon)
    np.testing.assert_allclose(layer(images), wanted, atol=1e-10)


@pytest.mark.parametrize(("shape", "views", "twice"), [((5,), 1, True), ((4, 3, 2), 3, False)])
def test_private_gradients_of_skip_init_are_those_of_batches_of_one(shape, views, twice):
    rng, inputs = np.random.default_rng(0), keras.Input(shape)
    layer = SkipInit(0.2, keras.initializers.Constant(0.7))
    x = layer(keras.layers.Dense(3)(inputs))
    x = layer(keras.ops.tanh(x)) if twice else x
    model = keras.Model(inputs, keras.layers.Flatten()(x))
    x, y = (
        rng.normal(size=(3 * views, *sizes)).astype("float32")
        for sizes in (shape, model.output_shape[1:])
    )
    assert_matches_batches_of_one(model, x, y, views=views)
    assert {c.rule for c in explain(model, x, views)} == {"SkipInitRule", "DenseRule"}


@given(
    shape=st.sampled_from([(1,), (7,), (2, 3), (2, 2, 3)]),
    constant=st.floats(1e-3, 10),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_unit_norm_equals_the_definition(shape, constant, dtype):
    inputs = np.random.default_rng(0).normal(size=(5, *shape))
    outputs = UnitNormWithConstant(constant, dtype=dtype)(inputs)
    rows = inputs.reshape(5, -1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.append(rows, np.full((5, 1), constant), axis=1)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(outputs, rows, atol=1e-6 if dtype == "float32" else 1e-14)


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


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e6])
def test_the_gradient_of_a_softmax_head_is_at_most_the_root_of_two(scale):
    head = keras.layers.Dense(5, use_bias=False)
    model = keras.Sequential([keras.Input((4, 3)), UnitNormWithConstant(), head])
    rng = np.random.default_rng(0)
    head.kernel.assign((0.1 if scale == 1.0 else 30.0) * rng.normal(size=head.kernel.shape))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = (scale * rng.normal(size=(40, 4, 3))).astype("float32")
    y = rng.integers(0, 5, 40)
    if scale == 1.0:
        assert_matches_batches_of_one(model, x, y)
        return
    gradients = batch_of_one_gradients(model, tf.constant(x), tf.constant(y), None, 1)
    # The bound is reached where a wrong class is certain.
    assert 1.3 < np.linalg.norm(gradients, axis=1).max() <= np.sqrt(2) * (1 + 1e-6)
