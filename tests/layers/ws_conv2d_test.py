"""WSConv2D against a per-filter numpy computation and against keras.layers.Conv2D."""

import keras
import numpy as np
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.layers import WSConv2D


def standardize_by_hand(kernel, gain=1.0, epsilon=1e-4):
    """Standardizes by appendix C.1 of De et al. (2022), in float64; a row for each weight."""
    filters = np.asarray(kernel, "float64").reshape(-1, kernel.shape[-1])
    filters = filters - filters.mean(axis=0)
    filters = filters / np.sqrt(np.maximum((filters**2).sum(axis=0), epsilon))
    return (filters * gain).reshape(kernel.shape)


@st.composite
def conv_arguments(draw):
    """Draws the arguments of a convolution, the channels of its input and the input's size."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    strides, dilation = draw(st.sampled_from([(1, 1), (2, 1), ((2, 1), 1), (1, 2), (1, (1, 2))]))
    arguments = {
        "filters": groups * draw(st.integers(1, 3)),
        "kernel_size": draw(st.sampled_from([1, 2, 3, (1, 3), (3, 2)])),
        "strides": strides,
        "dilation_rate": dilation,
        "padding": draw(st.sampled_from(["same", "valid"])),
        "groups": groups,
        "use_bias": draw(st.booleans()),
        "activation": draw(st.sampled_from([None, "relu", "tanh"])),
    }
    return arguments, groups * draw(st.integers(2, 3)), draw(st.integers(5, 8))


@given(conv_arguments(), st.booleans())
def test_equals_conv2d_with_the_standardized_kernel(drawn, use_gain):
    arguments, channels, size = drawn
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, size, size + 1, channels)).astype("float32")
    layer = WSConv2D(**arguments, use_gain=use_gain, bias_initializer="random_normal")
    plain = keras.layers.Conv2D(**arguments)
    layer.build(images.shape)
    plain.build(images.shape)
    gain = 1.0
    if use_gain:
        gain = rng.normal(size=layer.filters)
        layer.gain.assign(gain)
    plain.kernel.assign(standardize_by_hand(layer.kernel, gain))
    if layer.use_bias:
        plain.bias.assign(layer.bias)
    assert layer.compute_output_shape(images.shape) == plain(images).shape
    np.testing.assert_allclose(layer(images), plain(images), atol=2e-5)


def test_epsilon_bounds_the_blow_up_of_nearly_constant_filters():
    layer = WSConv2D(2, 3, epsilon=1e-2)
    layer.build((None, 8, 8, 3))
    kernel = np.full((3, 3, 3, 2), 5.0)
    kernel[0, 0, 0] = [5.01, 8.0]  # fan_in * var: 1e-4 is below the bound, 8.7 above.
    layer.kernel.assign(kernel)
    squared_norms = (layer.standardized_kernel().numpy() ** 2).sum((0, 1, 2))
    np.testing.assert_allclose(squared_norms, [1e-4 * 26 / 27 / 1e-2, 1.0], rtol=1e-3)


def test_statistics_stay_in_float32_under_mixed_precision():
    layer = WSConv2D(4, 3, use_gain=True, dtype="mixed_bfloat16")
    images = np.random.default_rng(4).normal(size=(2, 8, 8, 3)).astype("float32")
    layer.build(images.shape)
    # bfloat16 keeps eight bits, so a weight of 100 + N(0, 1) would lose nearly all of its
    # variation.
    layer.kernel.assign(100.0 + np.random.default_rng(5).normal(size=layer.kernel.shape))
    assert layer(images).dtype == tf.bfloat16
    assert layer.standardized_kernel().dtype == tf.float32
    expected = standardize_by_hand(layer.kernel)
    np.testing.assert_allclose(layer.standardized_kernel(), expected, rtol=1e-3, atol=1e-4)
