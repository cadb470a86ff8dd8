"""ChannelWhitening against loops in float64, saving, and private training."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.layers import ChannelWhitening
from tfdpx.synthetic import DeadLeaves

COLOUR = DeadLeaves(6, 3, r_max=4)


def whitened_by_hand(adapted_on, inputs, regularization, exponent):
    """The definition, one example, position and pair of channels after the other, in float64."""
    channels = adapted_on.shape[-1]
    rows = np.asarray(adapted_on, "float64").reshape(len(adapted_on), -1, channels)
    mean = sum(rows) / len(rows)
    covariance = np.zeros([channels, channels])
    for row in rows:
        for position in range(rows.shape[1]):
            d = row[position] - mean[position]
            for i in range(channels):
                for j in range(channels):
                    covariance[i, j] += d[i] * d[j] / rows.shape[0] / rows.shape[1]
    values, vectors = np.linalg.eigh(covariance)
    values = values + regularization * np.mean(values)
    matrix = vectors @ np.diag(values**exponent) @ vectors.T
    flat = np.asarray(inputs, "float64").reshape(len(inputs), -1, channels)
    wanted = [[matrix @ (x - m) for x, m in zip(row, mean, strict=True)] for row in flat]
    return np.reshape(wanted, inputs.shape)


@settings(max_examples=15)
@given(
    shape=st.sampled_from([(4,), (5, 3), (2, 3, 4), (1, 1, 1)]),
    regularization=st.sampled_from([1e-3, 0.03, 1.0]),
    exponent=st.sampled_from([-0.5, -0.25, 0.0]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_equals_the_definition(shape, regularization, exponent, dtype):
    rng = np.random.default_rng(0)
    public = 100 + rng.normal(size=(20, *shape)) @ rng.normal(size=(shape[-1],) * 2)
    inputs = 100 + rng.normal(size=(4, *shape))
    layer = ChannelWhitening(regularization, exponent, dtype=dtype)
    layer.adapt(public, public=True, batch_size=7)
    wanted = whitened_by_hand(public, inputs, regularization, exponent)
    tolerance = 1e-4 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(layer(inputs), wanted, atol=tolerance * np.abs(wanted).max())
    assert layer.mean.dtype == layer.matrix.dtype == dtype


def model_with_whitening():
    layers = [
        keras.Input((6, 6, 3)),
        keras.layers.AveragePooling2D(2, name="pool"),
        ChannelWhitening(0.1, name="whiten"),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    return keras.Sequential(layers)


def test_a_model_is_built_first_and_adapted_afterwards():
    model = model_with_whitening()
    images = COLOUR.images(4)
    for call in (model, tf.function(model), model.predict):
        with pytest.raises(ValueError, match="'whiten' has no statistics yet. Call adapt"):
            call(images)
    whiten = model.get_layer("whiten")
    whiten.adapt(COLOUR, 100, model.get_layer("pool"))
    np.testing.assert_allclose(model.predict(images, verbose=0), model(images), atol=1e-5)
    before = whiten(model.get_layer("pool")(images)).numpy()
    whiten.trainable = not whiten.trainable
    np.testing.assert_array_equal(whiten(model.get_layer("pool")(images)), before)
    whiten.trainable = True
    assert whiten.trainable_weights == [] and len(whiten.non_trainable_weights) == 2


def test_trains_privately_on_adapted_features():
    layer = ChannelWhitening()
    layer.adapt(COLOUR, 100)
    statistics = [np.array(weight) for weight in layer.weights]
    model = small.model(layers=[layer, keras.layers.Flatten(), keras.layers.Dense(3)])
    labels = np.arange(16) % 3
    assert np.all(small.step(model, COLOUR.images(16), labels) != 0)
    for weight, before in zip(layer.weights, statistics, strict=True):
        np.testing.assert_array_equal(weight, before)


def test_private_training_without_statistics_is_refused():
    model = small.model(layers=model_with_whitening().layers)
    with pytest.raises(ValueError, match="'whiten' has no statistics yet"):
        model.train_on_batch(COLOUR.images(16), np.arange(16) % 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"regularization": 0}, "`regularization` must be a positive.*=0. Use 0.03"),
        ({"regularization": np.inf}, "`regularization`"),
        ({"exponent": 0.5}, "`exponent` must be a number from -1 to 0.*=0.5. Use -0.5"),
    ],
)
def test_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChannelWhitening(**arguments)
    with pytest.raises(ValueError, match=r"'whiten' needs .*\(None, None, 3\). Give keras.Input"):
        ChannelWhitening(name="whiten")(keras.Input((None, 3)))
