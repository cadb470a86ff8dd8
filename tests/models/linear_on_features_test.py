"""Several kinds of fixed features, each of norm one, under one linear classifier."""

import keras
import numpy as np
import pytest

from tfdpx.models import LinearOnFeatures, ScatterLinear, SmallCNN

IMAGES = np.random.default_rng(0).random([5, 8, 8, 1], np.float32)


def features_of(model, name):
    return keras.Model(model.input, model.get_layer(name).output)


@pytest.fixture(scope="module")
def scatter():
    return ScatterLinear(3, (8, 8, 1))


def extractors(scatter):
    network = SmallCNN(num_classes=4, input_shape=(8, 8, 1), groups=4)
    return [features_of(scatter, "whitening"), network]


@pytest.mark.slow
def test_each_kind_has_norm_one_and_none_is_trained(scatter):
    kinds = extractors(scatter)
    model = LinearOnFeatures(3, (8, 8, 1), kinds)
    rows = features_of(model, "unit_norm")(IMAGES)
    parts = [np.reshape(kind(IMAGES), (5, -1)) for kind in kinds]
    parts = [part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts]
    expected = np.concatenate([*parts, np.full((5, 1), 0.1 * np.sqrt(2))], axis=1)
    np.testing.assert_allclose(rows, expected / np.sqrt(2 * 1.01), atol=1e-5)
    assert [v.path for v in model.trainable_variables] == [model.layers[-1].kernel.path]
    assert not np.any(model(IMAGES))


def test_with_scattering_alone_it_is_scatter_linear(scatter):
    model = LinearOnFeatures(3, (8, 8, 1), extractors(scatter)[:1])
    np.testing.assert_allclose(
        features_of(model, "unit_norm")(IMAGES),
        features_of(scatter, "unit_norm")(IMAGES),
        atol=1e-6,
    )


@pytest.mark.parametrize("extractors", [[], ["scatter"]])
def test_other_extractors_are_refused(extractors):
    with pytest.raises(ValueError, match=r"Argument `extractors` must be a list of one keras\.M"):
        LinearOnFeatures(3, (8, 8, 1), extractors)
