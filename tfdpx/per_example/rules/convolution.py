"""`keras.layers.Conv2D`."""

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, by_example, weigh


@register(keras.layers.Conv2D)
class Conv2DRule(Rule):
    """Kernel gradients from image patches; any stride, padding, dilation, groups and data format.

    With the patches A [T, fan_in] and output gradients G [T, out] of an example's T positions, the
    kernel gradient is A^T G. Its norm needs only `<A A^T, G G^T>`, which is cheaper where positions
    are few against weights (late layers); the sum over examples is one ordinary weight gradient.

    A subclass whose effective kernel is a function of the trained one (weight standardization)
    replaces `effective_kernel`, `from_effective` and `kernel_squared_norms`.
    """

    splits_activation = True
    assumes = ("call", "convolution_op", "kernel")

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        self._inputs = tf.cast(call.args[0], "float32")
        self._gradients = tf.cast(gradients[0], "float32")

    def effective_kernel(self):
        """The float32 kernel [kh, kw, in / groups, out] that the convolution uses."""
        return tf.cast(self.layer.kernel.value, "float32")

    def from_effective(self, gradients):
        """Pairs (variable, [B, *shape]) from effective-kernel gradients [B, kh, kw, in, out]."""
        return [(self.layer.kernel, gradients)]

    def kernel_squared_norms(self):
        """A list of float32 [B]: squared norms for each trained variable but the bias."""
        if not self.explains(self.layer.kernel):
            return []
        return [self.product_squared_norms(self.grouped(self._gradients))]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        layer = self.layer
        gradients = self.grouped(self._gradients)
        kernel = tf.einsum("npgf,npgo->nfgo", self.patches(), gradients)
        fan_in = kernel.shape[1] // self._taps
        kernel = tf.reshape(kernel, [-1, *layer.kernel_size, fan_in, layer.filters])
        return self.in_order([*self.from_effective(kernel), (layer.bias, self._bias())])

    def squared_norms(self):
        """See `Rule.squared_norms`."""
        norms = self.kernel_squared_norms()
        if self.explains(self.layer.bias):
            norms.append(tf.reduce_sum(tf.square(self._bias()), axis=1))
        return tf.add_n(norms)

    def clipped_sum(self, factors):
        """See `Rule.clipped_sum`: the ordinary gradient of the whole batch, once rescaled."""
        layer = self.layer
        factors = tf.repeat(factors, self.views)
        gradients = weigh(self._gradients, factors)
        inputs = weigh(self._inputs, tf.cast(factors > 0, "float32"))
        targets = [v.value for v in self.variables if v is not layer.bias]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(targets)
            convolved = self.convolve(inputs, self.effective_kernel())
        sums = tape.gradient(convolved, targets, output_gradients=gradients)
        sums = {id(t): tf.cast(s, "float32") for t, s in zip(targets, sums, strict=True)}
        bias = tf.reduce_sum(self._channels_last(gradients), axis=[0, 1, 2])
        return [bias if v is layer.bias else sums[id(v.value)] for v in self.variables]

    def product_squared_norms(self, gradients):
        """float32 [B]: |A^T G|^2, by instantiating it or from inner products of positions.

        Args:
            gradients: G, float32 [B, T, groups, out / groups].
        """
        patches = self.patches()
        (positions, _, fan_in), fan_out = patches.shape[1:], gradients.shape[-1]
        if positions is not None and positions * (fan_in + fan_out) < fan_in * fan_out:
            inputs = tf.einsum("npgf,nqgf->ngpq", patches, patches)
            outputs = tf.einsum("npgo,nqgo->ngpq", gradients, gradients)
            # Rounding may leave a zero norm slightly negative.
            return tf.maximum(tf.reduce_sum(inputs * outputs, axis=[1, 2, 3]), 0.0)
        products = tf.einsum("npgf,npgo->ngfo", patches, gradients)
        return tf.reduce_sum(tf.square(products), axis=[1, 2, 3])

    def convolve(self, inputs, kernel):
        """The layer's convolution of float32 `inputs` with `kernel`, without bias."""
        layer = self.layer
        return keras.ops.conv(
            inputs,
            kernel,
            strides=list(layer.strides),
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )

    def grouped(self, outputs):
        """Something of the shape of the layer's output as [B, T, groups, out / groups]."""
        groups = self.layer.groups
        outputs = self._channels_last(tf.cast(outputs, "float32"))
        return self._by_position(outputs, groups, self.layer.filters // groups)

    def patches(self):
        """A, float32 [B, T, groups, fan_in]."""
        groups = self.layer.groups
        images = self._channels_last(self._inputs)
        patches = extract_patches(images, self.layer)
        if groups > 1:
            # Channels run over (kernel row, kernel column, group, channel in the group).
            shape, fan_in = tf.shape(patches), images.shape[-1] // groups
            patches = tf.reshape(patches, [shape[0], -1, self._taps, groups, fan_in])
            patches = tf.transpose(patches, [0, 1, 3, 2, 4])
        else:
            fan_in = images.shape[-1]
        return self._by_position(patches, groups, self._taps * fan_in)

    def _by_position(self, rows, groups, channels):
        """[B * K, ...] as [B, T, groups, channels], with T static if the output's size is."""
        height, width = self._channels_last(self._gradients).shape[1:3]
        if height is None or width is None:
            return tf.reshape(rows, [tf.shape(rows)[0] // self.views, -1, groups, channels])
        return tf.reshape(rows, [-1, self.views * height * width, groups, channels])

    def _bias(self):
        return tf.reduce_sum(
            by_example(self._channels_last(self._gradients), self.views), [1, 2, 3]
        )

    @property
    def _taps(self):
        height, width = self.layer.kernel_size
        return height * width

    def _channels_last(self, images):
        return channels_last(images, self.layer)


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
