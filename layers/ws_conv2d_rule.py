"""The per-example gradient rule of `WSConv2D`."""

import tensorflow as tf

from tfdpx.layers.ws_conv2d import WSConv2D
from tfdpx.per_example import Conv2DRule, register


@register(WSConv2D)
class WSConv2DRule(Conv2DRule):
    """The convolution's rule on the standardized kernel, carried back to the raw one.

    For one filter with raw weights w, let c = w - mean(w), s = 1/sqrt(max(|c|^2, epsilon)) and
    u = c s, so that the convolution uses gain * u. From the gradient G of the standardized kernel
    follow `gain s (G - mean(G) - u <u, G>)` for w (the last term only where epsilon does not hold s
    constant) and `<u, G>` for the gain. As u is a centred unit vector, the first squared norm
    is `(gain s)^2 (|G|^2 - (1^T G)^2 / fan_in - <u, G>^2)`, and with patches a_t and output
    gradients g_t both inner products are sums over positions, `sum_t (1^T a_t) g_t` and
    `sum_t (u^T a_t) g_t`: no kernel-sized array is needed for them.
    """

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        layer = self.layer
        kernel = tf.cast(layer.kernel.value, "float32")
        centered = kernel - tf.reduce_mean(kernel, axis=[0, 1, 2])
        squares = tf.reduce_sum(tf.square(centered), axis=[0, 1, 2])
        scale = tf.math.rsqrt(tf.maximum(squares, layer.epsilon))
        self._unit = centered * scale
        self._free = tf.cast(squares > layer.epsilon, "float32")
        self._scale = scale * tf.cast(layer.gain.value, "float32") if layer.use_gain else scale

    def effective_kernel(self):
        """The standardized kernel, float32."""
        return tf.cast(self.layer.standardized_kernel(), "float32")

    def from_effective(self, gradients):
        """See `Conv2DRule.from_effective`."""
        layer = self.layer
        along = tf.reduce_sum(gradients * self._unit, axis=[1, 2, 3], keepdims=True)
        mean = tf.reduce_mean(gradients, axis=[1, 2, 3], keepdims=True)
        raw = self._scale * (gradients - mean - self._free * self._unit * along)
        return [(layer.kernel, raw), (layer.gain, tf.reshape(along, [-1, layer.filters]))]

    def kernel_squared_norms(self):
        """See `Conv2DRule.kernel_squared_norms`."""
        layer = self.layer
        gradients = self.grouped(self._gradients)
        along = self._sum_positions(self.convolve(self._inputs, self._unit), gradients)
        norms = []
        if layer.use_gain and self.explains(layer.gain):
            norms.append(tf.reduce_sum(tf.square(along), axis=[1, 2]))
        if self.explains(layer.kernel):
            by_group = [layer.groups, layer.filters // layer.groups]
            scale = tf.reshape(self._scale, by_group)
            free = tf.reshape(self._free, by_group)
            whole = self.product_squared_norms(gradients * scale)
            fan_in = self._unit.shape.num_elements() // layer.filters
            sums = tf.reduce_sum(self._patch_sums() * gradients, axis=1)
            removed = tf.square(scale) * (tf.square(sums) / fan_in + free * tf.square(along))
            # Rounding may leave a zero norm slightly negative.
            norms.append(tf.maximum(whole - tf.reduce_sum(removed, axis=[1, 2]), 0.0))
        return norms

    def _patch_sums(self):
        """float32 [B, T, groups, 1]: the sum of each patch."""
        return tf.reduce_sum(self.patches(), axis=-1, keepdims=True)

    def _sum_positions(self, convolved, gradients):
        """float32 [B, groups, out / groups]: the sum over positions of the product."""
        return tf.reduce_sum(self.grouped(convolved) * gradients, axis=1)
