"""Defines a convolution with weight standardization, and the rule for its per-example gradients."""

from __future__ import annotations

import functools
import math
import typing
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tfdpx._arguments import require
from tfdpx._keras import layer_internals
from tfdpx.per_example import register, rounding
from tfdpx.per_example.rowwise import register_rowwise
from tfdpx.per_example.rules.convolution import Conv2DRule, channels_last


@keras.saving.register_keras_serializable(package="tfdpx")
class WSConv2D(keras.layers.Conv2D):
    """A 2D convolution that standardizes the kernel of each filter.

    The layer replaces `keras.layers.Conv2D`. For each output channel `o` the convolution uses,
    instead of the raw kernel `w`,

    `w_hat[..., o] = gain[o] * (w[..., o] - mean[o]) / sqrt(max(fan_in * var[o], epsilon))`

    `mean` and `var` are the mean and the population variance of the `fan_in` weights of the filter,
    with `fan_in = kernel height * kernel width * input channels / groups`. The layer standardizes
    the kernel in each call, so gradients are for the raw kernel. Weight standardization can replace
    batch normalization under differential privacy, because it uses only weights and keeps examples
    separate.

    Args:
        filters: Integer, the number of output channels.
        kernel_size: Integer or pair of integers, the size of the window.
        *args: More positional arguments of `keras.layers.Conv2D`, for example `strides`.
        use_gain: Boolean, whether each filter has a trainable scale, a weight `gain` of shape
            `[filters]` that starts at one (Brock et al., 2021a). De et al. (2022), appendix C.1,
            use no such scale.
        epsilon: Float, the lower bound of `fan_in * var`. It keeps filters with nearly equal
            weights from being scaled up too much, and has no effect on other filters. The default
            is 1e-4, as in Brock et al.
        **kwargs: Arguments of `keras.layers.Conv2D`: `strides`, `padding`, `data_format`,
            `dilation_rate`, `groups`, `activation`, `use_bias`, initializers, regularizers,
            constraints, `name`, `dtype`. Regularizers and constraints act on the raw kernel.

    Call arguments and output shapes are as in `keras.layers.Conv2D`. Under mixed precision, the
    layer standardizes the kernel in float32, and convolves in the compute dtype.

    Raises:
        ValueError: If `epsilon` is not positive, or if a filter has a single weight, because that
            weight would always be standardized to zero.

    Example:
    >>> layer = WSConv2D(4, 3, padding="same", activation="relu")
    >>> layer(np.zeros((2, 8, 8, 3))).shape
    TensorShape([2, 8, 8, 4])
    >>> float(np.abs(np.sum(layer.standardized_kernel(), axis=(0, 1, 2))).max()) < 1e-5
    True

    References:
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), appendix C.1.
        - [Brock et al., 2021a](https://arxiv.org/abs/2101.08692), section 3.
        - [Qiao et al., 2019](https://arxiv.org/abs/1903.10520).
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        *args: Any,
        use_gain: bool = False,
        epsilon: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(filters, kernel_size, *args, **kwargs)
        require(epsilon > 0, "epsilon", epsilon, "be positive", " Use the default, 1e-4.")
        self.use_gain = use_gain
        self.epsilon = epsilon

    def build(self, input_shape: Any) -> None:
        """Creates `kernel`, `bias` and, with `use_gain`, `gain`."""
        channels = input_shape[-1 if self.data_format == "channels_last" else 1]
        if math.prod(self.kernel_size) * channels // self.groups < 2:
            raise ValueError(
                f"Layer {self.name!r} has a fan-in of one, and standardizing a single weight gives "
                f"zero. Received: kernel_size={self.kernel_size}, groups={self.groups}, "
                f"{channels} input channels. Use keras.layers.Conv2D here, a larger kernel or "
                "fewer groups."
            )
        super().build(input_shape)
        self.gain = None
        if self.use_gain:
            self.gain = self.add_weight(name="gain", shape=(self.filters,), initializer="ones")

    def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """Creates a weight. `kernel` and `gain` are not cast to the compute dtype.

        Otherwise, under mixed precision, the kernel would be rounded before it is standardized.
        """
        if kwargs.get("name") in ("kernel", "gain"):
            kwargs["autocast"] = False
        return super().add_weight(*args, **kwargs)

    def standardized_kernel(self) -> tf.Tensor:
        """Returns the standardized kernel that the convolution uses.

        Returns:
            float32 tensor (float64 if the layer's weights are float64) of shape `[kernel height,
            kernel width, input channels / groups, filters]`. It has gradients with respect to
            `kernel` and `gain`.
        """
        return self._standardize(self.kernel)

    def convolution_op(self, inputs: Any, kernel: Any) -> tf.Tensor:
        """Returns the convolution of `inputs` with the standardized kernel, in the compute dtype.

        Args:
            inputs: Tensor of images, in the layer's data format.
            kernel: Tensor, the raw kernel.
        """
        kernel = ops.cast(self._standardize(kernel), self.compute_dtype)
        return super().convolution_op(inputs, kernel)

    def _standardize(self, kernel):
        kernel = ops.cast(kernel, keras.backend.result_type(self.variable_dtype, "float32"))
        fan_in = math.prod(kernel.shape[:-1])
        centered = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        variance = ops.mean(ops.square(centered), axis=(0, 1, 2), keepdims=True)
        scale = ops.rsqrt(ops.maximum(variance * fan_in, self.epsilon))
        if self.use_gain:
            scale = scale * ops.cast(self.gain, kernel.dtype)
        return centered * scale

    def save_own_variables(self, store: Any) -> None:
        """Stores the weights, as for any Keras layer."""
        super().save_own_variables(store)
        if self.built and self.use_gain:  # Conv2D has stored only its kernel and bias.
            store["gain"] = self.gain

    def load_own_variables(self, store: Any) -> None:
        """Restores the weights, as for any Keras layer."""
        super().load_own_variables(store)
        if self.built and self.use_gain:
            self.gain.assign(store["gain"])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        return {**super().get_config(), "use_gain": self.use_gain, "epsilon": self.epsilon}


# The axes of a filter in a kernel, in the order in which sums are taken: first height and width
# together, then input channels.
_BY_AXIS = [[-4, -3], -2]


register_rowwise(WSConv2D)


class Standardized(typing.NamedTuple):
    """The standardized kernel u without its gain, and constants for `WSConv2DRule`.

    Let G be a gradient for u. The docstring of `WSConv2DRule` derives two formulas for each filter,
    with the raw weights w and the scale s:

        gradient for w = s (G - m sum(G) - f u <u, G>)
        its squared norm = s^2 |G|^2 - s^2 m sum(G)^2 - s^2 f <u, G>^2

    Here m is 1 / fan_in. f is 1, or 0 for filters where epsilon keeps s constant.

    Attributes:
        unit: float32 [kernel height, kernel width, input channels / groups, filters], u.
        scale: float32 [filters], s.
        shares: float32 [2, filters], m and f.
        weights: float32 [3, filters], the factors s^2, s^2 m and s^2 f.
    """

    unit: tf.Tensor
    scale: tf.Tensor
    shares: tf.Tensor
    weights: tf.Tensor

    def to_raw(self, gradients):
        """Converts gradients for the standardized kernel u to gradients for the raw kernel.

        Args:
            gradients: float32 tensor [..., *kernel shape], the gradients for u times `scale`.

        Returns:
            float32 tensor of the same shape.
        """
        both = tf.stack([gradients, gradients * self.unit])
        sums = tf.unstack(rounding.sum_by_axis(both, _BY_AXIS, keepdims=True))
        total, along = (s * share for s, share in zip(sums, tf.unstack(self.shares), strict=True))
        return gradients - total - self.unit * along


@register(WSConv2D)
class WSConv2DRule(Conv2DRule):
    """The rule for per-example gradients of `WSConv2D`.

    It applies the rule of `Conv2D` to the standardized kernel, and converts the result to the raw
    kernel. For a filter with raw weights w, let c = w - mean(w), s = 1/sqrt(max(|c|^2, epsilon))
    and u = c s. The layer is called in parts: first the convolution with u, then gain and bias. Let
    G be the gradient for u. Then the gradient for w is `s (G - mean(G) - u <u, G>)`, without the
    last term for filters where epsilon keeps s constant.

    The squared norm of this gradient is `s^2 (|G|^2 - (1^T G)^2 / fan_in - <u, G>^2)`, because u is
    a unit vector with mean zero. Let a_t be the patch of the input at position t, and g_t the
    output gradient. The inner products 1^T G and <u, G> are sums over positions: `sum_t (1^T a_t)
    g_t` and `sum_t (u^T a_t) g_t`, where `u^T a_t` is the output of the convolution. So the rule
    can compute both without an array of the kernel's size for each example.
    """

    assumes = ("call", "convolution_op", "kernel", "_standardize", "standardized_kernel")

    @classmethod
    def shared(cls, layer):
        """Returns the `Standardized` kernel of the layer. See `Rule.shared`."""
        kernel = tf.cast(tf.convert_to_tensor(layer.kernel.value), "float32")
        centered = kernel - tf.reduce_mean(kernel, axis=[0, 1, 2])
        squares = tf.reduce_sum(tf.square(centered), axis=[0, 1, 2])
        scale = tf.math.rsqrt(tf.maximum(squares, layer.epsilon))
        free = tf.cast(squares > layer.epsilon, "float32")
        means = np.full(free.shape, 1.0 / math.prod(kernel.shape[:3]), "float32")
        weights = tf.stack([np.ones_like(means), means, free]) * tf.square(scale)
        return Standardized(centered * scale, scale, tf.stack([means, free]), weights)

    @classmethod
    def forward(cls, call, watch):
        """Calls the layer: first the convolution with u, then gain, bias and activation."""
        layer = call.layer
        parts = {"activation": None, "use_bias": False, "use_gain": False}
        if layer.variable_dtype != "float64":
            parts["_standardize"] = lambda kernel: call.shared.unit
        plain = layer_internals.without(layer, **parts)
        outputs = watch(layer_internals.call_operation(plain, call.args, call.kwargs))
        call.kept["convolved"] = outputs
        if layer.use_gain:
            outputs = watch(outputs * _by_channel(layer, layer.gain, outputs))
        if layer.use_bias:
            outputs = outputs + _by_channel(layer, layer.bias, outputs)
        return call.activate(outputs)

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        self.standardized = call.shared
        self.filter_scale = call.shared.scale

    @property
    def weights(self):
        """Returns the weights of the rows of `statistics` in the squared norm, see `Conv2DRule`."""
        weights = self.standardized.weights
        return weights if self._by_kernels else weights[:1]

    @property
    def post_sum_transforms(self):
        """Returns a dict from the kernel's id to a function that converts the clipped sum for u."""

        def to_raw(total, standardized):
            return standardized.to_raw(total * standardized.scale)

        return {id(self.layer.kernel): to_raw}

    def to_kernel(self, gradients):
        """Converts gradients for u, times `filter_scale`, to gradients for the raw kernel."""
        return self.standardized.to_raw(gradients)

    def to_sum(self, total):
        """Returns the sum of gradients unchanged: `post_sum_transforms` converts it."""
        return total

    @property
    def unit(self):
        """Returns u if `statistics` must include the inner products with u, else None."""
        return self.standardized.unit if self._by_kernels else None

    def measured(self, measurements):
        """Converts norms of gradients for u to norms of gradients for the raw kernel.

        In the result, `squares` has three columns [B, 3]: the sums over all filters of the three
        terms of the squared norm in `Standardized`. The result also has bounds on the rounding
        errors of `sum(G)` and `<u, G>`. If these are computed as sums over positions, a term of the
        sum is an inner product with a vector of norm one. So the error is at most the relative
        error of the sum, times the sum of the absolute values of its terms.

        Args:
            measurements: `rounding.Measured` of the gradients for u times `filter_scale`.
        """
        fan_in = math.prod(self.kernel_shape[:3])
        by_axis = self.window.taps + self.kernel_shape[2]
        if self._by_kernels:
            errors = [rounding.UNIT * (fan_in + rounding.EXTRA)] * 2
        else:
            positions = self.sizes()[1]
            factors = self._patch_sums(), self._convolved()
            products = [self.sum_positions(factor * self.scaled_gradients) for factor in factors]
            squares = tf.square(tf.stack(products, axis=1))
            removed = tf.reduce_sum(squares * self.standardized.shares, axis=2)
            measurements = measurements._replace(
                squares=tf.concat([measurements.squares, removed], axis=1)
            )
            counts = (
                self.window.taps + self.kernel_shape[2],
                rounding.count_sequential_terms(fan_in),
            )
            errors = [rounding.dot_error(n + positions) for n in counts]
        # The relative error of the sums of squares, of their subtraction, and of the conversion of
        # the sum to the raw kernel.
        relative = (2 * by_axis + self.kernel_shape[3] + rounding.EXTRA) * rounding.UNIT
        return measurements._replace(removed_errors=tuple(errors), removed_relative=relative)

    @property
    def _by_kernels(self):
        """Returns whether `sum(G)` and `<u, G>` are computed from per-example kernel gradients.

        Otherwise they are computed as sums over positions. Kernel gradients give more exact results
        if the clipped sum also uses kernel gradients, or if the fan-in is small.
        """
        has_kernel_gradients = self.choice.norm == "instantiate"
        few = math.prod(self.kernel_shape[:3]) < self.sizes()[1]
        return has_kernel_gradients and (self.choice.sum == "contract" or few)

    @functools.cached_property
    def small_gradients(self):
        """Returns the gradients of bias and gain. See `Rule.small_gradients`."""
        layer = self.layer
        last = channels_last(self.output_gradients[-1], layer)
        pairs = []
        if self.explains(layer.bias):
            pairs.append((layer.bias, self.sum_positions(last)))
        if layer.use_gain and self.explains(layer.gain):
            pairs.append((layer.gain, self.sum_positions(last * self._convolved())))
        return pairs

    def _convolved(self):
        """Returns the output of the convolution with u, float32 [B * K, H', W', filters].

        B is the number of examples, and K the number of views of each.
        """
        convolved = self.call.kept["convolved"]
        if convolved.dtype == tf.float32:
            return channels_last(convolved, self.layer)
        return self.window.convolve(self.inputs, self.standardized.unit)

    def _patch_sums(self):
        """Returns the sum of the inputs in each patch, float32 [B * K, H', W', 1 or filters].

        Without groups, all filters have the same patches, so the last axis has size 1.
        """
        shape, groups = self.inputs.shape, self.groups
        by_group = tf.concat([tf.shape(self.inputs)[:3], [groups, -1]], axis=0)
        images = tf.reduce_sum(tf.reshape(self.inputs, by_group), axis=-1)
        images.set_shape([*shape[:3], groups])
        sums = self.window.convolve(images, tf.ones([*self.window.size, 1, groups]))
        return sums if groups == 1 else tf.repeat(sums, self.layer.filters // groups, axis=-1)


def _by_channel(layer, variable, outputs):
    """Reshapes a variable [filters] to broadcast to `outputs`, and casts it to their dtype."""
    value = tf.cast(variable.value, outputs.dtype)
    return value if layer.data_format == "channels_last" else tf.reshape(value, [1, -1, 1, 1])
