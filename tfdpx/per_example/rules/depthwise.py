"""`keras.layers.DepthwiseConv2D`."""

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, by_example
from tfdpx.per_example.rules.convolution import channels_last, extract_patches


@register(keras.layers.DepthwiseConv2D)
class DepthwiseConv2DRule(Rule):
    """Kernel gradients from image patches, channel by channel; the kernel is small."""

    splits_activation = True

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        layer = self.layer
        images = channels_last(tf.cast(self.call.args[0], "float32"), layer)
        outputs = channels_last(tf.cast(self.gradients[0], "float32"), layer)
        patches = by_example(extract_patches(images, layer), self.views)
        outputs = by_example(outputs, self.views)
        height, width = layer.kernel_size
        channels, multiplier = images.shape[-1], layer.depth_multiplier
        count = tf.shape(outputs)[0]
        patches = tf.reshape(patches, [count, -1, height * width, channels])
        outputs = tf.reshape(outputs, [count, -1, channels, multiplier])
        kernel = tf.einsum("npkc,npcm->nkcm", patches, outputs)
        kernel = tf.reshape(kernel, [count, height, width, channels, multiplier])
        bias = tf.reshape(tf.reduce_sum(outputs, axis=1), [count, channels * multiplier])
        return self.in_order([(layer.kernel, kernel), (layer.bias, bias)])
