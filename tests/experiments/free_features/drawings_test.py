"""Random views: reproducible, independent between images, and the effect of each choice."""

import numpy as np
import pytest
import tensorflow as tf

from experiments.free_features.drawings import RandomViews

SEED = tf.constant([3, 4], tf.int64)
STILL = dict(turn=0.0, zoom=1.0, shear=0.0, shift=0.0, contrast=0.0, brightness=0.0)
IMAGES = np.random.default_rng(0).integers(0, 256, [3, 9, 7, 2]).astype("uint8")


def test_views_are_replayable_and_of_each_image_alone():
    views = RandomViews(flip=True)
    choices = views.draw(3, 4, SEED)
    outputs = views.apply(IMAGES, choices)
    assert outputs.shape == (3, 4, 9, 7, 2) and outputs.dtype == tf.uint8
    np.testing.assert_array_equal(views.apply(IMAGES[1:], choices[1:]), outputs[1:])
    np.testing.assert_array_equal(views.draw(3, 4, SEED), choices)
    assert len({v.tobytes() for v in outputs.numpy().reshape(12, -1)}) == 12
    compiled = tf.function(views.apply, jit_compile=True)(IMAGES, choices)
    assert np.abs(compiled.numpy().astype(int) - outputs.numpy()).max() <= 1


@pytest.mark.parametrize(
    ("arguments", "index", "choice", "expected"),
    [
        ({}, 0, 1.0, lambda x: x),
        # Half a turn reverses both axes.
        (dict(turn=np.pi), 0, 1.0, lambda x: x[:, ::-1, ::-1]),
        # Shifts the image down by two of nine rows; the edge is repeated.
        (dict(shift=2 / 9), 4, 1.0, lambda x: np.concatenate([x[:, 2:], x[:, -1:], x[:, -1:]], 1)),
        (dict(shift=1 / 7), 5, 1.0, lambda x: np.concatenate([x[:, :, 1:], x[:, :, -1:]], 2)),
        # Halves the size along the rows; the edge is repeated.
        (dict(zoom=2.0), 1, 1.0, lambda x: x[:, [0, 0, 0, 2, 4, 6, 8, 8, 8]]),
        (dict(contrast=0.5), 6, 1.0, lambda x: np.clip(1.5 * (x - 127.5) + 127.5, 0, 255)),
        (dict(brightness=30.0), 7, 1.0, lambda x: np.clip(x + 30.0, 0, 255)),
        (dict(flip=True), 8, -1.0, lambda x: x[:, :, ::-1]),
        (dict(flip=True), 8, 1.0, lambda x: x),
        ({}, 8, -1.0, lambda x: x),
    ],
)
def test_the_effect_of_a_choice(arguments, index, choice, expected):
    choices = np.zeros([3, 1, 9], "float32")
    choices[..., index] = choice
    outputs = RandomViews(**{**STILL, **arguments}).apply(IMAGES, choices).numpy()[:, 0]
    np.testing.assert_allclose(outputs.astype(float), expected(IMAGES.astype(float)), atol=0.51)
