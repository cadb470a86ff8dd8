"""`gradient_norms` against ordinary gradients of batches of one."""

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf
from oracle import ALLOWANCE, batch_of_one_gradients

import tfdpx
from tfdpx import gradient_norms


class Mixing(keras.layers.Layer):
    """Subtracts the mean of the batch: no proof, and every example is zero in a batch of one."""

    def call(self, inputs):
        return inputs - 0.5 * keras.ops.mean(inputs, axis=0, keepdims=True)


def dense():
    return [keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]


def mixing():
    return [keras.layers.Dense(4), Mixing(), keras.layers.Dense(3)]


def compiled(layers, optimizer, shape):
    seeds.fix(3)
    model = keras.Sequential(layers())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    model.build([None, *shape])
    return model


def data(count, shape):
    generator = np.random.default_rng(count)
    x = generator.normal(size=[count, *shape]).astype("f4")
    return x, generator.integers(0, 3, count)


def assert_norms(norms, wanted):
    assert norms.dtype == np.float32 and norms.shape == wanted.shape
    np.testing.assert_allclose(norms, wanted, rtol=ALLOWANCE, atol=1e-6)


PRIVATE = {"batch_size": 4, "noise_multiplier": 1.0, "l2_norm_clip": 1e-3}


@pytest.mark.parametrize(
    "layers, shape, private",
    [(dense, [6], False), (mixing, [6], True)],
)
@pytest.mark.filterwarnings("ignore:Each example of model")
def test_norms_are_of_batches_of_one(layers, shape, private):
    model = compiled(layers, tfdpx.DPSGD(0.1, **PRIVATE) if private else "adam", shape)
    x, y = data(7, shape)  # The last batch is shorter.
    weights = np.linspace(0.0, 2.0, 7).astype("f4")
    before = model.get_weights()
    gradients = batch_of_one_gradients(model, *map(tf.constant, (x, y, weights)), 1)
    wanted = np.linalg.norm(gradients, axis=1)
    assert_norms(gradient_norms(model, x, y, weights, batch_size=3), wanted)
    for old, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, now)
    assert not model.metrics_variables or not any(v.numpy().any() for v in model.metrics_variables)


def test_norms_of_views_are_of_the_mean_gradient():
    one, y = data(5, [4])
    optimizer = tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0, augmult=2)
    model = compiled(lambda: [keras.layers.Dense(3)], optimizer, [4])
    x = np.stack([one, -one], axis=1)
    rows, labels = tf.constant(x.reshape(10, 4)), tf.constant(np.repeat(y, 2))
    gradients = batch_of_one_gradients(model, rows, labels, None, 2)
    wanted = np.linalg.norm(gradients, axis=1)
    assert_norms(gradient_norms(model, x, y, batch_size=2), wanted)


def test_unfit_arguments_are_refused():
    x, y = data(4, [6])
    with pytest.raises(ValueError, match="compiled with the loss.*model.compile"):
        gradient_norms(keras.Sequential([keras.layers.Dense(3)]), x, y)
    with pytest.raises(ValueError, match="batch_size=0"):
        gradient_norms(compiled(dense, "sgd", [6]), x, y, batch_size=0)
