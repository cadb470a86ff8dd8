"""replace_batch_norm on functional, Sequential, nested and unfit models."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.layers import GroupNorm, replace_batch_norm


def layers_of(model, layer_class):
    return [layer for layer in model._flatten_layers() if isinstance(layer, layer_class)]


def randomize(model):
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.uniform(0.5, 1.5, size=weight.shape))


def small_functional():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(12, 3, name="conv")(inputs)
    x = keras.layers.BatchNormalization(
        axis=3, epsilon=0.01, center=False, gamma_regularizer="l2", name="norm"
    )(x)
    x = keras.layers.BatchNormalization(scale=False, trainable=False, name="frozen_norm")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="dense")(x), name="small")


def test_keeps_arguments_and_weights_and_the_original():
    model = small_functional()
    randomize(model)
    before = [np.array(weight) for weight in model.weights]
    replaced = replace_batch_norm(model, groups=8)
    norm, frozen = replaced.get_layer("norm"), replaced.get_layer("frozen_norm")
    assert (norm.groups, norm.axis, norm.epsilon, norm.center, norm.scale) == (6, 3, 0.01, False, 1)
    assert isinstance(norm.gamma_regularizer, keras.regularizers.L2)
    assert (frozen.scale, frozen.trainable) == (False, False)
    remaining = [w for w in model.weights if "moving" not in w.path]
    for weight, wanted in zip(replaced.weights, remaining, strict=True):
        np.testing.assert_array_equal(weight, wanted)
    assert layers_of(model, GroupNorm) == []
    replaced.get_layer("conv").kernel.assign_add(replaced.get_layer("conv").kernel)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight, value)


@settings(max_examples=10)
@given(st.integers(1, 40), st.integers(1, 40))
def test_groups_are_the_largest_fitting_divisor(channels, groups):
    model = keras.Sequential([keras.Input((channels,)), keras.layers.BatchNormalization()])
    chosen = replace_batch_norm(model, groups).layers[0].groups
    assert chosen <= groups
    assert channels % chosen == 0
    assert not any(channels % larger == 0 for larger in range(chosen + 1, groups + 1))


def test_nested_models_and_channels_first():
    inputs, inner_inputs = keras.Input((4, 6, 6)), keras.Input((4, 6, 6))
    norm = keras.layers.BatchNormalization(axis=1, name="norm")
    nested = keras.Sequential([keras.Input((4, 6, 6)), norm], name="nested")
    inner = keras.Model(inner_inputs, keras.layers.BatchNormalization(axis=1)(inner_inputs))
    model = keras.Model(inputs, inner(nested(inputs)))
    randomize(model)
    replaced = replace_batch_norm(model, groups=2)
    assert [(layer.groups, layer.axis) for layer in layers_of(replaced, GroupNorm)] == [(2, 1)] * 2
    assert layers_of(replaced, keras.layers.BatchNormalization) == []
    np.testing.assert_array_equal(replaced.get_layer("nested").get_layer("norm").gamma, norm.gamma)
    assert replaced(np.ones((2, 4, 6, 6))).shape == (2, 4, 6, 6)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()


NORM = keras.layers.BatchNormalization(name="norm")


@pytest.mark.parametrize(
    ("make", "groups", "message"),
    [
        (Subclassed, 16, r"Functional or Sequential(?s:.)*functional API"),
        (lambda: keras.Sequential([NORM]), 16, "`model` must be built.*'norm'.*keras.Input"),
        (
            lambda: keras.Sequential([keras.Input((5, 3)), keras.layers.TimeDistributed(NORM)]),
            *(16, "Layer '.*' of class TimeDistributed holds .*'norm'"),
        ),
        (small_functional, 2.5, "`groups` must be a positive integer. Received: groups="),
    ],
)
def test_errors(make, groups, message):
    with pytest.raises(ValueError, match=message):
        replace_batch_norm(make(), groups)
