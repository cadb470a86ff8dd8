"""Rules of `keras.layers.Embedding` and `ReversibleEmbedding`. The latter also computes logits."""

import copy

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost
from tfdpx.per_example.rows import positions, scale_examples
from tfdpx.per_example.rule import Rule, register, variant_of
from tfdpx.per_example.rules.contraction import FLOAT, ghost_product_norms, gram, sum_of_products


@register(keras.layers.Embedding)
class EmbeddingRule(Rule):
    """The rule of `Embedding`, which usually forms no array [B, vocabulary, d].

    There are two ways to compute norms. The rule can add up the output gradients of each distinct
    token of an example. Or ("ghost") it can add up inner products of output gradients, over all
    pairs of positions with equal tokens. To form a clipped sum, the rule adds each output gradient
    to the row of its token, in an array of the table's shape.
    """

    assumes: tuple[str, ...] = ("call", "embeddings")

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`. The new rule concatenates the tokens of all calls."""
        joined_rule = copy.copy(rules[0])
        joined_rule.output_gradients = [g for rule in rules for g in rule.output_gradients]
        joined_rule._gradients = tf.concat([rule._gradients for rule in rules], axis=1)
        joined_rule._tokens = tf.concat([rule._tokens for rule in rules], axis=1)
        return joined_rule

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        # Float32 [B, T, d], with int32 tokens [B, T].
        self._gradients = positions(self.output_gradients[0], num_views)
        tokens = call.args[0]
        if tokens.dtype not in ("int32", "int64"):
            tokens = tf.cast(tokens, "int32")  # As the layer does.
        # Reshaped like the outputs, position by position.
        tokens = tf.reshape(tokens, tf.shape(self._gradients)[:2])
        # As in the layer, a negative token counts from the end of the table. An example with a
        # token outside of the table has no finite gradient.
        tokens = tf.where(tokens < 0, tokens + self.layer.input_dim, tokens)
        in_range = (tokens >= 0) & (tokens < self.layer.input_dim)
        self._gradients = tf.where(in_range[:, :, tf.newaxis], self._gradients, float("nan"))
        self._tokens = tf.cast(tf.where(in_range, tokens, 0), "int32")

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`. The result is dense: [B, vocabulary, d].

        These gradients are formed only if other layers share the table.
        """
        one_hot = tf.one_hot(self._tokens, self.layer.input_dim)
        return [tf.matmul(one_hot, self._gradients, transpose_a=True)]

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`. Forms the gradient only for an example's tokens.

        The gradient of the table is zero for all other tokens.
        """
        count, length = tf.unstack(tf.shape(self._tokens))
        order = tf.argsort(self._tokens, axis=1)
        tokens = tf.gather(self._tokens, order, batch_dims=1)
        is_new = tf.cast(tokens[:, 1:] != tokens[:, :-1], "int32")
        entries = tf.pad(tf.cumsum(is_new, axis=1), [[1, 0], [1, 0]])[1:]
        entries = tf.add(entries, length * tf.range(count)[:, tf.newaxis])
        # Two more columns count, for each token, the sum of the norms of the gradients that are
        # added, and the number of these gradients.
        sizes = tf.sqrt(rounding.squared_lengths(self._gradients))[:, :, tf.newaxis]
        columns = tf.concat([self._gradients, sizes, tf.ones_like(sizes)], axis=-1)
        sums = tf.math.unsorted_segment_sum(
            tf.gather(columns, order, batch_dims=1), entries, count * length
        )
        width = self._gradients.shape[-1]
        squares = rounding.squared_lengths(sums[:, :width])
        # Terms count twice: for the rounding of this sum, and of the released sum.
        squared_norms = rounding.allow(squares, sums[:, width], 2.0 * sums[:, width + 1])
        return tf.reduce_sum(tf.reshape(squared_norms, [count, length]), axis=1)

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`.

        The squared norm is the sum of <g_s, g_t> over all pairs of positions s, t with equal
        tokens, where g_t is the output gradient at t.
        """
        is_same = tf.equal(self._tokens[:, :, tf.newaxis], self._tokens[:, tf.newaxis, :])
        # An input is a one-hot vector. The inner product of two inputs is 1 if their tokens are
        # equal, and 0 otherwise.
        inputs = tf.cast(is_same, "float32")
        squares, _ = rounding.squared_norms_of_products(
            inputs[:, tf.newaxis],
            gram(self._gradients)[:, tf.newaxis],
            fan_in=1,
            fan_out=self._gradients.shape[-1],
        )
        sizes = tf.sqrt(rounding.squared_lengths(self._gradients))
        pairs = sizes[:, :, tf.newaxis] * sizes[:, tf.newaxis, :]
        magnitudes = tf.sqrt(tf.reduce_sum(inputs * pairs, axis=[1, 2]))
        return rounding.allow(squares[:, 0], magnitudes, rounding.size_of(is_same, 1))

    def ordinary_clipped_sum(self, factors, masked):
        """See `Rule.ordinary_clipped_sum`."""
        del masked  # A token is always finite.
        gradients = scale_examples(self._gradients, factors)
        gradients = tf.reshape(gradients, [-1, gradients.shape[-1]])
        tokens = tf.reshape(self._tokens, [-1])
        return [tf.math.unsorted_segment_sum(gradients, tokens, self.layer.input_dim)]

    def costs(self):
        """See `Rule.costs`. The rule can sort tokens or compare all pairs of positions."""
        count, length, width = self._gradients.shape
        count, length = count or 32, length or 1024
        bytes_read = FLOAT * count * length * width
        pairs = count * length**2
        return {
            "instantiate": Cost(bytes=4 * bytes_read + 16 * FLOAT * count * length, calls=1),
            "ghost": Cost(2.0 * pairs * width, bytes=3 * FLOAT * pairs),
            "ordinary": Cost(bytes=2 * bytes_read),
        }


@variant_of(keras.layers.Embedding)
class ReversibleEmbeddingRule(EmbeddingRule):
    """The rule of a layer that both embeds tokens and computes logits with one table.

    If a call embeds tokens (as one-hot rows O), the gradient of the table is O^T G for output
    gradients G. If a call computes logits from hidden states H, the gradient of the table is L^T H
    for gradients L with respect to the logits. With tied weights, both calls use the same table,
    and the sum of both gradients is one product over the positions of both calls. Norms and clipped
    sums need no array [B, vocabulary, d].
    """

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`. A subclass must not override `call`."""
        keras_class = next(filter(_is_reversible, type(layer).__mro__), None)
        return keras_class is not None and super().handles(layer, keras_class)

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`. The logits are watched before the soft cap is applied."""
        cap = call.layer.logit_soft_cap
        if not (cap and _is_reverse(call)):
            return super().forward(call, watch)
        plain = layer_internals.without(call.layer, logit_soft_cap=None)
        logits = watch(layer_internals.call_operation(plain, call.args, call.kwargs))
        return keras.ops.tanh(logits / cap) * cap

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`. The new rule concatenates the positions of all calls."""
        joined_rule = copy.copy(rules[0])
        joined_rule.output_gradients = [g for rule in rules for g in rule.output_gradients]
        for name in ("_tokens", "_gradients", "_hidden", "_logits"):
            tensors = [getattr(rule, name) for rule in rules]
            # Most of these tensors are empty. Joining a tensor with empty ones would copy it.
            tensors = [t for t in tensors if t.shape[1] != 0] or tensors[:1]
            setattr(joined_rule, name, tf.concat(tensors, axis=1))
        return joined_rule

    def __init__(self, call, output_gradients, num_views, variables):
        if _is_reverse(call):
            Rule.__init__(self, call, output_gradients, num_views, variables)
            # Float32 [B, S, d], and [B, S, vocabulary].
            self._hidden = positions(call.args[0], num_views)
            self._logits = positions(self.output_gradients[0], num_views)
            self._gradients = self._hidden[:, :0]
            self._tokens = tf.cast(self._gradients[:, :, 0], "int32")
        else:
            super().__init__(call, output_gradients, num_views, variables)
            self._hidden = self._gradients[:, :0]
            self._logits = tf.repeat(self._hidden[:, :, :1], self.layer.input_dim, axis=2)

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`. The result is dense: [B, vocabulary, d]."""
        of_tokens = super().per_example_gradients()[0]
        return self._by_variable(of_tokens, tf.matmul(self._logits, self._hidden, transpose_a=True))

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`."""
        if self._only_embeds:
            return super().instantiated_squared_norms()
        return Rule.instantiated_squared_norms(self)

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        if self._only_embeds:
            return super().ghost_squared_norms()
        layer = self.layer
        if not layer.tie_weights:
            logits = self._hidden[:, tf.newaxis], self._logits[:, tf.newaxis]
            norms = []
            if self.explains(layer.reverse_embeddings):
                norms.append(ghost_product_norms(*logits))
            if self.explains(layer.embeddings) and self._tokens.shape[1] != 0:
                norms.append(super().ghost_squared_norms())
            return rounding.add_up(norms)
        vectors = tf.concat([self._gradients, self._hidden], axis=1)[:, tf.newaxis]
        squares, magnitudes = rounding.squared_norms_of_products(
            self._rows_in_pairs(),
            gram(vectors),
            rounding.terms_in_line(self._logits),
            rounding.terms_in_line(vectors),
        )
        return rounding.Measured(squares, rounding.size_of(vectors, 2), magnitudes)

    @property
    def inputs_to_mask(self):
        """See `Rule.inputs_to_mask`."""
        ordinary = self.choice.sum == "ordinary" and not self._only_embeds
        return [self._logits] if ordinary else []

    def ordinary_clipped_sum(self, factors, masked):
        """See `Rule.ordinary_clipped_sum`."""
        of_tokens = super().ordinary_clipped_sum(factors, [])[0]
        if self._only_embeds and self.layer.tie_weights:
            return [of_tokens]
        if self._only_embeds:
            return self._by_variable(of_tokens, tf.zeros_like(of_tokens))
        hidden = scale_examples(self._hidden, factors)[:, tf.newaxis]
        return self._by_variable(of_tokens, sum_of_products(masked[0][:, tf.newaxis], hidden)[0])

    def costs(self):
        """See `Rule.costs`. The costs are as for a `Dense` layer at the positions of both calls."""
        if self._only_embeds:
            return super().costs()
        count, length, size = self._logits.shape
        count, logits = count or 32, length or 1024
        length = logits + (1024 if self._tokens.shape[1] is None else self._tokens.shape[1])
        width = self._hidden.shape[2]
        multiply, pairs = 2.0 * count * length * size * width, float(count) * length**2
        products = 2.0 * count * (logits**2 * size + length**2 * width)
        instances = FLOAT * count * size * width
        return {
            "instantiate": Cost(multiply, bytes=3 * instances),
            "contract": Cost(bytes=instances),
            "ghost": Cost(products, bytes=6 * FLOAT * pairs),
            "ordinary": Cost(multiply, bytes=FLOAT * count * length * width),
        }

    @property
    def _only_embeds(self):
        return self._logits.shape[1] == 0

    def _by_variable(self, of_tokens, of_logits):
        """Returns a list of the gradients of `variables`.

        Args:
            of_tokens: [..., vocabulary, d], the gradient from calls that embed tokens.
            of_logits: [..., vocabulary, d], the gradient from calls that compute logits.
        """
        layer = self.layer
        if layer.tie_weights:
            return [of_tokens + of_logits]
        of_logits = tf.linalg.matrix_transpose(of_logits)
        pairs = [(layer.embeddings, of_tokens), (layer.reverse_embeddings, of_logits)]
        return self.in_order(pairs)

    def _rows_in_pairs(self):
        """Returns the inner products of all pairs of rows, float32 [B, 1, T + S, T + S].

        The rows are the T rows of O, followed by the S rows of L. The class defines O and L.
        """
        is_same = tf.equal(self._tokens[:, :, tf.newaxis], self._tokens[:, tf.newaxis, :])
        across = tf.gather(self._logits, self._tokens, axis=2, batch_dims=1)  # [B, S, T].
        upper = [tf.cast(is_same, "float32"), tf.transpose(across, [0, 2, 1])]
        lower = [across, gram(self._logits)]
        rows = [tf.concat(parts, axis=2) for parts in (upper, lower)]
        return tf.concat(rows, axis=1)[:, tf.newaxis]


def _is_reversible(layer_class):
    """Returns whether a class is the `ReversibleEmbedding` of Keras or of an older KerasHub."""
    keras_class = getattr(keras.layers, "ReversibleEmbedding", None)
    name = keras.saving.get_registered_name(layer_class)
    return layer_class is keras_class or name == "keras_hub>ReversibleEmbedding"


def _is_reverse(call):
    return bool(call.kwargs.get("reverse", call.args[1] if len(call.args) > 1 else False))
