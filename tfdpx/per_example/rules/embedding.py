"""`keras.layers.Embedding`."""

import copy

import keras
import tensorflow as tf

from tfdpx.per_example.choice import Cost
from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, positions, weigh
from tfdpx.per_example.rules.products import FLOAT


@register(keras.layers.Embedding)
class EmbeddingRule(Rule):
    """Sparse: no [B, vocabulary, d] array.

    Norms come from the rows of the table that an example touches, one for each distinct token, or
    from pairs of positions with equal tokens; sums by scattering.
    """

    assumes = ("call", "embeddings")

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`: the calls' tokens in a row."""
        joined = copy.copy(rules[0])
        joined.gradients = [g for rule in rules for g in rule.gradients]
        joined._outputs = tf.concat([rule._outputs for rule in rules], axis=1)
        joined._tokens = tf.concat([rule._tokens for rule in rules], axis=1)
        return joined

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        self._outputs = positions(gradients[0], views)
        # Token by token as the outputs are, position by position.
        tokens = tf.cast(call.args[0], "int32")
        self._tokens = tf.reshape(tokens, tf.shape(self._outputs)[:2])

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`; dense, used only where other layers share the table."""
        one_hot = tf.one_hot(self._tokens, self.layer.input_dim)
        return [tf.matmul(one_hot, self._outputs, transpose_a=True)]

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`: the squares of the touched rows."""
        count, length = tf.unstack(tf.shape(self._tokens))
        order = tf.argsort(self._tokens, axis=1)
        tokens = tf.gather(self._tokens, order, batch_dims=1)
        fresh = tf.cast(tokens[:, 1:] != tokens[:, :-1], "int32")
        rows = tf.pad(tf.cumsum(fresh, axis=1), [[1, 0], [1, 0]])[1:]
        rows += length * tf.range(count)[:, tf.newaxis]
        touched = tf.math.unsorted_segment_sum(
            tf.gather(self._outputs, order, batch_dims=1), rows, count * length
        )
        squares = tf.reduce_sum(tf.square(touched), axis=-1)
        return tf.reduce_sum(tf.reshape(squares, [count, length]), axis=1)

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`: the sum of <g_s, g_t> over positions of one token."""
        same = tf.equal(self._tokens[:, :, tf.newaxis], self._tokens[:, tf.newaxis, :])
        products = tf.matmul(self._outputs, self._outputs, transpose_b=True)
        total = tf.reduce_sum(tf.where(same, products, 0.0), axis=[1, 2])
        return tf.maximum(total, 0.0)

    def ordinary_sum(self, factors):
        """See `Rule.ordinary_sum`."""
        outputs = weigh(self._outputs, factors)
        rows = tf.reshape(outputs, [-1, outputs.shape[-1]])
        tokens = tf.reshape(self._tokens, [-1])
        return [tf.math.unsorted_segment_sum(rows, tokens, self.layer.input_dim)]

    def costs(self):
        """See `Rule.costs`: sorting and scattering against all pairs."""
        count, length, width = self._outputs.shape
        count, length = count or 32, length or 1024
        touched = FLOAT * count * length * width
        pairs = count * length**2
        return {
            "instantiate": Cost(bytes=4 * touched + 16 * FLOAT * count * length, calls=1),
            "ghost": Cost(2.0 * pairs * width, bytes=3 * FLOAT * pairs),
            "ordinary": Cost(bytes=2 * touched),
        }
