"""Classifiers by name: normalised inside, logits outside, refused by name."""

import numpy as np
import pytest
from cases import slow

from tfdpx.train.config.errors import UserError
from tfdpx.train.run import classifiers


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("small_cnn", (8, 8, 1)),
        ("scatter_linear", (8, 8, 1)),
        slow("scatter_cnn", (32, 32, 3)),
        ("lenet", (28, 28, 1)),
        ("wrn_10_1", (32, 32, 3)),
        slow("nf_resnet_26", (32, 32, 3)),
    ],
)
def test_bytes_become_logits(name, shape):
    model = classifiers.build(name, shape, num_classes=7, centre=127.5)
    images = np.random.default_rng(0).integers(0, 256, (2, *shape)).astype("uint8")
    assert model(images).shape == (2, 7)
    assert model.input.dtype == "uint8"


def test_images_are_normalised_around_the_centre():
    model = classifiers.build("small_cnn", (8, 8, 1), num_classes=10, centre=120.0)
    images = np.arange(0, 241, 15, dtype="uint8")[:16].reshape(1, 4, 4, 1)
    normalised = model.get_layer("normalise")(images)
    np.testing.assert_allclose(np.ravel(normalised), np.arange(16) / 8 - 1, atol=1e-6)


def test_scattering_features_take_values_from_zero_to_one():
    model = classifiers.build("scatter_linear", (8, 8, 1), num_classes=10, centre=120.0)
    images = np.array([0, 51, 255, 102], "uint8").reshape(1, 2, 2, 1)
    np.testing.assert_allclose(
        np.ravel(model.get_layer("normalise")(images)), [0, 0.2, 1, 0.4], atol=1e-6
    )


UNKNOWN = ["resnet", "", "wrn", "wrn_16", "wrn_16_4x", "WRN_16_4"]


def test_unknown_model_lists_the_known_ones():
    for name in UNKNOWN:
        with pytest.raises(UserError, match="small_cnn, scatter_linear, scatter_cnn, lenet"):
            classifiers.build(name, (8, 8, 1), 10, 120.0)


def test_relu_first_is_of_wide_resnets():
    made = classifiers.build("wrn_10_1", (8, 8, 3), 10, 120.0, relu_first=True)
    body = made.get_layer("wide_resnet_10_1")
    assert body.get_layer("head_norm").input is body.get_layer("head_relu").output
    with pytest.raises(UserError, match="--relu_first.*--model=small_cnn"):
        classifiers.build("small_cnn", (8, 8, 1), 10, 120.0, relu_first=True)


NO_SUCH_SIZE = ["wrn_17_4", "wrn_16_0", "lenet", "nf_resnet_34"]


def test_model_that_does_not_exist_at_that_size():
    for name in NO_SUCH_SIZE:
        with pytest.raises(UserError, match="Argument `(depth|width|input_shape)`"):
            classifiers.build(name, (8, 8, 1), 10, 120.0)
