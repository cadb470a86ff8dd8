"""WSConv2D against a per-filter numpy computation and against keras.layers.Conv2D."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.layers import WSConv2D


def standardize_by_hand(kernel, gain=None, epsilon=1e-4, ddof=0):
    """Appendix C.1 of De et al. (2022), one filter at a time, in float64."""
    kernel = np.asarray(kernel, "float64")
    result = np.empty_like(kernel)
    for o in range(kernel.shape[-1]):
        weights = kernel[..., o].ravel()
        fan_in = len(weights)
        mean = sum(weights) / fan_in
        variance = sum((weights - mean) ** 2) / (fan_in - ddof)
        scale = 1.0 / np.sqrt(max(fan_in * variance, epsilon))
        result[..., o] = (kernel[..., o] - mean) * scale * (1.0 if gain is None else gain[o])
    return result


def convolve_by_hand(images, kernel, bias):
    """Stride-1 cross-correlation without padding, by the definition."""
    kernel_height, kernel_width, _, filters = kernel.shape
    height, width = images.shape[1] - kernel_height + 1, images.shape[2] - kernel_width + 1
    outputs = np.empty((len(images), height, width, filters))
    for i in range(height):
        for j in range(width):
            patch = images[:, i : i + kernel_height, j : j + kernel_width]
            outputs[:, i, j] = np.tensordot(patch, kernel, axes=3) + bias
    return outputs


@st.composite
def conv_arguments(draw):
    """Arguments of a convolution, the channels of its input and the input's size."""
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
    gain = None
    if use_gain:
        gain = rng.normal(size=layer.filters)
        layer.gain.assign(gain)
    plain.kernel.assign(standardize_by_hand(layer.kernel, gain))
    if layer.use_bias:
        plain.bias.assign(layer.bias)
    outputs = layer(images)
    assert outputs.shape == layer.compute_output_shape(images.shape)
    np.testing.assert_allclose(outputs, plain(images), atol=2e-5)


def test_equals_the_definition():
    layer = WSConv2D(5, (3, 2), bias_initializer="random_normal")
    images = np.random.default_rng(1).normal(size=(2, 6, 5, 4)).astype("float32")
    outputs = layer(images)
    expected = convolve_by_hand(images, standardize_by_hand(layer.kernel), np.asarray(layer.bias))
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


@pytest.mark.planted("statistics of the kernel of WSConv2D")
def test_oracle_rejects_planted_bugs():
    layer = WSConv2D(4, 3)
    layer.build((None, 8, 8, 3))
    kernel = np.asarray(layer.kernel, "float64")
    right = layer.standardized_kernel().numpy()
    planted = {
        "sample variance": standardize_by_hand(kernel, ddof=1),
        "no fan-in": standardize_by_hand(kernel) * np.sqrt(27),
        "statistics of the whole kernel": (kernel - kernel.mean()) / kernel.std() / np.sqrt(27),
        "mean not removed": kernel / kernel.std((0, 1, 2)) / np.sqrt(27),
    }
    np.testing.assert_allclose(right, standardize_by_hand(kernel), atol=1e-6)
    for bug, wrong in planted.items():
        assert np.abs(right - wrong).max() > 1e-3, bug


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_have_zero_mean_and_unit_norm(groups):
    layer = WSConv2D(6, 3, groups=groups)
    layer.build((None, 8, 8, 4))
    assert layer.kernel.shape == (3, 3, 4 // groups, 6)
    kernel = layer.standardized_kernel().numpy()
    np.testing.assert_allclose(kernel.sum((0, 1, 2)), 0.0, atol=1e-5)
    np.testing.assert_allclose((kernel**2).sum((0, 1, 2)), 1.0, rtol=1e-5)


def test_epsilon_bounds_the_blow_up_of_nearly_constant_filters():
    layer = WSConv2D(2, 3, epsilon=1e-2)
    layer.build((None, 8, 8, 3))
    kernel = np.full((3, 3, 3, 2), 5.0)
    kernel[0, 0, 0] = [5.01, 8.0]  # fan_in * var: 1e-4 is below the bound, 8.7 above.
    layer.kernel.assign(kernel)
    squared_norms = (layer.standardized_kernel().numpy() ** 2).sum((0, 1, 2))
    np.testing.assert_allclose(squared_norms, [1e-4 * 26 / 27 / 1e-2, 1.0], rtol=1e-3)


def test_gradient_is_that_of_the_raw_kernel():
    layer = WSConv2D(3, 3, use_gain=True, dtype="float64")
    images = np.random.default_rng(2).normal(size=(2, 7, 7, 2))
    layer.build(images.shape)

    def loss():
        return tf.reduce_sum(tf.sin(layer(images)))

    with tf.GradientTape() as tape:
        value = loss()
    kernel = layer.kernel.numpy()
    gradient = tape.gradient(value, layer.kernel.value).numpy()
    # Shifting or scaling a filter leaves the layer's output alone.
    np.testing.assert_allclose(gradient.sum((0, 1, 2)), 0.0, atol=1e-10)
    np.testing.assert_allclose((gradient * kernel).sum((0, 1, 2)), 0.0, atol=1e-10)
    direction = np.random.default_rng(3).normal(size=kernel.shape)
    step = 1e-6
    layer.kernel.assign(kernel + step * direction)
    above = loss()
    layer.kernel.assign(kernel - step * direction)
    slope = (above - loss()) / (2 * step)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6)
    assert abs(slope) > 0.1


def test_statistics_stay_in_float32_under_mixed_precision():
    layer = WSConv2D(4, 3, use_gain=True, dtype="mixed_bfloat16")
    images = np.random.default_rng(4).normal(size=(2, 8, 8, 3)).astype("float32")
    layer.build(images.shape)
    # bfloat16 keeps eight bits: a weight of 100 + N(0, 1) would lose nearly all of its variation.
    layer.kernel.assign(100.0 + np.random.default_rng(5).normal(size=layer.kernel.shape))
    used = {}
    convolve = keras.layers.Conv2D.convolution_op

    def spy(self, inputs, kernel):
        used["kernel"] = kernel
        return convolve(self, inputs, kernel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.layers.Conv2D, "convolution_op", spy)
        outputs = layer(images)
    assert outputs.dtype == used["kernel"].dtype == tf.bfloat16
    assert layer.standardized_kernel().dtype == tf.float32
    expected = standardize_by_hand(layer.kernel)
    np.testing.assert_allclose(tf.cast(used["kernel"], "float32"), expected, rtol=1e-2, atol=1e-3)


def test_channels_first():
    images = np.random.default_rng(9).normal(size=(2, 5, 8, 7)).astype("float32")
    try:
        keras.layers.Conv2D(4, 3, data_format="channels_first")(images)
    except tf.errors.UnimplementedError:
        pytest.skip("TensorFlow convolves no channels first on this processor")
    layer = WSConv2D(4, 3, data_format="channels_first")
    outputs = layer(images)
    expected = convolve_by_hand(
        images.transpose(0, 2, 3, 1), standardize_by_hand(layer.kernel), np.asarray(layer.bias)
    )
    np.testing.assert_allclose(outputs, expected.transpose(0, 3, 1, 2), atol=1e-5)


def test_refuses_a_fan_in_of_one():
    layer = WSConv2D(4, 1, groups=4, name="pointwise")
    with pytest.raises(ValueError, match=r"'pointwise' has a fan-in of one.*Use keras.layers.Conv"):
        layer.build((None, 8, 8, 4))


@pytest.mark.parametrize("epsilon", [0.0, -1e-4])
def test_refuses_a_non_positive_epsilon(epsilon):
    with pytest.raises(ValueError, match=r"Argument `epsilon` must be positive. Received"):
        WSConv2D(4, 3, epsilon=epsilon)
