"""The per-example gradient rule of `WSConv2D`."""

import tensorflow as tf

from tfdpx.layers.ws_conv2d import WSConv2D
from tfdpx.per_example import Conv2DRule, register


@register(WSConv2D)
class WSConv2DRule(Conv2DRule):
    """The convolution's rule on the standardized kernel, carried back to the raw one.

    For one filter with raw weights w, let c = w - mean(w), s = 1/sqrt(max(|c|^2, epsilon)) and
    u = c s, so that the convolution uses gain * u. From the gradient G of the standardized kernel
    follow `gain * s * (G - mean(G) - u <u, G>)` for w (the last term only where epsilon does not
    hold s constant) and `<u, G>` for the gain.
    """

    def effective_kernel(self):
        """The standardized kernel, float32."""
        return tf.cast(self.layer.standardized_kernel(), "float32")

    def from_effective(self, gradients):
        """See `Conv2DRule.from_effective`."""
        layer = self.layer
        kernel = tf.cast(layer.kernel.value, "float32")
        centered = kernel - tf.reduce_mean(kernel, axis=[0, 1, 2])
        squares = tf.reduce_sum(tf.square(centered), axis=[0, 1, 2])
        scale = tf.math.rsqrt(tf.maximum(squares, layer.epsilon))
        unit = centered * scale
        along = tf.reduce_sum(gradients * unit, axis=[1, 2, 3], keepdims=True)
        if layer.use_gain:
            scale = scale * tf.cast(layer.gain.value, "float32")
        mean = tf.reduce_mean(gradients, axis=[1, 2, 3], keepdims=True)
        free = tf.cast(squares > layer.epsilon, "float32")
        raw = scale * (gradients - mean - free * unit * along)
        return [(layer.kernel, raw), (layer.gain, tf.reshape(along, [-1, layer.filters]))]
