"""`keras.layers.LayerNormalization` and `GroupNormalization`: scale and offset per channel."""

import functools

import keras
import tensorflow as tf
from keras import ops

from tfdpx import keras_internals
from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, by_example


class ScaleAndOffsetRule(Rule):
    """With y = gamma * z + beta: gradients sum(G * z) and sum(G) over all but the feature axes."""

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        self.outputs = tf.cast(self.gradients[0], "float32")

    def scale_gradients(self):
        """float32 [B, *features]: sum(G * z)."""
        raise NotImplementedError

    def offset_gradients(self):
        """float32 [B, *features]: sum(G)."""
        raise NotImplementedError

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        pairs = []
        if self.explains(self.layer.beta):
            pairs.append((self.layer.beta, self.offset_gradients()))
        if self.explains(self.layer.gamma):
            pairs.append((self.layer.gamma, self.scale_gradients()))
        return self.in_order(pairs)


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
        products = self._over_positions(self.outputs * tf.cast(self.call.args[0], "float32"))
        # [B * K, groups, channels of a group].
        products, sums = (
            tf.reshape(t, [-1, groups, t.shape[1] // groups]) for t in (products, self._sums)
        )
        gradients = (products - mean * sums) * tf.math.rsqrt(variance + self.layer.epsilon)
        return self._over_views(tf.reshape(gradients, [-1, groups * gradients.shape[2]]))

    def offset_gradients(self):
        """See `ScaleAndOffsetRule`."""
        return self._over_views(self._sums)

    @functools.cached_property
    def _sums(self):
        return self._over_positions(self.outputs)

    def _over_positions(self, tensor):
        channels = self.layer.axis % tensor.shape.rank
        return tf.reduce_sum(tensor, [a for a in range(1, tensor.shape.rank) if a != channels])

    def _over_views(self, rows):
        return tf.reduce_sum(by_example(rows, self.views), axis=1)


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
        return self._over_positions(self.outputs * normalized)

    def offset_gradients(self):
        """See `ScaleAndOffsetRule`."""
        return self._over_positions(self.outputs)

    def _over_positions(self, tensor):
        axes = self.layer.axis
        axes = [axes] if isinstance(axes, int) else list(axes)
        rank = tensor.shape.rank
        kept = {axis % rank + 1 for axis in axes}
        summed = [axis for axis in range(1, rank + 1) if axis not in kept]
        return tf.reduce_sum(by_example(tensor, self.views), axis=summed)
