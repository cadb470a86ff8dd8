"""Rules for the scale and the offset of layer, RMS and group normalization."""

import functools
import math
import typing

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, tensorflow_internals
from tfdpx._keras.tensorflow_internals import call_cached_trace
from tfdpx.per_example.rows import sum_rows
from tfdpx.per_example.rule import Rule, register


class ScaleAndOffsetRule(Rule):
    """A rule for outputs y = gamma * z + beta, with normalized inputs z.

    With output gradients G, the gradient of gamma is sum(G * z), and the gradient of beta is
    sum(G). The sums are over all axes except the batch and the features.
    """

    def scale_gradients(self):
        """Returns sum(G * z), float32 [B, *features]."""
        raise NotImplementedError

    def offset_gradients(self):
        """Returns sum(G), float32 [B, *features]."""
        raise NotImplementedError

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`. Covers all variables of the layer."""
        layer = self.layer
        functions = (layer.beta, self.offset_gradients), (layer.gamma, self.scale_gradients)
        return [(v, gradients()) for v, gradients in functions if self.explains(v)]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        return self.in_order(self.small_gradients)


@register(keras.layers.LayerNormalization)
class LayerNormalizationRule(ScaleAndOffsetRule):
    """The rule of layer normalization, with or without RMS scaling."""

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`. The layer's feature axes must be in rising order."""
        axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
        has_one_sign = all(a < 0 for a in axes) or all(a >= 0 for a in axes)
        is_rising = list(axes) == sorted(axes)
        return has_one_sign and is_rising and super().handles(layer, registered_class)

    def scale_gradients(self):
        """See `ScaleAndOffsetRule.scale_gradients`."""
        return self._sum_normalized(gamma=None, beta=None)

    def offset_gradients(self):
        """See `ScaleAndOffsetRule.offset_gradients`."""
        return self._sum_positions(self.output_gradients[0])

    def _sum_normalized(self, **without):
        """Returns sum(G * z), where z is the output of the layer without scale and offset."""
        # z is computed in float32, even if the layer computes in bfloat16.
        plain = layer_internals.in_float32(self.layer, **without)
        normalized = plain.call(tf.cast(self.call.args[0], "float32"))
        return self._sum_positions(self.output_gradients[0] * normalized)

    def _sum_positions(self, tensor):
        axes = self.layer.axis
        axes = [axes] if isinstance(axes, int) else list(axes)
        rank = tensor.shape.rank
        features = {axis % rank for axis in axes}
        sum_axes = [axis for axis in range(1, rank) if axis not in features]
        return sum_rows(tensor, self.num_views, sum_axes)


@register(keras.layers.RMSNormalization)
class RMSNormalizationRule(LayerNormalizationRule):
    """The rule of RMS normalization, which has only a scale."""

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`. Covers all variables of the layer."""
        return [(self.layer.scale, self.scale_gradients())]

    def scale_gradients(self):
        """See `ScaleAndOffsetRule.scale_gradients`."""
        return self._sum_normalized(scale=1.0)


@register(keras.layers.GroupNormalization)
class GroupNormalizationRule(ScaleAndOffsetRule):
    """The rule of group normalization, which computes all gradients from the same two sums.

    Let x be the n numbers in a group of an image, m their mean, r = 1/sqrt(variance + epsilon) and
    z = r (x - m). Let G be the output gradients. The sums are over positions. The gradient of beta
    is sum(G), and the gradient of gamma is sum(G z) = r (sum(G x) - m sum(G)). The gradient with
    respect to x is

        gamma r G - a - r z b.

    Here a is the sum of gamma r sum(G) over the channels of a group, divided by n. Likewise, b is
    the sum of gamma r sum(G z), divided by n. TensorFlow's own gradient needs three times as many
    operations, and sum(G) and sum(G z) would have to be computed again.
    """

    assumes = ("call", *layer_internals.GROUP_NORMALIZATION_STEPS)

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`."""
        layer, tensors = call.layer, call.kept

        def normalize(inputs):
            kind = (_Kind.from_layer(layer, inputs),)
            weights = [w for w in (layer.gamma, layer.beta) if w is not None]
            weights = [tf.convert_to_tensor(weight.value) for weight in weights]

            def function(inputs):
                outputs, *tensors["statistics"] = call_cached_trace(
                    _forward, kind, inputs, *weights
                )
                return [outputs]

            def gradient(output_gradients):
                input_gradients, tensors["sums"] = call_cached_trace(
                    _backward, kind, output_gradients, inputs, *tensors["statistics"]
                )
                return [input_gradients]

            return tensorflow_internals.differentiated_by(gradient, function, inputs)[0]

        layer = layer_internals.without(layer, call=normalize)
        return watch(layer_internals.call_operation(layer, call.args, call.kwargs))

    def offset_gradients(self):
        """See `ScaleAndOffsetRule.offset_gradients`."""
        return sum_rows(self._sums[0], self.num_views)

    def scale_gradients(self):
        """See `ScaleAndOffsetRule.scale_gradients`."""
        return sum_rows(self._sums[1], self.num_views)

    @property
    def _sums(self):
        tensors = self.call.kept
        if "sums" not in tensors:  # No backward pass ran, because the input needs no gradient.
            kind, inputs = (_Kind.from_layer(self.layer, self.call.args[0]),), self.call.args[0]
            arguments = self.output_gradients[0], inputs, *tensors["statistics"]
            _, tensors["sums"] = call_cached_trace(_backward, kind, *arguments)
        return tensors["sums"]


class _Kind(typing.NamedTuple):
    """The properties of a layer and its inputs. Calls with equal properties share traced functions.

    The functions compute on arrays [N, before, groups, channels of a group, after]. Here `before`
    and `after` count the positions before and after the channel axis. Arrays are float32, or
    float64 if the inputs are. Each row of a result depends on only one row of the inputs.

    Attributes:
        axis: Int, the axis of the channels.
        groups: Int, the number of groups.
        channels: Int, the number of channels in a group.
        epsilon: Float.
        has_gamma, has_beta: Bools, whether the layer has these weights.
        output_dtype: Str, the dtype of the outputs.
    """

    axis: int
    groups: int
    channels: int
    epsilon: float
    has_gamma: bool
    has_beta: bool
    output_dtype: str

    @classmethod
    def from_layer(cls, layer, inputs):
        """Returns the `_Kind` of a call of a `keras.layers.GroupNormalization` on `inputs`."""
        axis = layer.axis % inputs.shape.rank
        channels = inputs.shape[axis] // layer.groups
        settings = layer.epsilon, layer.scale, layer.center, layer.compute_dtype
        return cls(axis, layer.groups, channels, *settings)

    def split(self, tensor):
        """Reshapes a tensor of the inputs' shape to [N, before, groups, channels, after]."""

        def product(axes):
            sizes = tensor.shape[axes]
            return math.prod(sizes) if None not in sizes else tf.reduce_prod(tf.shape(tensor)[axes])

        before, after = product(slice(1, self.axis)), product(slice(self.axis + 1, None))
        dtype = tf.float64 if tensor.dtype == tf.float64 else tf.float32
        return tf.reshape(tf.cast(tensor, dtype), [-1, before, self.groups, self.channels, after])


def _forward(kind, inputs, *weights):
    """Returns four tensors: the layer's output, and m, r and gamma r for the backward pass.

    `GroupNormalizationRule` defines m, r and gamma. The last three tensors are
    [N, 1, groups, channels, 1].
    """
    images = kind.split(inputs)
    # Means and inverses are repeated for each channel. With one number for each group, arithmetic
    # would take twice the time.
    by_channel = [kind.groups, kind.channels, 1]
    ones = tf.ones(by_channel, images.dtype)
    weights = [tf.reshape(tf.cast(w, images.dtype), by_channel) for w in weights]
    mean = _average(images) * ones
    inverse = tf.math.rsqrt(_average(tf.math.squared_difference(images, mean)) + kind.epsilon)
    inverse *= ones
    scale = inverse * weights[0] if kind.has_gamma else inverse
    offset = -mean * scale
    if kind.has_beta:
        offset += weights[-1]
    outputs = tf.reshape(images * scale + offset, tf.shape(inputs))
    outputs = tf.cast(tf.cast(outputs, inputs.dtype), kind.output_dtype)
    return outputs, mean, inverse, scale


def _backward(kind, output_gradients, inputs, mean, inverse, scale):
    """Returns the gradient with respect to the inputs, and a list of sum(G) and sum(G z).

    Each sum is float32 [N, C], with a row for each image. `GroupNormalizationRule` defines G and
    z.
    """
    images = kind.split(inputs)
    gradients = tf.cast(kind.split(output_gradients), images.dtype)
    total = tf.reduce_sum(gradients, [1, 4], keepdims=True)
    products = tf.reduce_sum(gradients * images, [1, 4], keepdims=True)
    sums = total, (products - mean * total) * inverse
    count = tf.cast(tf.reduce_prod(tf.shape(images)[1:]) // kind.groups, images.dtype)
    a, b = (tf.reduce_sum(image_sums * scale, 3, keepdims=True) / count for image_sums in sums)
    slope = inverse * b
    input_gradients = gradients * scale - images * slope + (slope * mean - a)
    sums = [tf.reshape(tf.cast(s, "float32"), [-1, kind.groups * kind.channels]) for s in sums]
    return tf.cast(tf.reshape(input_gradients, tf.shape(inputs)), inputs.dtype), sums


def _average(images):
    """Returns the mean of each group, [N, 1, groups, 1, 1]. Averaging positions first is faster."""
    means = tf.reduce_mean(images, [1, 4], keepdims=True)
    return tf.reduce_mean(means, 3, keepdims=True)
