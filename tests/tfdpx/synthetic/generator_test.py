"""What all image generators promise: sizes, range, seeds, configuration, no data."""

import inspect
import json

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfdpx
from tfdpx.synthetic import DeadLeaves, Shapes, Spectrum, Strokes
from tfdpx.synthetic.generator import Generator

KINDS = [DeadLeaves, Spectrum, Strokes, Shapes]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@given(
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**70),
)
def test_every_size_gives_images_between_0_and_1(kind, height, width, channels, seed):
    images = kind((height, width), channels, seed).images(2)
    assert images.shape == (2, height, width, channels) and images.dtype == np.float32
    assert images.min() >= 0 and images.max() <= 1  # So none is NaN.


@each_kind
def test_images_for_imagenet(kind):
    image = kind(224, 3).images(1)
    assert image.shape == (1, 224, 224, 3) and image.std() > 0.01


@each_kind
@given(start=st.integers(0, 6), number=st.integers(0, 4))
def test_an_image_depends_on_the_seed_and_its_number_alone(kind, start, number):
    np.random.seed(start)
    many = kind(6, seed=5).images(10)
    np.testing.assert_array_equal(kind(6, seed=5).images(number, start), many[start:][:number])


@each_kind
@pytest.mark.parametrize("channels", [1, 3])
def test_seeds_and_numbers_differ(kind, channels):
    images = np.concatenate([kind(8, channels, seed).images(5) for seed in (0, 1, 2**64)])
    assert len(np.unique(images.reshape(15, -1), axis=0)) == 15


@each_kind
def test_config_round_trip(kind):
    generator = kind((5, 7), 3, seed=2)
    config = generator.get_config()
    assert set(config) == set(inspect.signature(kind).parameters)
    assert kind.from_config(json.loads(json.dumps(config))).get_config() == config
    written = json.loads(json.dumps(keras.saving.serialize_keras_object(generator)))
    again = keras.saving.deserialize_keras_object(written)
    assert type(again) is kind
    np.testing.assert_array_equal(again.images(2), generator.images(2))


@each_kind
def test_no_argument_takes_data(kind):
    private = np.random.default_rng(0).uniform(size=(4, 8, 8, 1))
    for name in inspect.signature(kind).parameters:
        with pytest.raises(ValueError, match=f"Argument `{name}` must"):
            kind(**{name: private})


@pytest.mark.parametrize("kind", [DeadLeaves, Spectrum])
def test_an_endless_data_set_gives_the_same_images(kind):
    generator = kind(4, 2, seed=3)
    batches = list(generator.dataset(3).take(2).as_numpy_iterator())
    np.testing.assert_array_equal(np.concatenate(batches), generator.images(6))
    assert generator.dataset(3).element_spec.shape == (3, 4, 4, 2)


class Ramp(Generator):
    """A kind of one's own."""

    def draw(self, rng):
        height, width, channels = self.image_shape
        return np.linspace(0, rng.random(), height * width * channels).reshape(self.image_shape)


def test_a_kind_of_ones_own_defines_draw():
    images = Ramp((2, 3)).images(4)
    assert images.shape == (4, 2, 3, 1) and len(np.unique(images.max(axis=(1, 2, 3)))) == 4
    with pytest.raises(NotImplementedError, match="Generator does not define `draw`"):
        Generator().images(1)


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (DeadLeaves, {"image_size": 0}, r"`image_size` must .*image_size=0. Use, e.g., 32"),
        (DeadLeaves, {"image_size": (8, 8, 1)}, r"`image_size`.*\(8, 8, 1\)"),
        (DeadLeaves, {"image_size": 8.5}, r"`image_size`.*8.5"),
        (Shapes, {"channels": 0}, r"`channels` must be a positive .*channels=0. Use 1 for gray"),
        (Spectrum, {"seed": -1}, r"`seed` must be an int >= 0.*seed=-1"),
        (Spectrum, {"seed": None}, r"`seed`.*None"),
        (DeadLeaves, {"r_min": 0.1}, r"`r_min` must .*>= 0.5.*r_min=0.1. Use 1."),
        (DeadLeaves, {"r_min": 3, "r_max": 2}, r"`r_max` must .*>= r_min=3.*r_max=2"),
        (DeadLeaves, {"r_max": np.inf}, r"`r_max` must be a finite .*r_max=inf"),
        (Spectrum, {"alpha": -1}, r"`alpha` must be a number >= 0.*alpha=-1. Use, e.g., alpha=\(1"),
        (Spectrum, {"alpha": (2, 1)}, r"`alpha`.*in order.*\(2, 1\)"),
        (Spectrum, {"alpha": (1, np.inf)}, r"`alpha`.*inf"),
        (Strokes, {"strokes": 0}, r"`strokes` must be an int >= 1.*strokes=0"),
        (Strokes, {"strokes": (1, 2.5)}, r"`strokes`.*2.5"),
        (Strokes, {"width": 1.5}, r"`width` must be a number between 0.01 and 1.*width=1.5"),
        (Shapes, {"shapes": (1, 2, 3)}, r"`shapes`.*pair.*\(1, 2, 3\)"),
        (Shapes, {"radius": 0}, r"`radius` must .*radius=0. Use, e.g., radius=\(0.15, 0.4\)"),
    ],
)
def test_refuses_by_name(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("arguments", [{"num_images": -1}, {"num_images": 1, "start": 0.5}])
def test_refuses_numbers_of_images_by_name(arguments):
    name = list(arguments)[-1]
    with pytest.raises(ValueError, match=f"`{name}` must be an int >= 0"):
        DeadLeaves(4).images(**arguments)
    with pytest.raises(ValueError, match="`batch_size` must be a positive integer"):
        DeadLeaves(4).dataset(0)


def test_is_part_of_the_package():
    assert tfdpx.synthetic.DeadLeaves is DeadLeaves
