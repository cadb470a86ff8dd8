"""`keras.layers.Embedding`."""

import copy

import keras
import tensorflow as tf

from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost
from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, positions, scale_examples
from tfdpx.per_example.rules.products import FLOAT, gram


@register(keras.layers.Embedding)
class EmbeddingRule(Rule):
    """Sparse: no [B, vocabulary, d] array.

    Norms come from the entries of the table that an example reads, one for each distinct token, or
    from pairs of positions with equal tokens; sums by scattering.
    """

    assumes: tuple[str, ...] = ("call", "embeddings")

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`: the calls' tokens in line."""
        joined = copy.copy(rules[0])
        joined.output_gradients = [g for rule in rules for g in rule.output_gradients]
        joined._gradients = tf.concat([rule._gradients for rule in rules], axis=1)
        joined._tokens = tf.concat([rule._tokens for rule in rules], axis=1)
        return joined

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        # Float32 [B, T, d], with int32 tokens [B, T].
        self._gradients = positions(self.output_gradients[0], num_views)
        tokens = call.args[0]
        if tokens.dtype not in ("int32", "int64"):
            tokens = tf.cast(tokens, "int32")  # As the layer does.
        # Token by token as the outputs are, position by position.
        tokens = tf.reshape(tokens, tf.shape(self._gradients)[:2])
        # As the layer does: a negative token counts from the end of the table. One that is in no
        # table leaves an example without a gradient, as the layer does.
        tokens = tf.where(tokens < 0, tokens + self.layer.input_dim, tokens)
        in_range = (tokens >= 0) & (tokens < self.layer.input_dim)
        self._gradients = tf.where(in_range[:, :, tf.newaxis], self._gradients, float("nan"))
        self._tokens = tf.cast(tf.where(in_range, tokens, 0), "int32")

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`; dense, used only where other layers share the table."""
        one_hot = tf.one_hot(self._tokens, self.layer.input_dim)
        return [tf.matmul(one_hot, self._gradients, transpose_a=True)]

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`: the squares of the entries that were read."""
        count, length = tf.unstack(tf.shape(self._tokens))
        order = tf.argsort(self._tokens, axis=1)
        tokens = tf.gather(self._tokens, order, batch_dims=1)
        fresh = tf.cast(tokens[:, 1:] != tokens[:, :-1], "int32")
        entries = tf.pad(tf.cumsum(fresh, axis=1), [[1, 0], [1, 0]])[1:]
        entries = tf.add(entries, length * tf.range(count)[:, tf.newaxis])
        # Beside each gradient, the sum of the sizes of what is added up there, and their number.
        sizes = tf.sqrt(rounding.squared_lengths(self._gradients))[:, :, tf.newaxis]
        added = tf.concat([self._gradients, sizes, tf.ones_like(sizes)], axis=-1)
        sums = tf.math.unsorted_segment_sum(
            tf.gather(added, order, batch_dims=1), entries, count * length
        )
        width = self._gradients.shape[-1]
        squares = rounding.squared_lengths(sums[:, :width])
        # Once for this sum, once for the one that is released.
        allowed = rounding.allow(squares, sums[:, width], 2.0 * sums[:, width + 1])
        return tf.reduce_sum(tf.reshape(allowed, [count, length]), axis=1)

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`: the sum of <g_s, g_t> over positions of one token."""
        same = tf.equal(self._tokens[:, :, tf.newaxis], self._tokens[:, tf.newaxis, :])
        # To be of one token is to have equal inputs, of length one.
        inputs = tf.cast(same, "float32")
        squares, _ = rounding.squared_norms_of_products(
            inputs[:, tf.newaxis],
            gram(self._gradients)[:, tf.newaxis],
            fan_in=1,
            fan_out=self._gradients.shape[-1],
        )
        sizes = tf.sqrt(rounding.squared_lengths(self._gradients))
        pairs = sizes[:, :, tf.newaxis] * sizes[:, tf.newaxis, :]
        magnitudes = tf.sqrt(tf.reduce_sum(inputs * pairs, axis=[1, 2]))
        return rounding.allow(squares[:, 0], magnitudes, rounding.size_of(same, 1))

    def ordinary_clipped_sum(self, factors, masked):
        """See `Rule.ordinary_clipped_sum`."""
        del masked  # A token is always finite.
        gradients = scale_examples(self._gradients, factors)
        gradients = tf.reshape(gradients, [-1, gradients.shape[-1]])
        tokens = tf.reshape(self._tokens, [-1])
        return [tf.math.unsorted_segment_sum(gradients, tokens, self.layer.input_dim)]

    def costs(self):
        """See `Rule.costs`: sorting and scattering against all pairs."""
        count, length, width = self._gradients.shape
        count, length = count or 32, length or 1024
        read = FLOAT * count * length * width
        pairs = count * length**2
        return {
            "instantiate": Cost(bytes=4 * read + 16 * FLOAT * count * length, calls=1),
            "ghost": Cost(2.0 * pairs * width, bytes=3 * FLOAT * pairs),
            "ordinary": Cost(bytes=2 * read),
        }
