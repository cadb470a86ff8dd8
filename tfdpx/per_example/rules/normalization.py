"""Normalizations of features, `LayerNormalization` and `RMSNormalization`: scale and offset."""

import functools

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals
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
    def small_gradients(self):
        """See `Rule.small_gradients`: everything."""
        layer = self.layer
        ways = (layer.beta, self.offset_gradients), (layer.gamma, self.scale_gradients)
        return [(v, gradients()) for v, gradients in ways if self.explains(v)]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        return self.in_order(self.small_gradients)


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
        return self._of_normalized(gamma=None, beta=None)

    def offset_gradients(self):
        """See `ScaleAndOffsetRule`."""
        return self._sum_positions(self.output_gradients[0])

    def _of_normalized(self, **without):
        """sum(G * z), with z the output of the layer `without` its weights."""
        # In float32, also where the layer computes in bfloat16.
        plain = layer_internals.in_float32(self.layer, **without)
        normalized = plain.call(tf.cast(self.call.args[0], "float32"))
        return self._sum_positions(self.output_gradients[0] * normalized)

    def _sum_positions(self, tensor):
        axes = self.layer.axis
        axes = [axes] if isinstance(axes, int) else list(axes)
        rank = tensor.shape.rank
        features = {axis % rank for axis in axes}
        summed = [axis for axis in range(1, rank) if axis not in features]
        return sum_rows(tensor, self.num_views, summed)


@register(keras.layers.RMSNormalization)
class RMSNormalizationRule(LayerNormalizationRule):
    """A scale alone."""

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`: everything."""
        return [(self.layer.scale, self.scale_gradients())]

    def scale_gradients(self):
        """See `ScaleAndOffsetRule`."""
        return self._of_normalized(scale=None)
