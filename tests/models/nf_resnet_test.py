"""NFResNet: its size, and a second construction from the same weights."""

import numpy as np
import pytest
from reference_ops import assert_close, convolve, randomized_weights, relu, standardized

from tfdpx.models import NFResNet, networks


def test_number_of_parameters():
    model = NFResNet(50, num_classes=1000)
    # A ResNet-50 with batch normalization, as published with weights. Gain and bias of a filter
    # replace scale and offset of its normalization, and each block has one gain more.
    assert model.count_params() == 25_557_032 + sum(networks.BLOCKS[50])
    assert not model.non_trainable_weights


def nf_resnet_by_hand(weights, images, blocks):
    """Computes Brock et al. (2021a) from named weights: x + alpha gain f(x / beta)."""
    gamma = 1 / np.sqrt((1 - 1 / np.pi) / 2)

    def conv(x, name, strides=1):
        kernel = standardized(weights[f"{name}/kernel"]) * weights[f"{name}/gain"]
        return convolve(x, kernel, strides) + weights[f"{name}/bias"]

    def max_pool(x):
        padded = np.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)], constant_values=-np.inf)
        size = x.shape[1]
        shifted = [
            padded[:, i : i + size : 2, j : j + size : 2] for i in range(3) for j in range(3)
        ]
        return np.max(shifted, axis=0)

    x = max_pool(conv(images, "stem", 2))
    squared_beta = 1.0
    for stage, count in enumerate(blocks, start=1):
        for block in range(1, count + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            scaled = gamma * relu(x / np.sqrt(squared_beta))
            branch = gamma * relu(conv(scaled, f"{name}_conv1"))
            branch = gamma * relu(conv(branch, f"{name}_conv2", strides))
            branch = conv(branch, f"{name}_conv3")
            if block == 1:
                x, squared_beta = conv(scaled, f"{name}_skip", strides), 1.0
            x = x + 0.2 * weights[f"{name}_skip_init/gain"] * branch
            squared_beta += 0.2**2
    features = gamma * relu(x).mean(axis=(1, 2))
    return features @ weights["logits/kernel"] + weights["logits/bias"]


def test_same_logits_from_a_second_construction():
    blocks = networks.BLOCKS[50]
    model = NFResNet(50, 10, input_shape=(32, 32, 3), width=16)
    weights = randomized_weights(model)
    images = np.random.default_rng(1).normal(size=(2, 32, 32, 3))
    assert_close(model(images), nf_resnet_by_hand(weights, images, blocks))
    gain = model.get_layer("stage4_block2_skip_init").gain
    gain.assign(1.1 * gain)
    with pytest.raises(AssertionError):
        assert_close(model(images), nf_resnet_by_hand(weights, images, blocks))
