"""ChannelWhitening: its definition, its images (private ones are refused), private training."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.layers import ChannelWhitening
from tfdpx.synthetic import DeadLeaves, Generator, Strokes

COLOUR = DeadLeaves(6, 3, r_max=4)
DATASET = tf.data.Dataset.from_tensor_slices(COLOUR.images(60)).batch(20)


@settings(max_examples=15)
@given(
    shape=st.sampled_from([(4,), (5, 3), (2, 3, 4), (1, 1, 1)]),
    regularization=st.sampled_from([1e-3, 0.03, 1.0]),
    exponent=st.sampled_from([-0.5, -0.25, 0.0]),
    dtype=st.sampled_from(["float32", "float64"]),
)
def test_equals_the_definition(shape, regularization, exponent, dtype):
    rng = np.random.default_rng(0)
    public = 100 + rng.normal(size=(20, *shape)) @ rng.normal(size=(shape[-1],) * 2)
    inputs = 100 + rng.normal(size=(4, *shape))
    layer = ChannelWhitening(regularization, exponent, dtype=dtype)
    layer.adapt(public, public=True, batch_size=7)
    # One mean for each position, and one covariance of channels for all.
    rows = (public - public.mean(axis=0)).reshape(-1, shape[-1])
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    values = values + regularization * np.mean(values)
    wanted = (inputs - public.mean(axis=0)) @ ((vectors * values**exponent) @ vectors.T)
    tolerance = 1e-4 if dtype == "float32" else 1e-10
    np.testing.assert_allclose(layer(inputs), wanted, atol=tolerance * np.abs(wanted).max())
    assert layer.mean.dtype == layer.matrix.dtype == dtype


def test_statistics_depend_neither_on_batches_nor_on_how_images_arrive():
    changed = DeadLeaves(6, 3, r_max=4)  # Attributes set on a generator are ignored.
    changed.images = lambda number, start=0: np.ones((number, 6, 6, 3))
    changed.draw = lambda rng: np.ones((6, 6, 3))
    changed.get_config = lambda: {"seed": 99}
    arguments = [
        dict(source=COLOUR, num_images=50),
        dict(source=changed, num_images=50),
        dict(source=COLOUR.images(60), num_images=50, public=True),
        dict(source=tf.constant(COLOUR.images(50)), public=True),
        dict(source=list(COLOUR.images(50)), public=True),
        dict(source=DATASET, num_images=50, public=True),
    ]
    layers = [ChannelWhitening() for _ in arguments]
    for layer, case in zip(layers, arguments, strict=True):
        layer.adapt(**case)
        np.testing.assert_allclose(layer.mean, layers[0].mean, atol=1e-6)
        np.testing.assert_allclose(layer.matrix, layers[0].matrix, atol=1e-5)


class Private(DeadLeaves):
    """A generator that was given private data."""

    def draw(self, rng):
        return X[rng.integers(len(X))]


X = np.random.default_rng(0).uniform(size=(64, 6, 6, 3)).astype("float32")


@pytest.mark.parametrize(
    "source", [X, tf.data.Dataset.from_tensor_slices(X).batch(8), Private(6, 3)], ids=type
)
def test_images_that_may_be_private_are_refused_unless_vouched_for(source):
    layer = ChannelWhitening(name="whiten")
    for num_images in (None, 10):
        with pytest.raises(ValueError, match="`source` must be a gen.*without noise.*") as raised:
            layer.adapt(source, num_images)
        assert type(source).__name__ in str(raised.value)
        assert "public=True" in str(raised.value) and "0." not in str(raised.value)
    assert not layer.weights
    layer.adapt(source, public=True)
    assert np.any(layer.matrix)


class Broken(Generator):
    def draw(self, rng):
        return np.full(self.image_shape, np.nan)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_images": 0}, "`num_images` must be a positive integer"),
        ({"features": "pool"}, "`features` must be a layer, model or function"),
        ({"num_images": 1}, "'whiten' cannot adapt to features that do not vary or"),
        ({"source": Broken(4), "public": True}, "or are not finite. Use more"),
        ({"source": np.ones((0, 4)), "public": True}, "`source` must hold at least one image"),
        ({"source": 5, "public": True}, "`source` must be a generator, an array or.*source=5"),
        (
            {"source": tf.data.Dataset.from_tensors((1.0, 2.0)), "public": True},
            r"`source`.*images alone.*Use source.map",
        ),
    ],
)
def test_adapt_refuses_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChannelWhitening(name="whiten").adapt(**{"source": Strokes(4), **arguments})
    layer = ChannelWhitening()
    layer.build((None, 3, 3, 3))
    with pytest.raises(ValueError, match=r"\(3, 3, 3\). Received: .*\(6, 6, 3\) in `adapt`. Give"):
        layer.adapt(COLOUR, 10)


def test_a_model_is_built_first_adapted_afterwards_and_trains_privately():
    pool, whiten = keras.layers.AveragePooling2D(2), ChannelWhitening(0.1, name="whiten")
    model = small.model(layers=[pool, whiten, keras.layers.Flatten(), keras.layers.Dense(3)])
    model.build((None, 6, 6, 3))
    images, labels = COLOUR.images(16), np.arange(16) % 3
    for call in (
        model,
        tf.function(model),
        model.predict,
        lambda images: model.train_on_batch(images, labels),
    ):
        with pytest.raises(ValueError, match="'whiten' has no statistics yet. Call adapt"):
            call(images)
    whiten.adapt(COLOUR, 100, pool)
    statistics = [np.array(weight) for weight in whiten.weights]
    np.testing.assert_allclose(model.predict(images, verbose=0), model(images), atol=1e-5)
    whiten.trainable = True
    assert whiten.trainable_weights == [] and len(whiten.non_trainable_weights) == 2
    assert np.all(small.step(model, images, labels) != 0)
    for weight, before in zip(whiten.weights, statistics, strict=True):
        np.testing.assert_array_equal(weight, before)
