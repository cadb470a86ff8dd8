"""Keras' rematerialisation in a private step: the same result or an error, never a wrong one."""

import keras
import numpy as np
import pytest
import small

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


def change(recompute):
    def layers():
        return [keras.layers.Dense(8), Block(recompute), keras.layers.Dense(3)]

    return small.step(small.model(layers=layers), *small.data())


@pytest.mark.slow
def test_recomputed_layers_train_alike():
    np.testing.assert_allclose(change(True), change(False), rtol=1e-4, atol=1e-6)
