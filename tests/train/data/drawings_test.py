"""Pre-training without labels: its images and views, what is minimised, and what is trained."""

import types

import numpy as np
import pytest
import tensorflow as tf

from tfdpx.train.data import generated
from tfdpx.train.data.views import RandomViews
from tfdpx.train.run import classifiers, objectives


@pytest.mark.parametrize("kind", generated.KINDS)
def test_shape_and_constants_are_those_of_the_data_set(kind):
    settings = dict(generator=kind, dataset="cifar10", image_size=None, num_images=5)
    data = generated.generate(types.SimpleNamespace(**settings), seed=3)
    assert data.train_x.shape == (5, 32, 32, 3) and data.train_x.dtype == np.uint8
    assert data.train_x.std() > 10 and data.num_classes == 10
    assert data.centre == pytest.approx((123.675, 116.28, 103.53))
    assert data.name == f"synthetic:{kind}"


IMAGES = np.random.default_rng(0).integers(0, 256, [3, 9, 7, 2]).astype("uint8")
STILL = dict(turn=0.0, zoom=1.0, shear=0.0, shift=0.0, contrast=0.0, brightness=0.0)


def test_views_are_replayable_and_of_each_image_alone():
    views, seed = RandomViews(flip=True), tf.constant([3, 4], tf.int64)
    choices = views.draw(3, 4, seed)
    made = views.apply(IMAGES, choices)
    assert made.shape == (3, 4, 9, 7, 2) and made.dtype == tf.uint8
    np.testing.assert_array_equal(views.apply(IMAGES[1:], choices[1:]), made[1:])
    np.testing.assert_array_equal(views.draw(3, 4, seed), choices)
    assert len({v.tobytes() for v in made.numpy().reshape(12, -1)}) == 12


@pytest.mark.parametrize(
    ("given", "index", "expected"),
    [
        # Half a turn: both axes reversed.
        (dict(turn=np.pi), 0, lambda x: x[:, ::-1, ::-1]),
        # Two of nine rows down the image; the edge goes on.
        (dict(shift=2 / 9), 4, lambda x: np.concatenate([x[:, 2:], x[:, -1:], x[:, -1:]], 1)),
        (dict(contrast=0.5), 6, lambda x: np.clip(1.5 * (x - 127.5) + 127.5, 0, 255)),
        (dict(brightness=30.0), 7, lambda x: np.clip(x + 30.0, 0, 255)),
        (dict(flip=True), 8, lambda x: x),
    ],
)
def test_what_a_choice_does(given, index, expected):
    choices = np.zeros([3, 1, 9], "float32")
    choices[..., index] = 1.0
    made = RandomViews(**{**STILL, **given}).apply(IMAGES, choices).numpy()[:, 0]
    np.testing.assert_allclose(made, expected(IMAGES.astype(float)), atol=0.51)


def nt_xent_by_loops(vectors, images, temperature):
    """Equation 1 of Chen et al. 2020, one pair after the other."""
    unit = [v / np.sqrt(sum(v * v)) for v in vectors.astype("float64")]
    losses = []
    for i, u in enumerate(unit):
        [j] = [k for k in range(len(unit)) if k != i and images[k] == images[i]]
        others = [np.exp(np.dot(u, unit[k]) / temperature) for k in range(len(unit)) if k != i]
        losses.append(-np.log(np.exp(np.dot(u, unit[j]) / temperature) / sum(others)))
    return np.array(losses)


def test_nt_xent_is_that_of_the_paper():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=[12, 5]).astype("float32")
    images = rng.permutation(np.repeat([3, 7, 70, 1, 0, 9], 2))
    loss = objectives.NTXent(0.2, reduction="none")
    expected = nt_xent_by_loops(vectors, images, 0.2)
    np.testing.assert_allclose(loss(images, vectors), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "outputs", "views"), [("contrastive", 64, 2), ("exemplar", 30, 1)]
)
def test_all_but_the_last_layer_is_trained_under_another_head(name, outputs, views):
    settings = types.SimpleNamespace(
        generator="strokes", objective=name, temperature=0.2, label_smoothing=0.0, augment_flip=True
    )
    classifier = classifiers.build("small_cnn", (8, 8, 1), 10, 120.0)
    objective = objectives.of(settings, classifier, types.SimpleNamespace(num_train=30))
    assert objective.model.output_shape == (None, outputs) and objective.num_views == views
    assert isinstance(objective.augment, RandomViews) and objective.augment.flip
    trained = {id(v) for v in objective.model.trainable_variables}
    *body, kernel, bias = classifier.trainable_variables
    assert {id(v) for v in body} < trained and not {id(kernel), id(bias)} & trained
