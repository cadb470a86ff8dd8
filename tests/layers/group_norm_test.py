"""GroupNorm against a numpy computation, and its errors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.layers import GroupNorm


def normalize_by_hand(images, groups, epsilon):
    """Standardizes each example's groups of channels, one by one, in float64."""
    images = np.asarray(images, "float64")
    result = np.empty_like(images)
    width = images.shape[-1] // groups
    for i in range(len(images)):
        for g in range(groups):
            group = images[i, ..., g * width : (g + 1) * width]
            result[i, ..., g * width : (g + 1) * width] = (group - group.mean()) / np.sqrt(
                group.var() + epsilon
            )
    return result


@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1e-5, 1e-3, 0.1]))
def test_equals_the_definition(groups, width, epsilon):
    images = np.random.default_rng(0).normal(2.0, 3.0, size=(3, 4, 5, groups * width))
    outputs = GroupNorm(groups, epsilon=epsilon, dtype="float64")(images)
    np.testing.assert_allclose(outputs, normalize_by_hand(images, groups, epsilon), atol=1e-10)


def test_sixteen_groups_by_default():
    images = np.random.default_rng(1).normal(size=(2, 3, 3, 64))
    layer = GroupNorm(dtype="float64")
    assert layer.groups == 16
    np.testing.assert_allclose(layer(images), normalize_by_hand(images, 16, 1e-3), atol=1e-10)


@pytest.mark.parametrize("channels", [24, 8])
def test_error_names_the_layer_the_channels_and_fitting_groups(channels):
    fitting = {24: "1, 2, 3, 4, 6, 8, 12, 24", 8: "1, 2, 4, 8"}[channels]
    with pytest.raises(ValueError) as raised:
        GroupNorm(name="first_norm").build((None, 4, 4, channels))
    message = str(raised.value)
    assert "'first_norm'" in message
    assert f"the {channels} channels" in message and "groups=16" in message
    assert f"Use one of groups=[{fitting}]" in message
