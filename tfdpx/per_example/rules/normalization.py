"""`keras.layers.LayerNormalization` and `GroupNormalization`: scale and offset per channel."""

import functools

import keras
import tensorflow as tf
from keras import ops

from tfdpx import keras_internals
from tfdpx.per_example.registry import register
from tfdpx.per_example.rows import sum_rows
from tfdpx.per_example.rules.base import Rule


class ScaleAndOffsetRule(Rule):
    """With y = gamma * z + beta: gradients sum(G * z) and sum(G) over all but the feature axes."""

    def scale_gradients(self):
        """float32 [B, *features]: sum(G * z)."""
        raise NotImplementedError

    def offset_gradients(self):
        """float32 [B, *features]: sum(G)."""
        raise NotImplementedError

    @functools.cached_property
    def kept(self):
        """See `Rule.kept`: everything."""
        layer = self.layer
        ways = (layer.beta, self.offset_gradients), (layer.gamma, self.scale_gradients)
        return [(v, gradients()) for v, gradients in ways if self.explains(v)]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        return self.in_order(self.kept)


@register(keras.layers.GroupNormalization)
class GroupNormalizationRule(ScaleAndOffsetRule):
    """Group normalization.

    z is not formed: with the mean m and deviation s of an image's group, which the layer computes
    anyway, `sum(G * z) = (sum(G * x) - m sum(G)) / s`.
    """

    assumes = ("call", *keras_internals.GROUP_NORMALIZATION_STEPS)

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`."""
        outputs = super().forward(call, watch)
        layer = call.layer
        # As the layer does, so that the graph's common subexpressions are merged.
        groups = keras_internals.in_groups(layer, ops.cast(call.args[0], layer.compute_dtype))
        groups = ops.cast(groups, "float32")
        axis = layer.axis % call.args[0].shape.rank  # Of the groups; behind it their channels.
        axes = [a for a in range(1, groups.shape.rank) if a != axis]
        call.kept["moments"] = ops.moments(groups, axes=axes, keepdims=True)
        return outputs

    def scale_gradients(self):
        """See `ScaleAndOffsetRule`."""
        groups = self.layer.groups
        mean, variance = (tf.reshape(m, [-1, groups, 1]) for m in self.call.kept["moments"])
        inputs = tf.cast(self.call.args[0], "float32")
        products = self._sum_positions(self.output_gradients[0] * inputs)
        # [B * K, groups, channels of a group].
        products, sums = (
            tf.reshape(t, [-1, groups, t.shape[1] // groups]) for t in (products, self._total)
        )
        gradients = (products - mean * sums) * tf.math.rsqrt(variance + self.layer.epsilon)
        return sum_rows(tf.reshape(gradients, [-1, groups * gradients.shape[2]]), self.num_views)

    def offset_gradients(self):
        """See `ScaleAndOffsetRule`."""
        return sum_rows(self._total, self.num_views)

    @functools.cached_property
    def _total(self):
        return self._sum_positions(self.output_gradients[0])

    def _sum_positions(self, tensor):
        channels = self.layer.axis % tensor.shape.rank
        return tf.reduce_sum(tensor, [a for a in range(1, tensor.shape.rank) if a != channels])


@register(keras.layers.LayerNormalization)
class LayerNormalizationRule(ScaleAndOffsetRule):
    """Layer normalization, RMS scaling included."""

    @classmethod
    def handles(cls, layer, registered_class):
        """Feature axes in rising order: the weights' axes then follow the input's."""
        axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
        same_sign = all(a < 0 for a in axes) or all(a >= 0 for a in axes)
        rising = list(axes) == sorted(axes)
        return same_sign and rising and super().handles(layer, registered_class)

    def scale_gradients(self):
        """See `ScaleAndOffsetRule`."""
        # In float32, also where the layer computes in bfloat16.
        plain = keras_internals.in_float32(self.layer, gamma=None, beta=None)
        normalized = plain.call(tf.cast(self.call.args[0], "float32"))
        return self._sum_positions(self.output_gradients[0] * normalized)

    def offset_gradients(self):
        """See `ScaleAndOffsetRule`."""
        return self._sum_positions(self.output_gradients[0])

    def _sum_positions(self, tensor):
        axes = self.layer.axis
        axes = [axes] if isinstance(axes, int) else list(axes)
        rank = tensor.shape.rank
        features = {axis % rank for axis in axes}
        summed = [axis for axis in range(1, rank) if axis not in features]
        return sum_rows(tensor, self.num_views, summed)
