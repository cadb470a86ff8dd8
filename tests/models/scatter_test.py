"""ScatterLinear and ScatterCNN: what they compute, what trains, what they know of data."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx.layers import Scattering2D
from tfdpx.models import ScatterCNN, ScatterLinear
from tfdpx.models.on_features import default_scales
from tfdpx.synthetic import DeadLeaves


@pytest.fixture(scope="module")
def linear():
    return ScatterLinear(3, (8, 8, 1))


def test_features_are_the_recipe(linear):
    images = DeadLeaves(8, seed=1).images(4)
    large = tf.image.resize(images, (16, 16))
    x = np.sqrt(np.maximum(Scattering2D(2, padding="zeros")(large), 0.0))
    mean, matrix = (np.array(w) for w in linear.get_layer("whitening").weights)
    x = ((x - mean) @ matrix).reshape(4, -1)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x = np.concatenate([x, np.full((4, 1), 0.1)], axis=1) / np.sqrt(1.01)
    features = keras.Model(linear.input, linear.get_layer("unit_norm").output)
    found = features.predict(images, verbose=0)
    assert found.shape == (4, 4 * 4 * 81 + 1)
    np.testing.assert_allclose(found, x, atol=2e-5)


def test_only_the_dense_layer_trains_and_starts_at_zero(linear):
    assert [v.path.split("/")[-2:] for v in linear.trainable_variables] == [["logits", "kernel"]]
    assert not np.any(linear(DeadLeaves(8).images(2)))


def test_private_images_in_place_of_a_generator_are_refused():
    private = np.random.default_rng(0).uniform(size=(100, 8, 8, 1)).astype("float32")
    with pytest.raises(ValueError, match="must be a generator of tfdpx.synthetic"):
        ScatterLinear(3, (8, 8, 1), generator=private)


@pytest.mark.parametrize("side, scales", [(16, 2), (28, 2), (45, 2), (64, 3), (96, 4), (224, 5)])
def test_four_to_eleven_positions(side, scales):
    assert default_scales(side) == scales
    assert 4 <= side // 2**scales <= 11


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(num_classes=0), "Argument `num_classes` must be a positive integer"),
        (dict(input_shape=(None, 8, 1)), "Argument `input_shape` must give the height"),
        (dict(scales=9), "Argument `J` must be at most log2"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        ScatterLinear(**{"num_classes": 3, "input_shape": (8, 8, 1), **arguments})


def test_filters_must_fit_the_groups():
    with pytest.raises(ValueError, match="Argument `filters` must hold positive multiples"):
        ScatterCNN(3, (8, 8, 1), filters=(10,), groups=16)
