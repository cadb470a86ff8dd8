"""`keras.layers.LayerNormalization` and `GroupNormalization`: scale and offset per channel."""

import keras
import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, by_example


class ScaleAndOffsetRule(Rule):
    """With y = gamma * z + beta: gradients sum(G * z) and sum(G) over all but the feature axes."""

    def normalized(self):
        """z, float32 of the shape of the layer's input."""
        raise NotImplementedError

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        layer, outputs = self.layer, tf.cast(self.gradients[0], "float32")
        pairs = []
        if self.explains(layer.beta):
            pairs.append((layer.beta, self._over_features(outputs)))
        if self.explains(layer.gamma):
            pairs.append((layer.gamma, self._over_features(outputs * self.normalized())))
        return self.in_order(pairs)

    def plain(self, **attributes):
        """The layer without scale and offset, on float32, also where it computes in bfloat16."""
        float32 = keras.DTypePolicy("float32")
        layer = keras_hook.without(self.layer, _dtype_policy=float32, **attributes)
        return layer.call(tf.cast(self.call.args[0], "float32"))

    def _over_features(self, tensor):
        axes = self.layer.axis
        axes = [axes] if isinstance(axes, int) else list(axes)
        rank = tensor.shape.rank
        kept = {axis % rank + 1 for axis in axes}
        summed = [axis for axis in range(1, rank + 1) if axis not in kept]
        return tf.reduce_sum(by_example(tensor, self.views), axis=summed)


@register(keras.layers.GroupNormalization)
class GroupNormalizationRule(ScaleAndOffsetRule):
    """Group normalization."""

    assumes = ("call", "_reshape_into_groups", "_apply_normalization")

    def normalized(self):
        """See `ScaleAndOffsetRule`."""
        return self.plain(scale=False, center=False)


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

    def normalized(self):
        """See `ScaleAndOffsetRule`."""
        return self.plain(gamma=None, beta=None)
