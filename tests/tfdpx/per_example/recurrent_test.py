"""Recurrent layers against batches of one: dropout, masks, dtypes, XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import slow
from oracle import assert_matches_batches_of_one, run_engine

from tfdpx.per_example import explain

layers = keras.layers
ROWS, LENGTH, FEATURES = 4, 4, 3


def data(rows=ROWS):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, LENGTH, FEATURES)).astype("float32")
    x[:, 2:] *= rng.uniform(size=(rows, 2, 1)) > 0.5
    x[0, 0] = 0.0
    return x, rng.normal(size=(rows, 2)).astype("float32")


def model_of(*parts, shape=(LENGTH, FEATURES), dtype=None):
    rng = np.random.default_rng(1)
    model = keras.Sequential([keras.Input(shape, dtype=dtype), *parts, layers.Dense(2)])
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.1, size=variable.shape))
    return model


def rules(model, x):
    model.compile(loss="mse") if not model.compiled else None
    return [choice.rule for choice in explain(model, x)][:-1]


def still(self, inputs, rate):
    """Replaces Keras's dropout masks by fixed ones for each gate, the same for all rows."""
    count = getattr(self, "dropout_mask_count", None)
    numbers = np.arange(inputs.shape[-1])
    masks = [
        tf.ones_like(inputs) * tf.cast((numbers + gate) % 3, inputs.dtype)
        for gate in range(count or 1)
    ]
    return masks[0] if count is None else masks


@pytest.mark.slow
def test_dropout(monkeypatch):
    owner = next(c for c in layers.LSTMCell.__mro__ if "_create_dropout_mask" in vars(c))
    monkeypatch.setattr(owner, "_create_dropout_mask", still)
    (x, y), inputs, both = data(), keras.Input((LENGTH, FEATURES)), {"recurrent_dropout": 0.5}
    parts = [
        layers.LSTM(3, dropout=0.5),
        layers.LSTM(2, dropout=0.5, **both),
        layers.GRU(2, dropout=0.5),
        layers.GRU(2, dropout=0.5, **both),
        layers.GRU(2, reset_after=False, **both),
        layers.SimpleRNN(3, dropout=0.5, **both),
        layers.RNN([layers.LSTMCell(3), layers.GRUCell(2, dropout=0.5)]),
    ]
    outputs = layers.Concatenate()([part(inputs) for part in parts])
    model = keras.Model(inputs, layers.Dense(2)(outputs))
    assert_matches_batches_of_one(model, x, y, views=2, norms=("ghost",))
    assert set(rules(model, x)) == {"RecurrentRule"}


@pytest.mark.parametrize("mode", ["chosen", slow("mapped")])
def test_each_row_draws_its_own_masks(mode):
    x, y = np.ones((ROWS, LENGTH, FEATURES), "float32"), np.ones((ROWS, 2), "float32")
    model = model_of(layers.LSTM(8, dropout=0.5, recurrent_dropout=0.5))
    model.compile(loss="mse")
    norms = run_engine(model, tf.constant(x), tf.constant(y), mode=mode)[0]
    assert len(np.unique(norms)) == ROWS


def with_states():
    """Returns a model that passes an encoder's states to a masked decoder, and returns states."""
    inputs = keras.Input((LENGTH, FEATURES))
    masked = layers.Masking()(inputs)
    _, h, c = layers.LSTM(3, return_state=True)(inputs)
    decoded = layers.LSTM(3, return_sequences=True)(masked, initial_state=[h, c])
    outputs = layers.Bidirectional(layers.GRU(2, return_state=True))(decoded)
    return keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(outputs)))


@pytest.mark.parametrize(
    "make, arguments",
    [
        slow(with_states, {"views": 2}),
        (lambda: model_of(layers.Masking(), layers.GRU(3)), {"jit_compile": True}),
        slow(lambda: model_of(layers.Masking(), layers.LSTM(3)), {"mode": "mapped", "views": 2}),
        (lambda: model_of(layers.LSTM(3), shape=(None, FEATURES)), {}),
        (
            lambda: model_of(layers.LSTM(3, unroll=True, dtype="mixed_bfloat16")),
            {"tolerance": 0.05},
        ),
        (lambda: model_of(layers.LSTM(3, dtype="float64"), dtype="float64"), {}),
    ],
    ids=["states", "xla", "mapped", "any length", "bfloat16", "float64"],
)
def test_models(make, arguments):
    model, (x, y) = make(), data()
    assert_matches_batches_of_one(model, x, y, norms=("auto",), **arguments)
    assert set(rules(model, x)) == {"RecurrentRule"}
