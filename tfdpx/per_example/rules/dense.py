"""`keras.layers.Dense`."""

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, positions, squared_norms, weigh


@register(keras.layers.Dense)
class DenseRule(Rule):
    """Kernel gradient A^T G and bias gradient 1^T G, with A [T, in] and G [T, out] of an example.

    The squared norm of A^T G is `<A A^T, G G^T>` (Goodfellow 2015, arXiv:1510.01799; Li et al.
    2021, arXiv:2110.05679), which needs no kernel-sized memory an example: used when the
    T positions are few against the kernel.
    """

    splits_activation = True
    assumes = ("call", "kernel")

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        self._inputs = positions(call.args[0], views)
        self._outputs = positions(gradients[0], views)

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        kernel = tf.matmul(self._inputs, self._outputs, transpose_a=True)
        return self.in_order([(self.layer.kernel, kernel), (self.layer.bias, self._bias())])

    def squared_norms(self):
        """See `Rule.squared_norms`."""
        if not self._ghost_is_cheaper():
            return super().squared_norms()
        norms = []
        if self.explains(self.layer.kernel):
            inputs = tf.matmul(self._inputs, self._inputs, transpose_b=True)
            outputs = tf.matmul(self._outputs, self._outputs, transpose_b=True)
            # Rounding may leave a zero norm slightly negative.
            norms.append(tf.maximum(tf.reduce_sum(inputs * outputs, axis=[1, 2]), 0.0))
        if self.explains(self.layer.bias):
            norms.append(squared_norms([self._bias()]))
        return tf.add_n(norms)

    def clipped_sum(self, factors):
        """See `Rule.clipped_sum`."""
        outputs = weigh(self._outputs, factors)
        inputs = weigh(self._inputs, tf.cast(factors > 0, "float32"))
        kernel = tf.tensordot(inputs, outputs, axes=[[0, 1], [0, 1]])
        bias = tf.reduce_sum(outputs, axis=[0, 1])
        return self.in_order([(self.layer.kernel, kernel), (self.layer.bias, bias)])

    def _bias(self):
        return tf.reduce_sum(self._outputs, axis=1)

    def _ghost_is_cheaper(self):
        count, fan_in = self._inputs.shape[1:]
        fan_out = self._outputs.shape[2]
        return count is not None and count * (fan_in + fan_out) < fan_in * fan_out
