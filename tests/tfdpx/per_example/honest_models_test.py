"""Unusual models that plain Keras trains: one private update of each."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import slow_but

import tfdpx

layers = keras.layers
ROWS = 6
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(ROWS, 4)).astype("float32")
IMAGES = RNG.normal(size=(ROWS, 6, 6, 3)).astype("float32")
SERIES = RNG.normal(size=(ROWS, 5, 3)).astype("float32")
TEXTS = tf.constant([["a b c"], ["b"], ["c c c c"]] * 2)
TOKENS = RNG.integers(0, 9, (ROWS, 5))


def functional(shape, apply, dtype=None):
    """Returns a model of one input with a last dense layer."""
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, layers.Dense(2)(apply(inputs)))


def stack(*parts):
    return keras.Sequential([*parts, layers.Dense(2)])


class FineTunes(keras.Model):
    """Keras's own pattern: statistics are constants, scale and offset train."""

    def __init__(self):
        super().__init__()
        self.base = keras.Sequential([layers.Dense(3), layers.BatchNormalization()])
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(self.base(x, training=False))


class PenalizesGradients(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x)
        return tf.reduce_mean((y - y_pred) ** 2) + tf.reduce_mean(tape.gradient(outputs, x) ** 2)


class Block(layers.Layer):
    """Adds weights around layers that use a mask and the training flag."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.drop = layers.SimpleRNN(4, dropout=0.3), layers.Dropout(0.5)

    def build(self, shape):
        self.scale = self.add_weight(shape=(4,))
        self.recurrent.build(shape)

    def call(self, x):
        return self.drop(self.recurrent(x)) * self.scale


def quantized_lora():
    table = layers.Embedding(9, 4)
    model = stack(keras.Input((5,), dtype="int32"), table, layers.Flatten())
    table.quantize("int4")
    table.enable_lora(2)
    return model


HONEST = {
    "random crop": (IMAGES, lambda: stack(
        keras.Input((6, 6, 3)), layers.Conv2D(3, 3, padding="same"), layers.RandomCrop(5, 5),
        layers.Flatten())),
    "fine-tuning": (VECTORS, FineTunes),
    "penalty on gradients": (VECTORS, lambda: PenalizesGradients([layers.Dense(2, "tanh")])),
    "words": (TEXTS, lambda: functional((1,), lambda x: layers.GlobalAveragePooling1D()(
        layers.Embedding(9, 3)(layers.TextVectorization(vocabulary=["a", "b"])(x))), "string")),
    "lora, int4": (TOKENS, quantized_lora),
    "masked block": (SERIES, lambda: stack(layers.Masking(), Block())),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(HONEST, "random crop", "penalty on gradients", "words"))
def test_it_trains(name):
    """The step itself compares the microbatch with batches of one, and refuses a difference."""
    x, make = HONEST[name]
    model, y = make(), np.zeros((ROWS, 2), "float32") + 0.5
    model.compile(tfdpx.DPSGD(0.1, batch_size=ROWS, noise_multiplier=1.0), "mse")
    model.fit(x, y, batch_size=ROWS, verbose=0)
    assert model.optimizer.ledger.steps == 1
