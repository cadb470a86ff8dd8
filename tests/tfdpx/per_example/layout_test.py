"""The layout of row-wise models: one trial run shows what two do."""

import keras
import pytest
import tensorflow as tf

from tfdpx.per_example import rowwise
from tfdpx.per_example.layout import find_layout

layers = keras.layers


def images():
    inputs = keras.Input((6, 6, 2))  # As many channels as the rows of a trial run.
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = layers.Add()([layers.Dropout(0.5)(layers.GroupNormalization(2)(x)), x])
    outputs = layers.Dense(2)(layers.Flatten()(layers.DepthwiseConv2D(2)(x)))
    return keras.Model(inputs, outputs), tf.zeros((1, 6, 6, 2))


def tokens():
    inputs = keras.Input((2,), dtype="int32")
    x = layers.Bidirectional(layers.GRU(3))(layers.Embedding(5, 4, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(2)(x)), tf.zeros((1, 2), "int32")


@pytest.mark.parametrize("make", [images, tokens])
def test_one_run_of_a_rowwise_model_shows_the_layout_that_two_runs_do(make):
    model, x = make()
    assert rowwise.find_obstacle(model) is None
    (one, work), (two, work_of_two) = (find_layout(model, x, flag) for flag in (True, False))
    assert len(one.calls) > 1 and all(call.is_captured for call in one.calls)
    assert one.calls == two.calls
    assert (one.whole, one.reason, work) == (two.whole, two.reason, work_of_two)
