"""WideResNet: a second construction from the same weights, size, initialisation, errors."""

import keras
import numpy as np
import pytest
from reference_ops import (
    assert_close,
    convolve,
    group_norm,
    randomized_weights,
    relu,
    standardized,
)

from tfdpx.layers import WSConv2D
from tfdpx.models import WideResNet

CODE = dict(use_gain=True, use_bias=True, norm_before_relu=False, projection_norm=True)


def wide_resnet(weights, images, depth, groups, norm_before_relu=True):
    """Computes Zagoruyko & Komodakis (2016) with the changes of De et al. (2022).

    Gains, biases and normalized projections are applied where `weights` has them.
    """

    def conv(x, name, strides=1):
        kernel = standardized(weights[f"{name}/kernel"]) * weights.get(f"{name}/gain", 1.0)
        return convolve(x, kernel, strides) + weights.get(f"{name}/bias", 0.0)

    def norm_relu(x, name):
        gamma, beta = weights[f"{name}/gamma"], weights[f"{name}/beta"]
        x = x if norm_before_relu else relu(x)
        x = group_norm(x, groups, gamma, beta)
        return relu(x) if norm_before_relu else x

    x = conv(images, "stem")
    for stage in (1, 2, 3):
        for block in range(1, (depth - 4) // 6 + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if block == 1 and stage != 1 else 1
            branch = conv(norm_relu(x, f"{name}_1_norm"), f"{name}_conv1", strides)
            branch = conv(norm_relu(branch, f"{name}_2_norm"), f"{name}_conv2")
            if f"{name}_skip_norm/gamma" in weights:
                x = norm_relu(x, f"{name}_skip_norm")
            if f"{name}_skip/kernel" in weights:
                x = conv(x, f"{name}_skip", strides)
            x = x + branch
    features = norm_relu(x, "head_norm").mean(axis=(1, 2))
    return features @ weights["logits/kernel"] + weights["logits/bias"]


@pytest.mark.parametrize(
    ("depth", "width", "size", "groups", "arguments"),
    [
        (16, 4, 32, 16, {}),
        (28, 2, 12, 8, {}),
        (16, 2, 16, 16, dict(norm_before_relu=False)),
        (16, 1, 16, 16, CODE),
        (10, 2, 16, 8, dict(CODE, norm_before_relu=True, use_gain=False)),
    ],
)
def test_same_logits_from_a_second_construction(depth, width, size, groups, arguments):
    model = WideResNet(depth, width, 10, input_shape=(size, size, 3), groups=groups, **arguments)
    weights = randomized_weights(model)
    # Every weight matters, so the comparison would notice a missing part.
    assert len(weights) == len(model.trainable_weights)
    images = np.random.default_rng(1).normal(size=(2, size, size, 3))
    order = arguments.get("norm_before_relu", True)
    assert_close(model(images), wide_resnet(weights, images, depth, groups, order))
    for other in (depth, 4, order), (depth, groups, not order):
        with pytest.raises(AssertionError):
            assert_close(model(images), wide_resnet(weights, images, *other))


def test_any_image_size_and_plain_convolutions():
    model = WideResNet(
        10, 1, 7, input_shape=(None, None, 1), groups=4, weight_standardization=False, name="plain"
    )
    assert model.name == "plain"
    assert not any(isinstance(layer, WSConv2D) for layer in model.layers)
    assert model(np.zeros((2, 12, 20, 1))).shape == (2, 7)
    assert not any(isinstance(layer, keras.layers.BatchNormalization) for layer in model.layers)
