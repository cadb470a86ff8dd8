"""`keras.layers.DepthwiseConv2D`."""

import functools

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rows import split_views
from tfdpx.per_example.rules.convolution import Conv2DRule


@register(keras.layers.DepthwiseConv2D)
class DepthwiseConv2DRule(Conv2DRule):
    """A convolution with a group for each channel.

    As no channel sees another, images may be put side by side as channels: one ordinary weight
    gradient then gives the one of every example.
    """

    assumes = ("call", "kernel")
    _by_calls = False

    @property
    def kernel_shape(self):
        """See `Conv2DRule.kernel_shape`."""
        height, width, channels, multiplier = self.layer.kernel.shape
        return [height, width, 1, channels * multiplier]

    def to_kernel(self, gradients):
        """See `Conv2DRule.to_kernel`."""
        lead = tf.shape(gradients)[:-4]
        return tf.reshape(gradients, tf.concat([lead, self.layer.kernel.shape], axis=0))

    def kernel_gradient(self, inputs, output_gradients):
        """See `Conv2DRule.kernel_gradient`."""
        channels, multiplier = inputs.shape[-1], self.layer.depth_multiplier
        gradient = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=inputs,
            filter_sizes=[*self.window.size, tf.shape(inputs)[-1], multiplier],
            out_backprop=output_gradients,
            strides=[1, *self.window.strides, 1],
            padding=self.window.padding.upper(),
        )
        shape = [*self.window.size, 1, -1 if channels is None else channels * multiplier]
        return tf.reshape(gradient, shape)

    @functools.cached_property
    def kernel_instances(self):
        """See `Conv2DRule.kernel_instances`."""
        if not self._is_plain:
            return self._by_matmul()
        tensors = self.inputs, self.convolved_gradients
        gradients = self.kernel_gradient(*(_side_by_side(t, self.num_views) for t in tensors))
        height, width, _, out = self.kernel_shape
        gradients = tf.reshape(gradients, [height, width, 1, -1, out])
        return tf.transpose(gradients, [3, 0, 1, 2, 4])

    def costs(self):
        """See `Rule.costs`."""
        costs = super().costs()
        if not self._is_plain:
            del costs["ordinary"]  # And with it the ghost norm.
        return costs

    def allows_ordinary_sum(self):
        """See `Rule.allows_ordinary_sum`."""
        return False

    @property
    def _is_plain(self):
        """Whether TensorFlow's own gradient serves: no dilation, one stride."""
        return max(self.window.dilation) == 1 and len(set(self.window.strides)) == 1


def _side_by_side(images, num_views):
    """[B * K, H, W, C] as [K, H, W, B * C]."""
    joined = tf.transpose(split_views(images, num_views), [1, 2, 3, 0, 4])
    return tf.reshape(joined, tf.concat([tf.shape(joined)[:3], [-1]], axis=0))
