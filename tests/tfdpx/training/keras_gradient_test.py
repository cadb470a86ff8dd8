"""Updates of unusual programs without noise are means of Keras's gradients of batches of one."""

import keras
import numpy as np
import oracle
import pytest
import seeds
import tensorflow as tf
from cases import slow_but
from keras import layers

import tfdpx
from tfdpx import checks
from tfdpx.per_example import rowwise

N, CLIP = 6, 1e4
RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(N, 4)).astype("float32")
NUMBERS = RNG.normal(size=(N, 1)).astype("float32")
SEQUENCES = RNG.normal(size=(N, 5, 4)).astype("float32")
IMAGES = RNG.normal(size=(N, 8, 8, 3)).astype("float32")
MASKS = RNG.integers(0, 2, (N, 8, 8, 1)).astype("float32")


def soft_dice(y, p):
    both, either = tf.reduce_sum(y * p, (1, 2)), tf.reduce_sum(y + p, (1, 2))
    return 1 - tf.reduce_mean((2 * both + 1) / (either + 1))


def listed_unet():
    inputs = keras.Input((8, 8, 3))
    hidden = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    return keras.Model([inputs], [layers.Conv2D(1, 1, activation="sigmoid")(hidden)])


class Capped(keras.Model):
    """A model with a weight that an activation reads."""

    def __init__(self):
        super().__init__()
        self.hidden, self.end = layers.Dense(4, activation=self.cap), layers.Dense(1)
        self.height = self.add_weight(name="height", shape=(), initializer="ones")

    def cap(self, x):
        return self.height * tf.tanh(x / self.height)

    def call(self, inputs):
        return self.end(self.hidden(inputs))


def reading_its_own_kernel():
    layer = layers.Dense(4)
    layer.activation = lambda x: x + tf.reduce_sum(tf.square(layer.kernel)) * tf.tanh(x)
    return keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])


def reading_another_kernel():
    first = layers.Dense(4)
    second = layers.Dense(4, activation=lambda x: x * tf.reduce_sum(first.kernel))
    return keras.Sequential([keras.Input((4,)), first, second, layers.Dense(1)])


def lora_with_a_trained_kernel():
    dense = layers.Dense(4, "relu")
    model = keras.Sequential([keras.Input((4,)), dense, layers.Dense(1)])
    dense.enable_lora(2)
    dense.trainable = False
    dense.trainable = True  # The kernel too.
    return model


def lora_table():
    table = layers.Embedding(7, 3)
    model = keras.Sequential([keras.Input((5,)), table, layers.Flatten(), layers.Dense(1)])
    table.enable_lora(2)
    table.trainable = False
    table.trainable = True
    return model


class Pointer(keras.Model):
    """Adds up a sequence from the place to which an example points."""

    def __init__(self, size=-1):
        super().__init__()
        self.dense, self.size = layers.Dense(3), size

    def call(self, inputs):
        place = tf.argmax(inputs[0, :, 0])
        return tf.reduce_sum(tf.slice(self.dense(inputs), [0, place, 0], [-1, self.size, -1]), 1)


class Force(keras.Model):
    """An energy and its derivative."""

    def __init__(self):
        super().__init__()
        self.hidden, self.end = layers.Dense(8, "tanh"), layers.Dense(1)

    def call(self, inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            energy = self.end(self.hidden(inputs))
        return tf.concat([energy, -tape.gradient(energy, inputs)], -1)


class PenalizedKernel(keras.Model):
    """A loss that reads the kernel of a layer with tensors that microbatches share."""

    def __init__(self):
        super().__init__()
        self.conv, self.end = tfdpx.layers.WSConv2D(2, 3), layers.Conv2D(1, 6)

    def call(self, inputs):
        return self.end(self.conv(inputs))[:, 0, 0]

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss + tf.reduce_sum(tf.square(self.conv.kernel))


class Unrolled(keras.layers.Layer):
    """A layer of a user with a recurrent layer inside, which XLA compiles without a loop."""

    def __init__(self):
        super().__init__()
        self.inner = layers.LSTM(3, unroll=True)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return self.inner(inputs)


def same_cell_twice():
    cell = layers.SimpleRNNCell(4)
    return keras.Sequential([keras.Input((5, 4)), layers.RNN([cell, cell]), layers.Dense(1)])


WORDS = RNG.integers(0, 7, (N, 5)).astype("int32")
# Model, loss, x, y.
CASES = {
    "a list of one output, a loss with axes": (listed_unet, soft_dice, IMAGES, MASKS),
    "a list of one output, Dice": (
        *(listed_unet, keras.losses.Dice(axis=(1, 2, 3)), IMAGES, MASKS),
    ),
    "an activation reads the model's weight": (Capped, "mse", VECTORS, NUMBERS),
    "an activation reads its layer's kernel": (reading_its_own_kernel, "mse", VECTORS, NUMBERS),
    "an activation reads another kernel": (reading_another_kernel, "mse", VECTORS, NUMBERS),
    "LoRA with a trained kernel": (lora_with_a_trained_kernel, "mse", VECTORS, NUMBERS),
    "LoRA with a trained table": (lora_table, "mse", WORDS, NUMBERS),
    "a slice of any length": (Pointer, "mse", SEQUENCES, VECTORS[:, :3]),
    "a slice of one length": (lambda: Pointer(1), "mse", SEQUENCES, VECTORS[:, :3]),
    "a derivative": (Force, "mse", VECTORS, SEQUENCES[:, 0, [0, 1, 2, 3, 0]]),
    "a loss reads a standardized kernel": (PenalizedKernel, "mse", IMAGES, NUMBERS),
    "a cell twice": (same_cell_twice, "mse", SEQUENCES, NUMBERS),
}
FAST = ("a list of one output, a loss with axes", "an activation reads the model's weight")


@pytest.mark.parametrize("name", slow_but(CASES, *FAST))
def test_update_is_the_mean_of_keras_gradients(name):
    make, loss, x, y = CASES[name]
    seeds.fix(3)
    model = make()
    model(x[:1])
    model.compile("sgd", loss)
    model.evaluate(x, y, verbose=0)  # Keras itself builds the loss.
    wanted = oracle.batch_of_one_gradients(model, *map(tf.constant, (x, y)), None, 1).mean(axis=0)
    optimizer = tfdpx.DPSGD(CLIP, batch_size=N, noise_multiplier=0.0, l2_norm_clip=CLIP)
    model.compile(optimizer, loss)
    before = oracle.flatten(model, oracle.values(model))
    model.fit(x, y, batch_size=N, verbose=0)
    update = before - oracle.flatten(model, oracle.values(model))
    np.testing.assert_allclose(update, wanted, atol=1e-4 * np.linalg.norm(wanted))


@pytest.mark.slow
def test_an_unrolled_layer_in_a_layer_trains_under_xla():
    def trained(jit_compile):
        seeds.fix(3)
        model = keras.Sequential([keras.Input((5, 4)), Unrolled(), layers.Dense(1)])
        optimizer = tfdpx.DPSGD(1.0, batch_size=N, noise_multiplier=0.0, l2_norm_clip=1.0)
        model.compile(optimizer, "mse", jit_compile=jit_compile)
        model.fit(SEQUENCES, NUMBERS, batch_size=N, verbose=0)
        return oracle.flatten(model, oracle.values(model))

    np.testing.assert_allclose(trained(True), trained(False), atol=1e-5)


def test_a_class_with_another_call_is_mapped(monkeypatch):
    model = keras.Sequential([keras.Input((4,)), layers.Activation("relu"), layers.Dense(1)])
    assert rowwise.find_obstacle(model) is None
    monkeypatch.setattr(layers.Activation, "call", lambda self, x: x - tf.reduce_mean(x, axis=0))
    assert "overrides `call`" in rowwise.find_obstacle(model)


def private_model(loss, end=4, **arguments):
    seeds.fix(3)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8, "relu"), layers.Dense(end)])
    arguments = {"batch_size": N, "noise_multiplier": 1.0, **arguments}
    model.compile(tfdpx.DPSGD(1.0, **arguments), loss)
    return model


def correlation(y, p):
    a, b = p[:, 0] - tf.reduce_mean(p[:, 0]), y[:, 0] - tf.reduce_mean(y[:, 0])
    return 1 - tf.reduce_sum(a * b) / (tf.norm(a) * tf.norm(b))


@pytest.mark.slow
def test_a_loss_over_the_batch_is_refused():
    for loss, y in ((correlation, NUMBERS), (keras.losses.Circle(), WORDS[:, 0])):
        with pytest.raises(checks.UnfitForPrivacy, match="compares examples"):
            private_model(loss).train_on_batch(VECTORS, y)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 1e-9])
def test_a_small_loss_is_no_loss_over_the_batch(scale):
    model = private_model(lambda y, p: scale * tf.square(y - p[:, :1]))
    model.train_on_batch(VECTORS, NUMBERS)
    assert model.optimizer.ledger.steps == 1


@pytest.mark.parametrize("eager", [False, True])
def test_stop_iteration_is_not_the_end_of_the_data(eager):
    model = private_model(lambda y, p: next(iter([])))
    model.run_eagerly = eager
    with pytest.raises(RuntimeError, match="StopIteration"):
        model.fit(VECTORS, NUMBERS, batch_size=N, verbose=0)


def test_examples_that_are_left_out_are_counted_at_the_end():
    x = VECTORS.copy()
    x[2, 1] = np.nan
    with pytest.warns(UserWarning, match="2 examples were left out.*private"):
        private_model("mse", end=1).fit(x, NUMBERS, batch_size=N, epochs=2, verbose=0)


def train_texts(mask_zero, *reduce, value=0):
    texts = [RNG.integers(1, 50, length).astype("int32") for length in (3, 4, 60, 5, 3, 4)]
    data = tf.data.Dataset.from_generator(
        lambda: ((text, NUMBERS[0]) for text in texts),
        output_signature=(tf.TensorSpec([None], "int32"), tf.TensorSpec([1], "float32")),
    )
    padding = tf.constant(value, "int32"), tf.constant(0.0)
    data = data.padded_batch(N, padding_values=padding).prefetch(1)
    table = layers.Embedding(50, 6, mask_zero=mask_zero)
    model = keras.Sequential([keras.Input((None,)), table, *reduce, layers.Dense(1)])
    plan = tfdpx.PrivacyPlan(
        num_examples=N, batch_size=N, steps=1, noise_multiplier=1.0, delta=1e-3
    )
    model.compile(tfdpx.DPSGD(1.0, plan=plan), "mse")
    budget = tfdpx.PrivacyBudget(plan, allow_approximate=True)
    model.fit(data, verbose=0, callbacks=[budget])
    return model.optimizer.ledger.steps


def test_padding_that_counts_is_refused():
    with pytest.raises(checks.UnfitForPrivacy, match="padded further"):
        train_texts(False, layers.GlobalAveragePooling1D())


@pytest.mark.slow
def test_padding_is_the_data_sets_own():
    assert train_texts(True, layers.GlobalAveragePooling1D()) == 1
    with pytest.raises(checks.UnfitForPrivacy, match="padded further"):
        train_texts(True, layers.GlobalAveragePooling1D(), value=1)
    with pytest.raises(checks.UnfitForPrivacy, match="padded further"):
        train_texts(False, layers.Conv1D(4, 3), layers.GlobalMaxPooling1D())
