"""`keras.layers.Conv2D`."""

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, by_example, weigh


@register(keras.layers.Conv2D)
class Conv2DRule(Rule):
    """Kernel gradients from image patches; any stride, padding, dilation, groups and data format.

    A subclass whose effective kernel is a function of the trained one (weight standardization)
    replaces `effective_kernel` and `from_effective`.
    """

    splits_activation = True
    assumes = ("call", "convolution_op", "kernel")

    @classmethod
    def handles(cls, layer, registered_class):
        """Conv2D as Keras made it: no LoRA, no quantization, no `call` of its own."""
        plain = not layer.lora_enabled and getattr(layer, "quantization_mode", None) is None
        return plain and super().handles(layer, registered_class)

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        self._inputs = tf.cast(call.args[0], "float32")
        self._outputs = tf.cast(gradients[0], "float32")

    def effective_kernel(self):
        """The float32 kernel [kh, kw, in / groups, out] that the convolution uses."""
        return tf.cast(self.layer.kernel.value, "float32")

    def from_effective(self, gradients):
        """Pairs (variable, [B, *shape]) from effective-kernel gradients [B, kh, kw, in, out]."""
        return [(self.layer.kernel, gradients)]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        layer = self.layer
        images, outputs = (channels_last(t, layer) for t in (self._inputs, self._outputs))
        patches = by_example(extract_patches(images, layer), self.views)
        outputs = by_example(outputs, self.views)
        groups, (height, width) = layer.groups, layer.kernel_size
        fan_in = images.shape[-1] // groups
        count = tf.shape(outputs)[0]
        # Patch channels run over (kernel row, kernel column, group, channel in the group).
        patches = tf.reshape(patches, [count, -1, height * width, groups, fan_in])
        outputs = tf.reshape(outputs, [count, -1, groups, layer.filters // groups])
        kernel = tf.einsum("npkgi,npgo->nkigo", patches, outputs)
        kernel = tf.reshape(kernel, [count, height, width, fan_in, layer.filters])
        bias = tf.reshape(tf.reduce_sum(outputs, axis=1), [count, layer.filters])
        return self.in_order([*self.from_effective(kernel), (layer.bias, bias)])

    def clipped_sum(self, factors):
        """See `Rule.clipped_sum`: the ordinary gradient of the whole batch, once rescaled."""
        layer = self.layer
        factors = tf.repeat(factors, self.views)
        outputs = weigh(self._outputs, factors)
        inputs = weigh(self._inputs, tf.cast(factors > 0, "float32"))
        targets = [v.value for v in self.variables if v is not layer.bias]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(targets)
            convolved = keras.ops.conv(
                inputs,
                self.effective_kernel(),
                strides=list(layer.strides),
                padding=layer.padding,
                dilation_rate=layer.dilation_rate,
                data_format=layer.data_format,
            )
        sums = tape.gradient(convolved, targets, output_gradients=outputs)
        sums = {id(t): tf.cast(s, "float32") for t, s in zip(targets, sums, strict=True)}
        bias = tf.reduce_sum(channels_last(outputs, layer), axis=[0, 1, 2])
        return [bias if v is layer.bias else sums[id(v.value)] for v in self.variables]


def channels_last(images, layer):
    """`images` [N, H, W, C], whatever the layer's data format."""
    if layer.data_format == "channels_last":
        return images
    return tf.transpose(images, [0, 2, 3, 1])


def extract_patches(images, layer):
    """The patches of `images` [N, H, W, C] under the layer's kernel: [N, H', W', kh * kw * C]."""
    return tf.image.extract_patches(
        images,
        sizes=[1, *layer.kernel_size, 1],
        strides=[1, *layer.strides, 1],
        rates=[1, *layer.dilation_rate, 1],
        padding=layer.padding.upper(),
    )
