"""`keras.layers.Embedding`."""

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, positions, weigh


@register(keras.layers.Embedding)
class EmbeddingRule(Rule):
    """Sparse: norms from pairs of equal tokens, sums by scattering; no [B, vocabulary, d] array."""

    assumes = ("call", "embeddings")

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        self._outputs = positions(gradients[0], views)
        # Token by token as the outputs are, position by position.
        tokens = tf.cast(call.args[0], "int32")
        self._tokens = tf.reshape(tokens, tf.shape(self._outputs)[:2])

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`; dense, used only where calls share the table."""
        one_hot = tf.one_hot(self._tokens, self.layer.input_dim)
        return [tf.matmul(one_hot, self._outputs, transpose_a=True)]

    def squared_norms(self):
        """See `Rule.squared_norms`: the sum of <g_s, g_t> over pairs of positions of one token."""
        same = tf.equal(self._tokens[:, :, tf.newaxis], self._tokens[:, tf.newaxis, :])
        products = tf.matmul(self._outputs, self._outputs, transpose_b=True)
        total = tf.reduce_sum(tf.where(same, products, 0.0), axis=[1, 2])
        return tf.maximum(total, 0.0)

    def clipped_sum(self, factors):
        """See `Rule.clipped_sum`."""
        outputs = weigh(self._outputs, factors)
        rows = tf.reshape(outputs, [-1, outputs.shape[-1]])
        tokens = tf.reshape(self._tokens, [-1])
        return [tf.math.unsorted_segment_sum(rows, tokens, self.layer.input_dim)]
