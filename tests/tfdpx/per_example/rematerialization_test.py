"""Keras' rematerialisation in a private step: the same result or an error, never a wrong one."""

import keras
import numpy as np
import oracle
import pytest
import small
from cases import slow

import tfdpx
from tfdpx.per_example import GenericRule, register

pytestmark = pytest.mark.skipif(
    not hasattr(keras, "RematScope"), reason="this Keras has no rematerialisation"
)


class Block(keras.layers.Layer):
    """Two dense layers whose activations are kept or recomputed."""

    def __init__(self, recompute):
        super().__init__()
        self.first, self.second = keras.layers.Dense(8, "relu"), keras.layers.Dense(8)
        self.recompute = recompute

    def build(self, shape):
        self.first.build(shape)
        self.second.build((None, 8))

    def call(self, x):
        def both(x):
            return self.second(self.first(x))

        return (keras.remat(both) if self.recompute else both)(x)


class UnitBlock(Block):
    """A `Block` that is captured as a whole."""


register(UnitBlock)(GenericRule)


def change(block, recompute, **arguments):
    def layers():
        return [keras.layers.Dense(8), block(recompute), keras.layers.Dense(3)]

    return small.step(small.model(layers=layers, **arguments), *small.data())


@pytest.fixture(scope="module")
def kept():
    return change(Block, False)


@pytest.mark.slow
@pytest.mark.parametrize("block", [Block, UnitBlock])
def test_recomputed_layers_train_alike(block, kept):
    np.testing.assert_allclose(change(block, True), kept, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, slow(True)])
@pytest.mark.slow
def test_a_scope_over_normalization_layers(jit_compile):
    inputs, names = keras.Input((8, 8, 3)), ["first_norm", "second_norm"]
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        x = keras.layers.Conv2D(4, 3)(inputs)
        x = tfdpx.layers.GroupNorm(2, name=names[0])(x)
        x = keras.layers.Conv2D(4, 3, activation="relu")(x)
        normalized = tfdpx.layers.GroupNorm(4, name=names[1])
        x = keras.layers.GlobalAveragePooling2D()(keras.layers.Activation("relu")(normalized(x)))
        recomputing = keras.Model(inputs, keras.layers.Dense(3)(x))
    assert normalized._remat_mode.mode == "list_of_layers"
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3, 8, 8, 3)).astype("float32"), np.array([0, 1, 2])
    recomputing.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    oracle.assert_matches_batches_of_one(
        recomputing, x, y, jit_compile=jit_compile, tolerance=1e-4, norms=("auto",)
    )
