"""Crops against padding and slicing in numpy; views of one example differ, seeds replay them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdpx import augment

SEED = tf.constant([1, 2], "int64")


@given(st.integers(0, 4), st.integers(5, 8), st.integers(5, 9), st.booleans(), st.integers(1, 4))
def test_views_are_crops_of_the_mirror_padded_image(padding, height, width, flip, augmult):
    images = np.random.default_rng(0).integers(0, 256, size=(3, height, width, 2)).astype("uint8")
    made = augment.RandomCropFlip(padding, flip)
    choices = made.draw(3, augmult, SEED)
    views = made.apply(tf.constant(images), choices).numpy()
    assert views.dtype == np.uint8
    padded = np.pad(
        images, [(0, 0), (padding, padding), (padding, padding), (0, 0)], mode="reflect"
    )
    for i, j in np.ndindex(3, augmult):
        row, column, flipped = choices[i, j].numpy()
        crop = padded[i, row : row + height, column : column + width]
        np.testing.assert_array_equal(views[i, j], crop[:, ::-1] if flip and flipped else crop)


def test_every_offset_and_flip_occurs():
    choices = augment.RandomCropFlip(1).draw(400, 4, SEED).numpy().reshape(-1, 3)
    counts = np.unique(choices, axis=0, return_counts=True)[1]
    assert len(counts) == 3 * 3 * 2
    assert counts.min() > 0.5 * counts.mean()


def test_seeds_replay_and_part_views():
    made = augment.RandomCropFlip(4)
    first = made.draw(8, 4, SEED).numpy()
    np.testing.assert_array_equal(first, made.draw(8, 4, SEED))
    assert (first != made.draw(8, 4, SEED + 1).numpy()).any()
    assert (first[:, 0] != first[:, 1]).any()


def test_a_keras_layer_makes_independent_views():
    views = augment.get(keras.layers.RandomFlip("horizontal", seed=1))
    images = tf.random.uniform([6, 4, 4, 1])
    made = views.apply(images, views.draw(6, 5, SEED))
    assert made.shape == (6, 5, 4, 4, 1)
    same = [
        np.array_equal(a, b) for row in made.numpy() for a, b in zip(row, row[1:], strict=False)
    ]
    assert any(same) and not all(same)


@pytest.mark.parametrize(
    "made", [augment.RandomCropFlip(2, False), augment.get(keras.layers.RandomFlip())]
)
def test_config(made):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(made))
    assert type(again) is type(made)
    assert str(again.get_config()) == str(made.get_config())


@pytest.mark.parametrize("padding", [-1, 1.5, True])
def test_bad_padding(padding):
    with pytest.raises(ValueError, match="padding"):
        augment.RandomCropFlip(padding)


def test_bad_images():
    made = augment.RandomCropFlip(4)
    with pytest.raises(ValueError, match="smaller than the image"):
        made.apply(tf.zeros([1, 4, 4, 1]), made.draw(1, 2, SEED))
    with pytest.raises(ValueError, match="batch, height, width"):
        made.apply(tf.zeros([1, 8]), made.draw(1, 2, SEED))
    with pytest.raises(ValueError, match="keras.Layer"):
        augment.get("flip")
