"""Crops against padding and slicing in numpy; views of one example differ, seeds replay them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdpx import augment
from tfdpx.augment import layer_views

SEED = tf.constant([1, 2], "int64")


@given(st.integers(0, 4), st.integers(5, 8), st.integers(5, 9), st.booleans(), st.integers(1, 4))
def test_views_are_crops_of_the_mirror_padded_image(padding, height, width, flip, augmult):
    images = np.random.default_rng(0).integers(0, 256, size=(3, height, width, 2)).astype("uint8")
    augmentation = augment.RandomCropFlip(padding, flip)
    choices = augmentation.draw(3, augmult, SEED)
    views = augmentation.apply(tf.constant(images), choices).numpy()
    assert views.dtype == np.uint8
    padded = np.pad(
        images, [(0, 0), (padding, padding), (padding, padding), (0, 0)], mode="reflect"
    )
    for i, j in np.ndindex(3, augmult):
        row, column, flipped = choices[i, j].numpy()
        crop = padded[i, row : row + height, column : column + width]
        np.testing.assert_array_equal(views[i, j], crop[:, ::-1] if flip and flipped else crop)


@given(
    st.tuples(st.integers(4, 12), st.integers(4, 12)),
    st.tuples(st.integers(3, 8), st.integers(3, 8)),
    st.sampled_from([1.0, 1.2, 1.5]),
    st.booleans(),
    st.integers(1, 3),
)
def test_views_are_crops_of_the_resized_image(stored, wanted, scale, flip, augmult):
    images = np.random.default_rng(0).integers(0, 256, (3, *stored, 2)).astype("uint8")
    augmentation = augment.ResizeCropFlip(*wanted, scale, flip)
    choices = augmentation.draw(3, augmult, SEED)
    views = augmentation.apply(tf.constant(images), choices)
    assert views.dtype == tf.uint8
    assert views.shape == (3, augmult, *wanted, 2)
    larger = [round(scale * size) for size in wanted]
    resized = tf.image.resize(images, larger, antialias=True).numpy()
    for i, j in np.ndindex(3, augmult):
        row, column, flipped = choices[i, j].numpy()
        crop = resized[i, row : row + wanted[0], column : column + wanted[1]]
        crop = crop[:, ::-1] if flip and flipped else crop
        assert crop.shape == (*wanted, 2)
        assert np.abs(views[i, j].numpy() - crop).max() <= 0.5 + 1e-3  # Rounded.


@pytest.mark.parametrize("augmentation", [augment.RandomCropFlip(4), augment.ResizeCropFlip(20)])
def test_seeds_replay_and_part_views(augmentation):
    first = augmentation.draw(8, 4, SEED).numpy()
    np.testing.assert_array_equal(first, augmentation.draw(8, 4, SEED))
    assert (first != augmentation.draw(8, 4, SEED + 1).numpy()).any()
    assert (first[:, 0] != first[:, 1]).any()


def test_a_keras_layer_makes_independent_views():
    views = layer_views.get(keras.layers.RandomFlip("horizontal", seed=1))
    images = tf.random.uniform([6, 4, 4, 1])
    outputs = views.apply(images, views.draw(6, 5, SEED))
    assert outputs.shape == (6, 5, 4, 4, 1)
    same = [
        np.array_equal(a, b) for row in outputs.numpy() for a, b in zip(row, row[1:], strict=False)
    ]
    assert any(same) and not all(same)


@pytest.mark.parametrize(
    "augmentation",
    [
        augment.RandomCropFlip(2, False),
        augment.ResizeCropFlip(6, 5, 1.5, False),
        layer_views.get(keras.layers.RandomFlip()),
    ],
)
def test_config(augmentation):
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(augmentation))
    assert type(again) is type(augmentation)
    assert str(again.get_config()) == str(augmentation.get_config())


def test_unfit_arguments_are_refused():
    augmentation = augment.RandomCropFlip(4)
    for call, message in [
        (lambda: augment.RandomCropFlip(-1), "padding"),
        (lambda: augment.RandomCropFlip(True), "padding"),
        (lambda: augment.ResizeCropFlip(0), "`height`"),
        (lambda: augment.ResizeCropFlip(4, 2.5), "`width`"),
        (lambda: augment.ResizeCropFlip(4, scale=0.9), "`scale`"),
        (
            lambda: augmentation.apply(tf.zeros([1, 4, 4, 1]), augmentation.draw(1, 2, SEED)),
            "smaller than the",
        ),
        (
            lambda: augmentation.apply(tf.zeros([1, 8]), augmentation.draw(1, 2, SEED)),
            "batch, height, width",
        ),
        (lambda: layer_views.get("flip"), "keras.Layer"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
