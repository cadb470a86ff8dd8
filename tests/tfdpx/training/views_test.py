"""Views in training: the views that a step averages, and layers of Keras or others as views."""

import warnings

import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf

import tfdpx
from tfdpx import augment
from tfdpx.augment import layer_views

K = 3


PLAN = tfdpx.PrivacyPlan(40, batch_size=8, steps=4, noise_multiplier=1.0, delta=1e-5)


def images(count=40, size=12):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, size, size, 3), "uint8"), rng.integers(0, 3, count)


def model(augmentation, augmult=K):
    seeds.fix(5)
    built = keras.Sequential(
        [
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, strides=2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )
    built.compile(
        tfdpx.DPSGD(0.1, plan=PLAN, augment=augmentation, augmult=augmult, seed=1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return built


def test_a_step_averages_the_views_that_the_seed_draws():
    x, y = images(8)
    by_step = model(augment.ResizeCropFlip(5))
    by_step.build((None, 5, 5, 3))
    by_data = model(None)
    by_data.build((None, 5, 5, 3))
    drawn = []
    augmentation = by_step.optimizer.augment
    draw = augmentation.draw
    augmentation.draw = lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1]
    by_step.run_eagerly = True
    change = small.step(by_step, x, y)
    drawn = max(drawn, key=len)
    views = augmentation.apply(tf.constant(x), drawn)
    np.testing.assert_allclose(
        change, small.step_views(by_data, views.numpy(), y), rtol=1e-4, atol=1e-7
    )
    other = augmentation.apply(tf.constant(x), drawn[::-1])
    planted = small.step_views(by_data, other.numpy(), y)
    assert np.abs(planted - change).max() > 1e-5


def keras_cv_layers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # None of its versions can be imported with Keras 3.16.
        return pytest.importorskip("keras_cv", exc_type=ImportError).layers


LAYERS = {
    "flip": lambda: keras.layers.RandomFlip("horizontal", seed=1),
    "crop": lambda: keras.layers.RandomCrop(9, 9, seed=1),
    "rotation": lambda: keras.layers.RandomRotation(0.1, seed=1),
    "keras_cv cutout": lambda: keras_cv_layers().RandomCutout(0.3, 0.3),
    "keras_cv rotation": lambda: keras_cv_layers().RandomRotation(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_keras_and_keras_cv(name):
    wrapped = layer_views.get(LAYERS[name]())
    x = tf.constant(images(4)[0])
    views = wrapped.apply(x, wrapped.draw(4, 2, tf.zeros([2], tf.int64)))
    size = 9 if name == "crop" else 12
    assert views.shape == (4, 2, size, size, 3)
    assert np.isfinite(views).all()


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_layers_that_mix_examples_are_refused(name):
    if not hasattr(keras.layers, name):
        pytest.skip(f"Keras {keras.__version__} has no {name}.")
    make = getattr(keras.layers, name)
    with pytest.raises(ValueError, match="depend on another"):
        model(make(seed=1), augmult=2).fit(PLAN.batches(*images(), seed=0), verbose=0)
