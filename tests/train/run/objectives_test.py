"""What is minimised without labels: the contrastive loss by its definition, and what is trained."""

import types

import keras
import numpy as np
import pytest

from tfdpx.layers.trainable import last_layer
from tfdpx.train.data.views import RandomViews
from tfdpx.train.run import classifiers, finetuning, objectives


def nt_xent_by_loops(vectors, images, temperature):
    """Equation 1 of Chen et al. 2020, one pair after the other."""
    unit = [v / np.sqrt(sum(v * v)) for v in vectors.astype("float64")]
    losses = []
    for i, u in enumerate(unit):
        [j] = [k for k in range(len(unit)) if k != i and images[k] == images[i]]
        others = [np.exp(np.dot(u, unit[k]) / temperature) for k in range(len(unit)) if k != i]
        losses.append(-np.log(np.exp(np.dot(u, unit[j]) / temperature) / sum(others)))
    return np.array(losses)


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
def test_nt_xent_is_that_of_the_paper(temperature):
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=[12, 5]).astype("float32")
    images = rng.permutation(np.repeat([3, 7, 70, 1, 0, 9], 2))
    loss = objectives.NTXent(temperature, reduction="none")
    expected = nt_xent_by_loops(vectors, images, temperature)
    np.testing.assert_allclose(loss(images, vectors), expected, rtol=1e-5)
    np.testing.assert_allclose(loss(images[:, None], 100 * vectors), expected, rtol=1e-5)


def test_nt_xent_falls_where_views_of_an_image_agree():
    images = np.repeat(np.arange(4), 2)
    loss = objectives.NTXent(0.2)
    apart = np.eye(8, dtype="float32")
    together = np.repeat(np.eye(4, dtype="float32"), 2, axis=0)
    assert float(loss(images, together)) < 0.05 < float(loss(images, apart))
    assert objectives.NTXent.from_config(loss.get_config()).temperature == 0.2


def of(objective, **given):
    settings = types.SimpleNamespace(
        generator="strokes", objective=objective, temperature=0.2, label_smoothing=0.0,
        augment_flip=True, **given,
    )  # fmt: skip
    classifier = classifiers.build("small_cnn", (8, 8, 1), 10, 120.0)
    return classifier, objectives.of(settings, classifier, types.SimpleNamespace(num_train=30))


@pytest.mark.parametrize(
    ("name", "outputs", "views"), [("contrastive", 64, 2), ("exemplar", 30, 1)]
)
def test_all_but_the_last_layer_is_trained_under_another_head(name, outputs, views):
    classifier, objective = of(name)
    assert objective.model.output_shape == (None, outputs) and objective.num_views == views
    assert isinstance(objective.augment, RandomViews) and objective.augment.flip
    trained = {id(v) for v in objective.model.trainable_variables}
    *body, kernel, bias = classifier.trainable_variables
    assert {id(v) for v in body} < trained and not {id(kernel), id(bias)} & trained


def test_features_are_what_the_last_layer_receives(tmp_path):
    classifier = classifiers.build("small_cnn", (8, 8, 1), 3, 100.0, 50.0)
    classifier.save(tmp_path / "model.keras")
    features = finetuning.features_of(str(tmp_path / "model.keras"))
    images = np.random.default_rng(0).integers(0, 256, [4, 8, 8, 1]).astype("uint8")
    last = last_layer(classifier)
    found = features(images / 255.0)
    assert found.shape == (4, 256) and not features.trainable_variables
    np.testing.assert_allclose(last(found), classifier(images), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrn_10_1", "nf_resnet_26", "scatter_linear"])
def test_every_classifier_has_features(name):
    shape = (8, 8, 1) if name == "scatter_linear" else (16, 16, 3)
    classifier = classifiers.build(name, shape, 3, 100.0)
    features = finetuning.features(classifier)
    assert len(features.output.shape) == 2
    own = len(last_layer(classifier).weights)
    assert len(features.weights) == len(classifier.weights) - own
    assert isinstance(last_layer(classifier), keras.layers.Dense)
