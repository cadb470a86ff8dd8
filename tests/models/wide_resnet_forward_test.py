"""WideResNet computes what the papers describe: a second construction from the same weights."""

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

from tfdpx.models import WideResNet


def wide_resnet(weights, images, depth, width, groups, relu_first=False):
    """Zagoruyko & Komodakis (2016) with the changes of De et al. (2022), from named weights."""

    def conv(x, name, strides=1):
        return convolve(x, standardized(weights[f"{name}/kernel"]), strides)

    def norm(x, name):
        return group_norm(x, groups, weights[f"{name}/gamma"], weights[f"{name}/beta"])

    def norm_relu(x, name):
        return norm(relu(x), name) if relu_first else relu(norm(x, name))

    x = conv(images, "stem")
    for stage in (1, 2, 3):
        for block in range(1, (depth - 4) // 6 + 1):
            name = f"stage{stage}_block{block}"
            strides = 2 if block == 1 and stage != 1 else 1
            branch = conv(norm_relu(x, f"{name}_1_norm"), f"{name}_conv1", strides)
            branch = conv(norm_relu(branch, f"{name}_2_norm"), f"{name}_conv2")
            if x.shape != branch.shape:
                x = conv(x, f"{name}_skip", strides)
            assert branch.shape[-1] == 2**stage * 8 * width
            x = x + branch
    features = norm_relu(x, "head_norm").mean(axis=(1, 2))
    return features @ weights["logits/kernel"] + weights["logits/bias"]


@pytest.mark.parametrize(("depth", "width", "size", "groups"), [(16, 4, 32, 16), (28, 2, 12, 8)])
def test_same_logits_from_a_second_construction(depth, width, size, groups):
    model = WideResNet(depth, width, 10, input_shape=(size, size, 3), groups=groups)
    weights = randomized_weights(model)
    images = np.random.default_rng(1).normal(size=(2, size, size, 3))
    wanted = wide_resnet(weights, images, depth, width, groups)
    assert_close(model(images), wanted)
    # Every weight matters: the comparison would notice a part that is left out.
    assert len(weights) == len(model.trainable_weights)
    regrouped = wide_resnet(weights, images, depth, width, 4)
    with pytest.raises(AssertionError):
        assert_close(model(images), regrouped)


def test_same_logits_with_relu_before_each_normalization():
    shape = (16, 16, 3)
    model = WideResNet(16, 2, 10, input_shape=shape, relu_first=True)
    weights = randomized_weights(model)
    images = np.random.default_rng(1).normal(size=(2, *shape))
    assert_close(model(images), wide_resnet(weights, images, 16, 2, 16, relu_first=True))
    with pytest.raises(AssertionError):
        assert_close(model(images), wide_resnet(weights, images, 16, 2, 16))
