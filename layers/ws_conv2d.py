"""Convolution with weight standardization, and its per-example gradient rule."""

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
    """2D convolution with a kernel that is standardized over the fan-in of each filter.

    A drop-in replacement for `keras.layers.Conv2D`. For each output channel `o` the convolution
    uses, in place of the raw kernel `w`,

    `w_hat[..., o] = gain[o] * (w[..., o] - mean[o]) / sqrt(max(fan_in * var[o], epsilon))`

    with `mean` and the population variance `var` taken over the `fan_in = kernel height * kernel
    width * input channels / groups` weights of the filter. The standardization is part of the
    layer's call and is differentiated through, so gradients (and per-example gradients) are those
    of the raw kernel. It can replace batch normalization under differential privacy, because it
    reads weights only and never mixes examples.

    Args:
        filters: Integer, number of output channels. As in `keras.layers.Conv2D`, like every other
            argument not listed here.
        kernel_size: Integer or pair of integers, size of the window.
        *args: More positional arguments of `keras.layers.Conv2D`, for example `strides`.
        use_gain: Boolean, whether each filter has a learnable scale `gain` of shape `[filters]`,
            initialised to one (Brock et al., 2021a). Appendix C.1 of De et al. (2022) has none.
        epsilon: Float, lower bound of `fan_in * var`. Filters with nearly equal weights would
            otherwise be blown up; filters above the bound do not change. 1e-4 as in Brock et al.
        **kwargs: Arguments of `keras.layers.Conv2D`: `strides`, `padding`, `data_format`,
            `dilation_rate`, `groups`, `activation`, `use_bias`, initializers, regularizers,
            constraints, `name`, `dtype`. Regularizers and constraints act on the raw kernel.

    Call arguments and output shapes are as in `keras.layers.Conv2D`. Under a mixed-precision
    policy the statistics are computed in float32 and the convolution in the compute dtype.

    Raises:
        ValueError: If `epsilon` is not positive, or if a filter has a fan-in of one (the only
            standardized weight would then be zero for every kernel).

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
        """Creates a weight; `kernel` and `gain` are exempt from autocasting.

        Under mixed precision Keras would pass them in the compute dtype, and their statistics would
        be computed from rounded weights.
        """
        if kwargs.get("name") in ("kernel", "gain"):
            kwargs["autocast"] = False
        return super().add_weight(*args, **kwargs)

    def standardized_kernel(self) -> tf.Tensor:
        """Returns the kernel that the convolution uses.

        Returns:
            Tensor of shape `[kernel height, kernel width, input channels / groups, filters]` in
            float32, or float64 if the layer's weights are. Differentiable in `kernel` and
            `gain`.
        """
        return self._standardize(self.kernel)

    def convolution_op(self, inputs: Any, kernel: Any) -> tf.Tensor:
        """Convolves `inputs` with the standardized `kernel`, both in the compute dtype."""
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
        if self.built and self.use_gain:  # Conv2D stores only its kernel and bias.
            store["gain"] = self.gain

    def load_own_variables(self, store: Any) -> None:
        """Restores the weights, as for any Keras layer."""
        super().load_own_variables(store)
        if self.built and self.use_gain:
            self.gain.assign(store["gain"])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        return {**super().get_config(), "use_gain": self.use_gain, "epsilon": self.epsilon}


# Axes of one filter in a kernel: the axes of the window are summed over at once.
_BY_AXIS = [[-4, -3], -2]


register_rowwise(WSConv2D)


class Standardized(typing.NamedTuple):
    """A standardized kernel, before its gain, in float32.

    Attributes:
        unit: [kernel height, kernel width, input channels / groups, filters], u.
        scale: [filters], s.
        shares: [2, filters], the parts of the two inner products that are not in the gradient:
            1 / fan_in, and 0 where epsilon keeps s constant, otherwise 1.
        weights: [3, filters], the factors of the squares of gradients and of the inner products:
            the square of s, times one or `shares`.
    """

    unit: tf.Tensor
    scale: tf.Tensor
    shares: tf.Tensor
    weights: tf.Tensor

    def to_raw(self, gradients):
        """Returns gradients at the raw kernel [..., *kernel shape] from those at u, times s."""
        both = tf.stack([gradients, gradients * self.unit])
        sums = tf.unstack(rounding.sum_by_axis(both, _BY_AXIS, keepdims=True))
        total, along = (s * share for s, share in zip(sums, tf.unstack(self.shares), strict=True))
        return gradients - total - self.unit * along


@register(WSConv2D)
class WSConv2DRule(Conv2DRule):
    """The convolution's rule on the standardized kernel, carried back to the raw one.

    For one filter with raw weights w, let c = w - mean(w), s = 1/sqrt(max(|c|^2, epsilon)) and
    u = c s. The layer is run in parts: the convolution with u, then gain and bias. From the
    gradient G at u follows `s (G - mean(G) - u <u, G>)` for w, the last term only where epsilon
    does not keep s constant. Because u is a centred unit vector, its squared norm is
    `s^2 (|G|^2 - (1^T G)^2 / fan_in - <u, G>^2)`. With patches a_t and output gradients g_t both
    inner products are sums over positions, `sum_t (1^T a_t) g_t` and `sum_t (u^T a_t) g_t`. The
    latter uses the output of the convolution, so no kernel-sized array is needed for them.
    """

    assumes = ("call", "convolution_op", "kernel", "_standardize", "standardized_kernel")

    @classmethod
    def shared(cls, layer):
        """See `Rule.shared`: the `Standardized` kernel."""
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
        """See `Rule.forward`."""
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
        """See `Conv2DRule.weights`."""
        weights = self.standardized.weights
        return weights if self._by_kernels else weights[:1]

    @property
    def post_sum_transforms(self):
        """See `Rule.post_sum_transforms`."""

        def to_raw(total, standardized):
            return standardized.to_raw(total * standardized.scale)

        return {id(self.layer.kernel): to_raw}

    def to_kernel(self, gradients):
        """See `Conv2DRule.to_kernel`."""
        return self.standardized.to_raw(gradients)

    def to_sum(self, total):
        """See `Conv2DRule.to_sum`: the rest is for `post_sum_transforms`."""
        return total

    @property
    def unit(self):
        """See `Conv2DRule.unit`."""
        return self.standardized.unit if self._by_kernels else None

    def measured(self, measurements):
        """See `Conv2DRule.measured`.

        As vectors over filters, each of the two inner products is off by at most M times the error
        of a sum over positions of inner products with a vector of length one.
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
        # The errors of the sums of squares, their subtraction, and the projection of the sum.
        relative = (2 * by_axis + self.kernel_shape[3] + rounding.EXTRA) * rounding.UNIT
        return measurements._replace(removed_errors=tuple(errors), removed_relative=relative)

    @property
    def _by_kernels(self):
        """Whether inner products are sums over kernel gradients instead of positions.

        They are more exact if the same gradients are added up, or the fan-in is small.
        """
        has_kernel_gradients = self.choice.norm == "instantiate"
        few = math.prod(self.kernel_shape[:3]) < self.sizes()[1]
        return has_kernel_gradients and (self.choice.sum == "contract" or few)

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`: bias and gain."""
        layer = self.layer
        last = channels_last(self.output_gradients[-1], layer)
        pairs = []
        if self.explains(layer.bias):
            pairs.append((layer.bias, self.sum_positions(last)))
        if layer.use_gain and self.explains(layer.gain):
            pairs.append((layer.gain, self.sum_positions(last * self._convolved())))
        return pairs

    def _convolved(self):
        """Returns the output of the convolution with u, float32 [B * K, H', W', filters]."""
        convolved = self.call.kept["convolved"]
        if convolved.dtype == tf.float32:
            return channels_last(convolved, self.layer)
        return self.window.convolve(self.inputs, self.standardized.unit)

    def _patch_sums(self):
        """Returns the sum of each patch, float32 [B * K, H', W', 1 or filters]."""
        shape, groups = self.inputs.shape, self.groups
        by_group = tf.concat([tf.shape(self.inputs)[:3], [groups, -1]], axis=0)
        images = tf.reduce_sum(tf.reshape(self.inputs, by_group), axis=-1)
        images.set_shape([*shape[:3], groups])
        sums = self.window.convolve(images, tf.ones([*self.window.size, 1, groups]))
        return sums if groups == 1 else tf.repeat(sums, self.layer.filters // groups, axis=-1)


def _by_channel(layer, variable, outputs):
    """Returns a variable [filters] in the shape and dtype to multiply or shift `outputs`."""
    value = tf.cast(variable.value, outputs.dtype)
    return value if layer.data_format == "channels_last" else tf.reshape(value, [1, -1, 1, 1])
