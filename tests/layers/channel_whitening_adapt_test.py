"""What ChannelWhitening.adapt takes, and what it refuses: private data first of all."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpx.layers import ChannelWhitening
from tfdpx.synthetic import DeadLeaves, Generator, Strokes

COLOUR = DeadLeaves(6, 3, r_max=4)
DATASET = tf.data.Dataset.from_tensor_slices(COLOUR.images(60)).batch(20)


def test_statistics_depend_neither_on_batches_nor_on_how_images_arrive():
    arguments = [
        dict(source=COLOUR, num_images=50),
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

    def __init__(self, x):
        super().__init__(6, 3)
        self.x = x

    def draw(self, rng):
        return self.x[rng.integers(len(self.x))]


def sources_that_may_be_private():
    x = np.random.default_rng(0).uniform(size=(64, 6, 6, 3)).astype("float32")
    return {
        "array": x,
        "dataset": tf.data.Dataset.from_tensor_slices(x).batch(8),
        "derived generator": Private(x),
    }


@pytest.mark.parametrize("name", sources_that_may_be_private())
def test_what_may_be_private_is_refused_unless_it_is_vouched_for(name):
    source = sources_that_may_be_private()[name]
    layer = ChannelWhitening(name="whiten")
    for num_images in (None, 10):
        with pytest.raises(ValueError, match="`source` must be a gen.*without noise.*") as raised:
            layer.adapt(source, num_images)
        assert type(source).__name__ in str(raised.value)
        assert "public=True" in str(raised.value) and "0." not in str(raised.value)
    assert not layer.weights
    with pytest.raises(ValueError, match="'whiten' has no statistics yet"):
        layer(np.zeros((1, 6, 6, 3)))
    layer.adapt(source, public=True)
    assert np.any(layer.matrix)


def test_what_is_set_on_a_generator_does_not_count():
    changed = DeadLeaves(6, 3, r_max=4)
    changed.images = lambda number, start=0: np.ones((number, 6, 6, 3))
    changed.draw = lambda rng: np.ones((6, 6, 3))
    changed.get_config = lambda: {"seed": 99}
    layers = [ChannelWhitening(), ChannelWhitening()]
    layers[0].adapt(changed, 20)
    layers[1].adapt(COLOUR, 20)
    np.testing.assert_array_equal(layers[0].matrix, layers[1].matrix)


class Broken(Generator):
    def draw(self, rng):
        return np.full(self.image_shape, np.nan)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_images": 0}, "`num_images` must be a positive integer"),
        ({"batch_size": 1.5}, "`batch_size` must be a positive integer"),
        ({"features": "pool"}, "`features` must be a layer, model or function"),
        ({"num_images": 1}, "'whiten' cannot adapt to features that do not vary or"),
        ({"source": Broken(4), "public": True}, "or are not finite. Use more"),
        ({"source": np.ones((0, 4)), "public": True}, "`source` must hold an image"),
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


def test_adapt_refuses_features_of_another_shape():
    layer = ChannelWhitening()
    layer.build((None, 3, 3, 3))
    with pytest.raises(ValueError, match=r"\(3, 3, 3\). Received: .*\(6, 6, 3\) in `adapt`. Give"):
        layer.adapt(COLOUR, 10)
