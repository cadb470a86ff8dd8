"""The per-example gradient rule of `WSConv2D`."""

import functools
import math

import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.layers.ws_conv2d import WSConv2D
from tfdpx.per_example import Conv2DRule, register
from tfdpx.per_example.rules.base import by_example
from tfdpx.per_example.rules.convolution import channels_last

# What rounding may hide of a norm that is left when large parts are taken away.
_ROUNDING = 2.0**-22


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
    def forward(cls, call, watch):
        """See `Rule.forward`."""
        layer = call.layer
        plain = keras_hook.without(layer, activation=None, use_bias=False, use_gain=False)
        outputs = watch(keras_hook.call_operation(plain, call.args, call.kwargs))
        call.kept["convolved"] = outputs
        if layer.use_gain:
            outputs = watch(outputs * _by_channel(layer, layer.gain, outputs))
        if layer.use_bias:
            outputs = outputs + _by_channel(layer, layer.bias, outputs)
        return outputs if layer.activation is None else layer.activation(outputs)

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        squares = tf.reduce_sum(tf.square(self._centered()), axis=[0, 1, 2])
        self._free = tf.cast(squares > self.layer.epsilon, "float32")
        self.filter_scale = tf.math.rsqrt(tf.maximum(squares, self.layer.epsilon))

    def to_kernel(self, gradients):
        """See `Conv2DRule.to_kernel`."""
        unit = self._unit()
        along = tf.reduce_sum(gradients * unit, axis=[-4, -3, -2], keepdims=True)
        mean = tf.reduce_mean(gradients, axis=[-4, -3, -2], keepdims=True)
        return gradients - mean - self._free * unit * along

    def kernel_squared_norms(self, squares):
        """See `Conv2DRule.kernel_squared_norms`."""
        if self._kernels_are_small():
            sums = tf.reduce_sum(self.kernel_instances, axis=[1, 2, 3])
            along = tf.reduce_sum(self.kernel_instances * self._unit(), axis=[1, 2, 3])
        else:
            sums = self._sum_positions(self._patch_sums() * self.outputs)
            along = self._sum_positions(self._convolved() * self.outputs)
        fan_in = math.prod(self.kernel_shape[:3])
        removed = tf.square(sums) / fan_in + self._free * tf.square(along)
        left = squares - tf.reduce_sum(self.scaled(self.scaled(removed)), axis=1)
        return tf.maximum(left, 0.0) + _ROUNDING * squares

    def _kernels_are_small(self):
        """Whether kernel-sized gradients are at hand and smaller than what the layer gave."""
        _, positions, fan_in, _ = self.sizes()
        return self.choice.norm == "instantiate" and fan_in < positions

    def _centered(self):
        kernel = tf.cast(self.layer.kernel.value, "float32")
        return kernel - tf.reduce_mean(kernel, axis=[0, 1, 2])

    def _unit(self):
        # Made anew where it is needed, so that it is not kept in between.
        return self._centered() * self.filter_scale

    @functools.cached_property
    def small_gradients(self):
        """See `Conv2DRule.small_gradients`."""
        layer = self.layer
        last = channels_last(tf.cast(self.gradients[-1], "float32"), layer)
        pairs = []
        if self.explains(layer.bias):
            pairs.append((layer.bias, self._sum_positions(last)))
        if layer.use_gain and self.explains(layer.gain):
            pairs.append((layer.gain, self._sum_positions(last * self._convolved())))
        return pairs

    def _convolved(self):
        """What the convolution with u gave, float32 [B * K, H', W', filters]."""
        convolved = self.call.kept["convolved"]
        if convolved.dtype == tf.float32:
            return channels_last(convolved, self.layer)
        return tf.nn.conv2d(
            self.inputs,
            self._unit(),
            strides=self.window.strides,
            padding=self.window.padding.upper(),
            dilations=self.window.dilation,
        )

    def _patch_sums(self):
        """The sum of each patch, float32 [B * K, H', W', 1 or filters]."""
        window = self.window
        shape, groups = self.inputs.shape, self.groups
        by_group = tf.reshape(
            self.inputs, tf.concat([tf.shape(self.inputs)[:3], [groups, -1]], axis=0)
        )
        images = tf.reduce_sum(by_group, axis=-1)
        images.set_shape([*shape[:3], groups])
        sums = tf.nn.conv2d(
            images,
            tf.ones([*window.size, 1, groups]),
            strides=window.strides,
            padding=window.padding.upper(),
            dilations=window.dilation,
        )
        return sums if groups == 1 else tf.repeat(sums, self.layer.filters // groups, axis=-1)

    def _sum_positions(self, products):
        """[B * K, H', W', filters] summed over views and positions."""
        return tf.reduce_sum(by_example(products, self.views), axis=[1, 2, 3])


def _by_channel(layer, variable, outputs):
    """A variable [filters] as it multiplies or shifts `outputs`, in their dtype."""
    value = tf.cast(variable.value, outputs.dtype)
    return value if layer.data_format == "channels_last" else tf.reshape(value, [1, -1, 1, 1])
