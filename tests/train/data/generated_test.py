"""Images to pre-train on, in the format of a data set that is not read."""

import types

import numpy as np
import pytest

from tfdpx.train.config.errors import UserError
from tfdpx.train.data import generated


def generate(**given):
    settings = dict(generator="strokes", dataset="digits", image_size=None, num_images=5)
    return generated.generate(types.SimpleNamespace(**{**settings, **given}), seed=3)


@pytest.mark.parametrize("kind", generated.KINDS)
def test_shape_and_constants_are_those_of_the_data_set(kind):
    data = generate(generator=kind, dataset="cifar10")
    assert data.train_x.shape == (5, 32, 32, 3) and data.train_x.dtype == np.uint8
    assert data.train_x.std() > 10 and data.num_classes == 10
    assert data.centre == pytest.approx((123.675, 116.28, 103.53))
    assert data.name == f"synthetic:{kind}"
    np.testing.assert_array_equal(data.train_y, range(5))


def test_images_are_those_of_the_generator_in_bytes():
    images = generated.KINDS["strokes"](8, 1, seed=3).images(5)
    np.testing.assert_allclose(generate().train_x, 255 * images, atol=0.501)
    assert generate(image_size=12).train_x.shape == (5, 12, 12, 1)


def test_sizes_that_are_not_known():
    with pytest.raises(UserError, match="give --image_size.*--dataset=folder:/no/such"):
        generate(dataset="folder:/no/such")
    assert generate(dataset="folder:/no/such", image_size=16).image_shape == (16, 16, 3)
