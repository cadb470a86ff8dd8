"""SkipInit: what it computes, its per-example rule, saving."""

import keras
import numpy as np
import pytest
from oracle import assert_matches_batches_of_one

from tfdpx.layers import SkipInit
from tfdpx.per_example.rule import find_rules


def test_scales_by_a_constant_and_a_trainable_scalar():
    x = np.arange(12.0).reshape(2, 3, 2)
    layer = SkipInit(0.5)
    np.testing.assert_array_equal(layer(x), np.zeros_like(x))
    layer.gain.assign(3.0)
    np.testing.assert_allclose(layer(x), 1.5 * x)
    assert layer.count_params() == 1
    assert layer.compute_output_shape((None, 3, 2)) == (None, 3, 2)


@pytest.mark.parametrize(("shape", "views"), [((5,), 1), ((4, 3, 2), 3)])
def test_rule_matches_batches_of_one(shape, views):
    rng = np.random.default_rng(0)
    inputs = keras.Input(shape)
    x = SkipInit(0.2, keras.initializers.Constant(0.7))(keras.layers.Dense(3)(inputs))
    model = keras.Model(inputs, keras.layers.Flatten()(x))
    rows = 3 * views
    y = rng.normal(size=(rows, model.output_shape[-1])).astype("float32")
    assert find_rules(model.layers[2])[0][0].__name__ == "SkipInitRule"
    assert_matches_batches_of_one(
        model, rng.normal(size=(rows, *shape)).astype("float32"), y, views=views
    )


def test_a_scalar_that_is_used_twice():
    rng = np.random.default_rng(0)
    inputs = keras.Input((4,))
    layer = SkipInit(initializer="ones")
    model = keras.Model(inputs, layer(keras.ops.tanh(layer(inputs))))
    x, y = rng.normal(size=(2, 5, 4)).astype("float32")
    assert_matches_batches_of_one(model, x, y)
