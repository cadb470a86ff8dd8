"""Crops against padding and slicing in numpy; views of one example differ, seeds replay them."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import slow
from hypothesis import given
from hypothesis import strategies as st

import tfdpx
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


@pytest.mark.slow
def test_a_layer_of_keras_cv_makes_views():
    # None of its versions can be imported with Keras 3.16.
    keras_cv = pytest.importorskip("keras_cv", exc_type=ImportError)
    views = layer_views.get(keras_cv.layers.RandomCutout(0.3, 0.3))
    outputs = views.apply(tf.random.uniform([4, 12, 12, 3]), views.draw(4, 2, SEED))
    assert outputs.shape == (4, 2, 12, 12, 3) and np.isfinite(outputs).all()


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


def autoencoder(moves_targets, augmentation, augmult=2, loss="mse"):
    """Returns a compiled model that gives its images back."""
    inputs = keras.Input((None, None, 2))
    identity = keras.layers.Conv2D(2, 1, kernel_initializer=lambda s, dtype: np.eye(2).reshape(s))
    model = keras.Model(inputs, identity(inputs))
    views = {"augment": augmentation, "augmult": augmult, "augment_targets": moves_targets}
    model.compile(tfdpx.DPSGD(1.0, batch_size=4, noise_multiplier=0.0, **views), loss)
    return model


@pytest.mark.parametrize(
    "augmentation, augmult",
    [
        (augment.RandomCropFlip(2), 2),
        slow(augment.ResizeCropFlip(6, 6, 1.2), 1),
        slow(augment.MixViews(augment.RandomCropFlip(2), 1), 3),
        slow(keras.Sequential([keras.layers.RandomFlip(), keras.layers.RandomRotation(0.2)]), 2),
    ],
)
def test_targets_move_with_their_images(augmentation, augmult):
    images = tf.random.stateless_normal([4, 8, 8, 2], SEED).numpy()
    model = autoencoder(True, augmentation, augmult)
    model.fit(images, images, batch_size=4, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0].reshape(2, 2), np.eye(2))


def test_targets_like_images_are_refused_without_a_word():
    images = tf.random.stateless_normal([4, 8, 8, 2], SEED).numpy()
    with pytest.raises(ValueError, match="`augment_targets=True`"):
        autoencoder(None, augment.RandomCropFlip(2)).train_on_batch(images, images)
    with pytest.raises(ValueError, match=r"of shape \[\(4, 1, 1, 2\)\]"):
        means = images.mean((1, 2), keepdims=True)
        autoencoder(True, augment.RandomCropFlip(2)).train_on_batch(images, means)


@pytest.mark.slow
def test_integer_masks_move_too():
    def loss(y, p):
        return (tf.cast(y, "float32") - p[..., 0]) ** 2

    model = autoencoder(True, augment.RandomCropFlip(2), loss=loss)
    masks = tf.random.stateless_uniform([4, 8, 8], SEED, 0, 5, tf.int32).numpy()
    images = np.stack([masks, masks], -1).astype("float32")
    model.train_on_batch(images, masks)
    np.testing.assert_array_equal(model.get_weights()[0].reshape(2, 2), np.eye(2))
