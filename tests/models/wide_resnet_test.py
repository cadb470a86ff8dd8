"""WideResNet: size, shape of the residual blocks, initialisation, errors."""

import keras
import numpy as np
import pytest

from tfdpx.layers import GroupNorm, WSConv2D
from tfdpx.models import WideResNet

PUBLISHED_MILLIONS = {(16, 4): 2.75, (40, 4): 8.9, (28, 10): 36.5}


def count_by_hand(depth, width, num_classes):
    """Adds up kernels and normalizations from the description of the network alone."""
    blocks = (depth - 4) // 6
    total = 3 * 3 * 3 * 16  # stem
    channels = 16
    for stage in range(3):
        wide = 16 * 2**stage * width
        for _ in range(blocks):
            total += 2 * channels + 9 * channels * wide  # norm, conv
            total += 2 * wide + 9 * wide * wide
            if channels != wide:
                total += channels * wide  # 1x1 projection
            channels = wide
    return total + 2 * channels + (channels + 1) * num_classes


@pytest.mark.parametrize(("depth", "width"), [*PUBLISHED_MILLIONS, (10, 1), (22, 2)])
def test_number_of_parameters(depth, width):
    model = WideResNet(depth, width, num_classes=10)
    assert model.count_params() == count_by_hand(depth, width, 10)
    if (depth, width) in PUBLISHED_MILLIONS:
        published = PUBLISHED_MILLIONS[depth, width] * 1e6
        assert abs(model.count_params() / published - 1.0) < 0.01


def test_depth_counts_the_weighted_layers():
    depth = 16
    model = WideResNet(depth, 2, 10)
    convs = [layer for layer in model.layers if isinstance(layer, WSConv2D)]
    three_by_three = [layer for layer in convs if layer.kernel_size == (3, 3)]
    # Zagoruyko & Komodakis count the three projections in place of the logits.
    assert len(convs) == depth
    assert len(three_by_three) == depth - 3
    assert [layer.strides for layer in convs].count((2, 2)) == 4  # a conv and a skip, twice
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
    assert not any(isinstance(layer, keras.layers.Dropout) for layer in model.layers)
    norms = [layer for layer in model.layers if isinstance(layer, GroupNorm)]
    assert len(norms) == depth - 3
    assert {norm.groups for norm in norms} == {16}


def test_weights_are_gaussian_of_variance_one_over_fan_in():
    model = WideResNet(10, 4, 1000, input_shape=(8, 8, 3))
    kernels = [weight for weight in model.weights if weight.name == "kernel"]
    assert len(kernels) == 11
    for weight in kernels:
        kernel = np.asarray(weight)
        scaled = kernel.ravel() * np.sqrt(np.prod(kernel.shape[:-1]))
        error = 5 / np.sqrt(scaled.size)  # five standard errors, up to the factor below
        assert abs(scaled.mean()) < error, weight.path
        assert abs(scaled.var() - 1.0) < np.sqrt(2.0) * error, weight.path
        assert abs((scaled**4).mean() - 3.0) < np.sqrt(96.0) * error, weight.path
    biggest = max(kernels, key=lambda weight: np.prod(weight.shape))
    scaled = np.asarray(biggest) * np.sqrt(np.prod(biggest.shape[:-1]))
    # A truncated Gaussian of unit variance has nothing beyond 2.28.
    assert 0.015 < (np.abs(scaled) > 2.28).mean() < 0.030


def test_any_image_size_and_plain_convolutions():
    model = WideResNet(
        10, 1, 7, input_shape=(None, None, 1), groups=4, weight_standardization=False, name="plain"
    )
    assert model.name == "plain"
    assert not any(isinstance(layer, WSConv2D) for layer in model.layers)
    assert model(np.zeros((2, 12, 20, 1))).shape == (2, 7)
    assert WideResNet(10, 1, 7).name == "wide_resnet_10_1"


def test_without_normalization():
    model = WideResNet(16, 2, 10, groups=None)
    assert not any(isinstance(layer, GroupNorm) for layer in model.layers)
    norms = [layer for layer in WideResNet(16, 2, 10).layers if isinstance(layer, GroupNorm)]
    assert model.count_params() == count_by_hand(16, 2, 10) - sum(n.count_params() for n in norms)
    assert model(np.zeros((2, 32, 32, 3))).shape == (2, 10)


@pytest.mark.parametrize(("depth", "nearest"), [(4, "10"), (18, "16 or 22")])
def test_error_lists_the_nearest_depths(depth, nearest):
    with pytest.raises(ValueError, match=rf"6n \+ 4.*Received: depth={depth}.*: {nearest}\.$"):
        WideResNet(depth, 4, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, "`width` must be a positive integer. Received: width=0"),
        ({"num_classes": -1}, "`num_classes` must be a positive integer"),
        ({"groups": 12}, "`groups` must divide 16.*Received: groups=12. Use 1, 2, 4, 8 or 16"),
        ({"input_shape": (None, 32, 32, 3)}, "without the batch axis"),
        ({"input_shape": (32, 32, None)}, "known number of channels"),
        (
            {"use_gain": True, "weight_standardization": False},
            "`use_gain` must be False with",
        ),
        ({"relu_first": True, "groups": None}, "`relu_first`.*groups=None"),
    ],
)
def test_errors_name_argument_value_and_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        WideResNet(**{"depth": 16, "width": 4, "num_classes": 10, **arguments})
