"""Layers that loop: XLA cannot compile their loops by example, which is an error before a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdpx

layers = keras.layers
LENGTH, FEATURES, ROWS = 3, 2, 4


class Loops(layers.Layer):
    """A loop of TensorFlow in a layer that is on no list."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        kernel = tf.convert_to_tensor(self.kernel)
        return tf.while_loop(
            lambda step, _: step < 2,
            lambda step, state: (step + 1, tf.tanh(state @ kernel)),
            (tf.constant(0), x),
            maximum_iterations=2,
        )[1]


class LoopsInAFunction(Loops):
    """The loop is in a function of the graph."""

    def call(self, x):
        return tf.function(super().call, autograph=False)(x)


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, LENGTH, FEATURES)).astype("float32")
    return x, rng.normal(size=(ROWS, 1)).astype("float32")


def make_model(layer, jit_compile=True, **arguments):
    model = keras.Sequential(
        [keras.Input((LENGTH, FEATURES)), layer, layers.Flatten(), layers.Dense(1)]
    )
    optimizer = tfdpx.DPSGD(0.1, batch_size=ROWS, noise_multiplier=1.0, **arguments)
    model.compile(optimizer, "mse", jit_compile=jit_compile)
    return model


LOOPING = {
    "lstm": lambda: layers.LSTM(2, activation=lambda x: tf.tanh(x)),
    "in time": lambda: layers.TimeDistributed(Loops()),
    "own function": LoopsInAFunction,
}


@pytest.mark.parametrize("make", LOOPING.values(), ids=LOOPING)
def test_loops_under_xla_are_refused_before_the_first_step(make):
    layer = make()
    model = make_model(layer)
    with pytest.raises(ValueError, match=f"Model '{model.name}'.*jit_compile=False.*unroll=True"):
        model.train_on_batch(*data())
    assert int(model.optimizer.iterations) == 0


def test_fit_refuses_them_where_keras_chose_to_compile(monkeypatch):
    devices = tf.config.list_physical_devices()
    accelerator = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    layer = LoopsInAFunction()
    with monkeypatch.context() as patched:
        patched.setattr(
            tf.config, "list_physical_devices", lambda kind=None: [*devices, accelerator]
        )
        model = make_model(layer, jit_compile="auto")
        assert model.jit_compile is True
    with pytest.raises(ValueError, match=f"Model '{model.name}'.*jit_compile=False"):
        model.fit(*data(), verbose=0)
    plan = tfdpx.PrivacyPlan(ROWS, batch_size=ROWS, steps=2, noise_multiplier=1.0, delta=1e-3)
    with pytest.raises(ValueError, match="jit_compile=False"):
        tfdpx.distributed.fit(model, plan, *data(), verbose=0)
    assert int(model.optimizer.iterations) == 0
