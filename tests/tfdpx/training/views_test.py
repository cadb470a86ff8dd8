"""Views in training: what travels to the device, what the model sees, and layers of others."""

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


class Seen(keras.layers.Layer):
    """Passes its input on and remembers its shapes and dtypes."""

    def __init__(self):
        super().__init__(autocast=False)
        self.inputs = []

    def call(self, x):
        self.inputs.append((tuple(x.shape), tf.as_dtype(x.dtype)))
        return keras.ops.cast(x, "float32") / 255.0


def plan(**arguments):
    return tfdpx.PrivacyPlan(
        num_examples=40, batch_size=8, steps=4, noise_multiplier=1.0, delta=1e-5, **arguments
    )


def images(count=40, size=12):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, size, size, 3), "uint8"), rng.integers(0, 3, count)


def model(augmentation, seen=None, augmult=K, jit_compile=False, **arguments):
    seeds.fix(5)
    made = keras.Sequential(
        [
            *([keras.Input((5, 5, 3), dtype="uint8")] if seen else []),
            seen or keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, strides=2),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )
    made.compile(
        tfdpx.DPSGD(0.1, plan=plan(), augment=augmentation, augmult=augmult, seed=1, **arguments),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return made


@pytest.mark.slow
def test_bytes_travel_and_views_are_made_where_the_model_runs(monkeypatch):
    seen = Seen()
    made = model(augment.ResizeCropFlip(5), seen)
    batches = plan().batches(*images(), seed=0)
    received = []
    step = type(made.optimizer).private_train_step

    def spy(self, model, data):
        received.append([(tuple(t.shape), t.dtype) for t in data])
        return step(self, model, data)

    monkeypatch.setattr(type(made.optimizer), "private_train_step", spy)
    made.fit(batches, verbose=0)
    capacity = batches.element_spec[0].shape[0]
    # The iterator gives the step 8-bit images, one a row, and nothing but labels and weights.
    specs = [(tuple(s.shape), s.dtype) for s in batches.element_spec]
    assert specs[:2] == received[0][:2]
    assert received[0][0] == ((capacity, 12, 12, 3), tf.uint8)
    assert [shape for shape, _ in received[0][1:]] == [(capacity,), (capacity,)]
    # The model sees K crops of each, still of 8 bits, and normalises them.
    assert {(shape[1:], dtype) for shape, dtype in seen.inputs} == {((5, 5, 3), tf.uint8)}
    rows = {shape[0] for shape, _ in seen.inputs}
    # The rows of one example, because nothing is known of the layer.
    assert K in rows


def test_a_step_averages_the_views_that_the_seed_draws():
    x, y = images(8)
    by_step = model(augment.ResizeCropFlip(5))
    by_step.build((None, 5, 5, 3))
    by_data = model(None)
    by_data.build((None, 5, 5, 3))
    drawn = []
    made = by_step.optimizer.augment
    draw = made.draw
    made.draw = lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1]
    by_step.run_eagerly = True
    change = small.step(by_step, x, y)
    drawn = max(drawn, key=len)
    views = made.apply(tf.constant(x), drawn)
    np.testing.assert_allclose(
        change, small.step_views(by_data, views.numpy(), y), rtol=1e-4, atol=1e-7
    )
    other = made.apply(tf.constant(x), drawn[::-1])
    planted = small.step_views(by_data, other.numpy(), y)
    assert np.abs(planted - change).max() > 1e-5


def keras_cv_layers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras_cv
    return keras_cv.layers


LAYERS = {  # Whether XLA compiles it, and the layer.
    "flip": (True, lambda: keras.layers.RandomFlip("horizontal", seed=1)),
    "brightness": (True, lambda: keras.layers.RandomBrightness(0.2, seed=1)),
    "contrast": (True, lambda: keras.layers.RandomContrast(0.2, seed=1)),
    "crop": (True, lambda: keras.layers.RandomCrop(9, 9, seed=1)),
    "rotation": (False, lambda: keras.layers.RandomRotation(0.1, seed=1)),
    "keras_cv flip": (True, lambda: keras_cv_layers().RandomFlip()),
    "keras_cv cutout": (True, lambda: keras_cv_layers().RandomCutout(0.3, 0.3)),
    "keras_cv solarization": (True, lambda: keras_cv_layers().Solarization((0, 255))),
    "keras_cv rotation": (False, lambda: keras_cv_layers().RandomRotation(0.1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_keras_and_keras_cv(name):
    compiles, make = LAYERS[name]
    made = layer_views.get(make())
    x = tf.constant(images(4)[0])
    choices = made.draw(4, 2, tf.zeros([2], tf.int64))
    made.apply(x[:1], choices[:1])  # Builds the layer.
    views = tf.function(lambda: made.apply(x, choices), jit_compile=compiles, autograph=False)()
    size = 9 if name == "crop" else 12
    assert views.shape == (4, 2, size, size, 3)
    assert np.isfinite(views).all()


@pytest.mark.parametrize("name", ["MixUp", "CutMix"])
def test_layers_that_mix_examples_are_refused(name):
    if not hasattr(keras.layers, name):
        pytest.skip(f"Keras {keras.__version__} has no {name}.")
    make = getattr(keras.layers, name)
    with pytest.raises(ValueError, match="depend on another"):
        model(make(seed=1), augmult=2).fit(plan().batches(*images(), seed=0), verbose=0)
