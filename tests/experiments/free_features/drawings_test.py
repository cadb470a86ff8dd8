"""Random views: replayable, of each image alone, and what each choice does."""

import numpy as np
import pytest
import tensorflow as tf

from experiments.free_features.drawings import RandomViews

SEED = tf.constant([3, 4], tf.int64)
STILL = dict(turn=0.0, zoom=1.0, shear=0.0, shift=0.0, contrast=0.0, brightness=0.0)


def images(count=3, shape=(9, 7, 2)):
    return np.random.default_rng(0).integers(0, 256, [count, *shape]).astype("uint8")


def view(choice=1.0, index=0, **given):
    """The view of all images whose choice of the given index is `choice`, all others 0."""
    choices = np.zeros([3, 1, 9], "float32")
    choices[..., index] = choice
    return RandomViews(**{**STILL, **given}).apply(images(), choices).numpy()[:, 0]


def test_views_are_replayable_and_of_each_image_alone():
    views = RandomViews(flip=True)
    choices = views.draw(3, 4, SEED)
    made = views.apply(images(), choices)
    assert made.shape == (3, 4, 9, 7, 2) and made.dtype == tf.uint8
    np.testing.assert_array_equal(views.apply(images()[1:], choices[1:]), made[1:])
    np.testing.assert_array_equal(views.draw(3, 4, SEED), choices)
    assert len({v.tobytes() for v in made.numpy().reshape(12, -1)}) == 12
    compiled = tf.function(views.apply, jit_compile=True)(images(), choices)
    assert np.abs(compiled.numpy().astype(int) - made.numpy()).max() <= 1


def test_no_change_is_the_image_itself():
    np.testing.assert_array_equal(view(), images())


@pytest.mark.parametrize(
    ("given", "index", "expected"),
    [
        # Half a turn: both axes reversed.
        (dict(turn=np.pi), 0, lambda x: x[:, ::-1, ::-1]),
        # Two of nine rows down the image; the edge goes on.
        (dict(shift=2 / 9), 4, lambda x: np.concatenate([x[:, 2:], x[:, -1:], x[:, -1:]], 1)),
        (dict(shift=1 / 7), 5, lambda x: np.concatenate([x[:, :, 1:], x[:, :, -1:]], 2)),
        (dict(contrast=0.5), 6, lambda x: np.clip(1.5 * (x - 127.5) + 127.5, 0, 255)),
        (dict(brightness=30.0), 7, lambda x: np.clip(x + 30.0, 0, 255)),
    ],
)
def test_what_a_choice_does(given, index, expected):
    made = view(index=index, **given).astype(float)
    np.testing.assert_allclose(made, expected(images().astype(float)), atol=0.51)


def test_a_flip_is_one_half():
    np.testing.assert_array_equal(view(-1.0, index=8, flip=True), images()[:, :, ::-1])
    np.testing.assert_array_equal(view(1.0, index=8, flip=True), images())
    np.testing.assert_array_equal(view(-1.0, index=8), images())


def test_zoom_keeps_the_centre():
    made = view(index=1, zoom=2.0)
    np.testing.assert_array_equal(made[:, 4], images()[:, 4])
    np.testing.assert_array_equal(made[:, 2], images()[:, 0])
