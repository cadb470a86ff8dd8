"""The per-example gradient rule of `WSConv2D`."""

import functools
import math
import typing

import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.layers.ws_conv2d import WSConv2D
from tfdpx.per_example import register, rounding
from tfdpx.per_example.rules.convolution import Conv2DRule, channels_last

# Axes of one filter in a kernel: the window's are summed over at once.
_BY_AXIS = [[-4, -3], -2]


class Standardized(typing.NamedTuple):
    """A standardized kernel, before its gain, in float32.

    Attributes:
        unit: [kernel height, kernel width, input channels / groups, filters], u.
        scale: [filters], s.
        shares: [2, filters], what of the two inner products is not in the gradient: 1 / fan_in, and
            0 where epsilon holds s constant, else 1.
        weights: [3, filters], what squares of gradients and of the inner products are multiplied
            by: the square of s, times one or `shares`.
    """

    unit: tf.Tensor
    scale: tf.Tensor
    shares: tf.Tensor
    weights: tf.Tensor

    def to_raw(self, gradients):
        """Gradients at u, times s, as gradients at the raw kernel: [..., *kernel shape]."""
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
    does not hold s constant. As u is a centred unit vector, its squared norm is
    `s^2 (|G|^2 - (1^T G)^2 / fan_in - <u, G>^2)`, and with patches a_t and output gradients g_t
    both inner products are sums over positions, `sum_t (1^T a_t) g_t` and `sum_t (u^T a_t) g_t`,
    the latter of what the convolution gave: no kernel-sized array is needed for them.
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
        return outputs if layer.activation is None else layer.activation(outputs)

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

    def measured(self, found):
        """See `Conv2DRule.measured`.

        Of the two inner products, as vectors over filters, each errs by at most M times the error
        of a sum over positions of inner products with a vector of length one.
        """
        fan_in = math.prod(self.kernel_shape[:3])
        by_axis = self.window.taps + self.kernel_shape[2]
        if self._by_kernels:
            errors = [rounding.UNIT * (fan_in + rounding.EXTRA)] * 2
        else:
            positions = self.sizes()[1]
            products = tf.stack(
                [
                    self.sum_positions(each * self.scaled_gradients)
                    for each in (self._patch_sums(), self._convolved())
                ],
                axis=1,
            )
            removed = tf.reduce_sum(tf.square(products) * self.standardized.shares, axis=2)
            found = found._replace(squares=tf.concat([found.squares, removed], axis=1))
            added = self.window.taps + self.kernel_shape[2], rounding.blocked(fan_in)
            errors = [rounding.dot_error(n + positions) for n in added]
        # The sums of squares, their subtraction, and the projection of the released sum.
        relative = (2 * by_axis + self.kernel_shape[3] + rounding.EXTRA) * rounding.UNIT
        return found._replace(removed_errors=tuple(errors), removed_relative=relative)

    @property
    def _by_kernels(self):
        """Whether inner products are sums over kernel gradients, not over positions.

        Those err less where the very gradients are added up, or the fan-in is small.
        """
        kept = self.choice.norm == "instantiate"
        few = math.prod(self.kernel_shape[:3]) < self.sizes()[1]
        return kept and (self.choice.sum == "contract" or few)

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
        """What the convolution with u gave, float32 [B * K, H', W', filters]."""
        convolved = self.call.kept["convolved"]
        if convolved.dtype == tf.float32:
            return channels_last(convolved, self.layer)
        return self.window.convolve(self.inputs, self.standardized.unit)

    def _patch_sums(self):
        """The sum of each patch, float32 [B * K, H', W', 1 or filters]."""
        shape, groups = self.inputs.shape, self.groups
        if groups == 1:
            images = tf.reduce_sum(self.inputs, axis=-1, keepdims=True)
        else:
            by_group = tf.concat([tf.shape(self.inputs)[:3], [groups, -1]], axis=0)
            images = tf.reduce_sum(tf.reshape(self.inputs, by_group), axis=-1)
            images.set_shape([*shape[:3], groups])
        sums = self.window.convolve(images, tf.ones([*self.window.size, 1, groups]))
        return sums if groups == 1 else tf.repeat(sums, self.layer.filters // groups, axis=-1)


def _by_channel(layer, variable, outputs):
    """A variable [filters] as it multiplies or shifts `outputs`, in their dtype."""
    value = tf.cast(variable.value, outputs.dtype)
    return value if layer.data_format == "channels_last" else tf.reshape(value, [1, -1, 1, 1])
