"""ScatterLinear, ScatterCNN and LinearOnFeatures: their features, and their trainable weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx.layers import Scattering2D
from tfdpx.models import LinearOnFeatures, ScatterLinear, SmallCNN
from tfdpx.models.on_features import default_scales
from tfdpx.synthetic import DeadLeaves

IMAGES = DeadLeaves(8, seed=1).images(4)


def features_of(model, name="unit_norm"):
    return keras.Model(model.input, model.get_layer(name).output)


@pytest.fixture(scope="module")
def linear():
    return ScatterLinear(3, (8, 8, 1))


def unit_norm(rows, constant):
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.concatenate([rows, np.full((len(rows), 1), constant)], axis=1) / np.sqrt(1.01)


def test_scattering_features_are_the_recipe_and_only_the_dense_layer_trains(linear):
    x = np.sqrt(
        np.maximum(Scattering2D(2, padding="zeros")(tf.image.resize(IMAGES, (16, 16))), 0.0)
    )
    mean, matrix = (np.array(w) for w in linear.get_layer("whitening").weights)
    x = ((x - mean) @ matrix).reshape(4, -1)
    features = features_of(linear)(IMAGES)
    assert features.shape == (4, 4 * 4 * 81 + 1)
    np.testing.assert_allclose(features, unit_norm(x, 0.1), atol=2e-5)
    assert [v.path.split("/")[-2:] for v in linear.trainable_variables] == [["logits", "kernel"]]
    assert not np.any(linear(IMAGES))


@pytest.mark.slow
def test_each_kind_has_norm_one_and_none_is_trained(linear):
    kinds = [features_of(linear, "whitening"), SmallCNN(4, (8, 8, 1), groups=4)]
    model = LinearOnFeatures(3, (8, 8, 1), kinds)
    parts = [np.reshape(kind(IMAGES), (4, -1)) for kind in kinds]
    parts = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
    expected = unit_norm(np.concatenate(parts, axis=1), 0.1)
    np.testing.assert_allclose(features_of(model)(IMAGES), expected, atol=1e-5)
    assert [v.path for v in model.trainable_variables] == [model.layers[-1].kernel.path]
    assert not np.any(model(IMAGES))
    alone = LinearOnFeatures(3, (8, 8, 1), kinds[:1])
    np.testing.assert_allclose(features_of(alone)(IMAGES), features_of(linear)(IMAGES), atol=1e-6)


@pytest.mark.parametrize("side, scales", [(16, 2), (28, 2), (45, 2), (64, 3), (96, 4), (224, 5)])
def test_four_to_eleven_positions(side, scales):
    assert default_scales(side) == scales
    assert 4 <= side // 2**scales <= 11
