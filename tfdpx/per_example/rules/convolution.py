"""The rules of `Conv2D`, and of depthwise and separable convolutions of images and sequences."""

import copy
import dataclasses
import functools
import math
import types

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx._keras.tensorflow_internals import call_cached_trace
from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost, cheapest
from tfdpx.per_example.rows import (
    Rows,
    positions,
    repeat_views,
    scale_examples,
    sum_rows,
)
from tfdpx.per_example.rule import BeforeActivation, RuleOfParts, register
from tfdpx.per_example.rules.contraction import FLOAT, gram, length
from tfdpx.per_example.rules.window import Window

# The time to copy one channel of a pixel into strided patches, expressed in bytes of traffic. At
# most three channels are counted, because further channels are copied together with these.
_BYTES_OF_COPY = 60


@register(keras.layers.Conv2D)
class Conv2DRule(BeforeActivation):
    """The rule of `Conv2D` for any stride, padding, dilation, groups and data format.

    Let A [T, fan_in] be the patches at an example's T positions, and G [T, out] the output
    gradients. Then the kernel gradient is A^T G. The rule forms kernel gradients in one of two
    ways. It can multiply patches and output gradients of all examples at once. Or it can make one
    call for each example, to compute the ordinary kernel gradient for the images of this example.
    If there are few positions, as in late layers, it is cheaper to compute the norm as
    `<A A^T, G G^T>`.

    In a subclass, the convolution's kernel may be a function of the trained kernel. An example is
    weight standardization. Such a subclass sets `filter_scale`, `weights` and `unit`, and replaces
    `to_kernel`, `to_sum`, `measured` and `small_gradients`.

    Attributes:
        inputs: float32 [B * K, H, W, C], channels last in any data format of the layer.
        convolved_gradients: float32 [B * K, H', W', out], the gradients with respect to the outputs
            of the convolution.
        window: The `Window` of the convolution.
        groups: Int, the number of groups.
        filter_scale: float32 [out], a factor for the gradient of each filter, or None for ones.
            Where possible, the rule multiplies kernel gradients by the factors, which is cheaper
            than to multiply output gradients.
        weights: float32 [n, out], a weight for each row and filter of `statistics` in the squared
            norm. None means that all weights are one.
        unit: float32 [*kernel_shape] or None. If set, `statistics` includes the inner product of
            each filter's gradient and this array.
    """

    assumes: tuple[str, ...] = ("call", "convolution_op", "kernel")

    filter_scale = weights = unit = None

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        self.window = Window.from_layer(self.layer)
        self.inputs = channels_last(tf.cast(call.args[0], "float32"), self.layer)
        self.convolved_gradients = channels_last(self.output_gradients[0], self.layer)
        if self.window.taps == 1 and max(self.window.strides) > 1:
            # TensorFlow 2.21's gradient of such kernels writes beyond the end of a buffer on CPUs
            # (oneDNN's 1x1 convolution on channels that are no multiple of 16). Without strides it
            # is safe.
            rows, columns = self.window.strides
            self.inputs = self.inputs[:, ::rows, ::columns]
            self.window = dataclasses.replace(self.window, strides=(1, 1))
        self.groups = self.inputs.shape[-1] // self.kernel_shape[2]

    @property
    def kernel_shape(self):
        """Returns the shape [height, width, in / groups, out] of the convolution's kernel."""
        return list(self.layer.kernel.shape)

    def sum_positions(self, images):
        """Sums `images` [B * K, H', W', out] over views and positions. Returns [B, out]."""
        return sum_rows(images, self.num_views, [1, 2])

    def kernel_gradient(self, inputs, output_gradients):
        """Returns the gradient of the convolution's kernel, summed over images.

        Args:
            inputs: float32 [N, H, W, C].
            output_gradients: float32 [N, H', W', out].
        """
        return self.window.kernel_gradient(inputs, output_gradients, self.kernel_shape)

    @functools.cached_property
    def kernel_instances(self):
        """Returns each example's gradient of the convolution's kernel, [B, *kernel_shape]."""
        return self._loop_results[0] if self._by_calls else self._multiply_patches()

    @property
    def statistics(self):
        """Returns squared statistics of each filter's gradient, float32 [B, 1 or 3, out].

        The first row is the sum of the squares of the gradient's entries. If `unit` is set, there
        are two more rows: the square of the sum of the entries, and the square of the inner product
        of the gradient and `unit`.
        """
        if self._by_calls:
            return self._loop_results[1]
        return _statistics(self.kernel_instances, self.unit)

    def instance_costs(self):
        """Returns two `Cost`s, for the two ways to form `kernel_instances`.

        The first way is one call for each example. The second way is a product of patches and
        output gradients for all examples.
        """
        count, positions, fan_in, fan_out = self.sizes()
        multiply = 2.0 * count * positions * self.groups * fan_in * fan_out
        patches = FLOAT * count * positions * self.groups * fan_in
        is_strided = max(self.window.strides) > 1 and not self.call.jit_compile
        copies = count * positions * self.window.taps * min(self.kernel_shape[2], 3) * is_strided
        calls = math.inf if self.call.jit_compile else count * self.groups
        by_calls = Cost(multiply, calls=calls)
        return by_calls, Cost(multiply, bytes=4 * patches + _BYTES_OF_COPY * copies)

    def sizes(self):
        """Returns the numbers of examples and positions, and a group's fan-in and fan-out.

        The positions of all views of an example are counted together. A size that is not static is
        guessed.
        """
        rows, height, width, out = self.convolved_gradients.shape
        fan_in = self.window.taps * self.kernel_shape[2]
        area = 1024 if None in (height, width) else height * width
        count = 32 if rows is None else rows // self.num_views
        return count, area * self.num_views, fan_in, out // self.groups

    @property
    def _by_calls(self):
        by_calls, by_patches = self.instance_costs()
        return cheapest(by_calls, by_patches) is by_calls

    @functools.cached_property
    def _loop_results(self):
        """Returns `kernel_instances` and `statistics`, computed in a loop over examples."""
        tensors = self.inputs, self.convolved_gradients, self.unit
        tensors = [t for t in tensors if t is not None]
        kind = self.window, tuple(self.kernel_shape), self.num_views
        return call_cached_trace(_loop_over_examples, kind, *tensors)

    def _multiply_patches(self):
        # Joining slices is the fastest way to form patches, except with strides outside of XLA.
        contiguous = self.call.jit_compile or max(self.window.strides) == 1
        patches = self.window.patches(self.inputs, contiguous)
        # The last axis of the patches enumerates (tap, group, channel of the group).
        patches = self.by_group(patches, self.window.taps)
        gradients = self.by_group(self.convolved_gradients)
        products = tf.matmul(patches, gradients, transpose_a=True)
        if self.groups > 1:
            products = tf.transpose(products, [0, 2, 1, 3])
        return tf.reshape(products, [-1, *self.kernel_shape])

    def by_group(self, images, taps=1):
        """Reshapes `images` [B * K, H', W', taps * groups * c] to [B, groups, T, taps * c].

        T counts the positions of all K views. For patches, `taps` is `self.window.taps`.
        """
        if self.groups == 1:
            return positions(images, self.num_views, groups=True)
        pixels = positions(images, self.num_views)
        channels = pixels.shape[-1] // self.groups
        shape = [tf.shape(pixels)[0], tf.shape(pixels)[1], taps, self.groups, channels // taps]
        pixels = tf.transpose(tf.reshape(pixels, shape), [0, 3, 1, 2, 4])
        return tf.reshape(pixels, [shape[0], self.groups, shape[1], channels])

    def to_kernel(self, gradients):
        """Converts gradients of the convolution's kernel to gradients of the trained kernel.

        The conversion is linear.

        Args:
            gradients: float32 [..., *kernel_shape].
        """
        return gradients

    def scaled(self, gradients):
        """Returns `gradients` [..., out] times `filter_scale`."""
        return gradients if self.filter_scale is None else gradients * self.filter_scale

    @functools.cached_property
    def scaled_gradients(self):
        """Returns `convolved_gradients` times `filter_scale`."""
        return self.scaled(self.convolved_gradients)

    def to_sum(self, total):
        """Converts a clipped sum for the convolution's kernel to a sum for the trained kernel."""
        return self.to_kernel(total)

    def measured(self, norms):
        """Converts norms for the convolution's kernel to norms for the trained kernel.

        Args:
            norms: `rounding.Measured` of the gradients of the convolution's kernel times
                `filter_scale`. After a ghost norm, `squares` has only the squared norm. Otherwise
                it has the rows of `statistics`, times `weights` and summed over filters.
        """
        return norms

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`. Covers all variables except the kernel."""
        if not self.explains(self.layer.bias):
            return []
        return [(self.layer.bias, self.sum_positions(self.convolved_gradients))]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        pairs = list(self.small_gradients)
        if self.explains(self.layer.kernel):
            instances = self.scaled(self.kernel_instances)
            pairs.append((self.layer.kernel, self.to_kernel(instances)))
        return self.in_order(pairs)

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`."""
        return self.measured(self._measure_instances())

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        return self.measured(self._measure_inner_products())

    @property
    def inputs_to_mask(self):
        """See `Rule.inputs_to_mask`."""
        return [self.kernel_instances if self.choice.sum == "contract" else self.inputs]

    def contracted_clipped_sum(self, factors, masked):
        """See `Rule.contracted_clipped_sum`."""
        [instances] = masked
        flat = tf.reshape(instances, [-1, math.prod(self.kernel_shape)])
        total = tf.matmul(tf.reshape(factors, [1, -1]), flat)
        return [self.to_sum(tf.reshape(total, self.kernel_shape))]

    def ordinary_clipped_sum(self, factors, masked):
        """See `Rule.ordinary_clipped_sum`."""
        row_factors = repeat_views(factors, self.num_views)
        gradients = scale_examples(self.convolved_gradients, row_factors)
        return [self.to_sum(self.kernel_gradient(*masked, gradients))]

    def costs(self):
        """See `Rule.costs`."""
        count, positions, fan_in, fan_out = self.sizes()
        multiply = 2.0 * count * positions * self.groups * fan_in * fan_out
        instances = FLOAT * count * self.groups * fan_in * fan_out
        pairs = count * self.groups * positions**2
        costs = {
            "instantiate": cheapest(*self.instance_costs()) + Cost(bytes=3 * instances),
            "contract": Cost(bytes=instances),
            "ordinary": Cost(multiply, bytes=FLOAT * count * positions * self.groups * fan_out),
        }
        if None not in (*self.inputs.shape[1:3], *self.convolved_gradients.shape[1:3]):
            products, taps = self.window.gram_sizes(*self.inputs.shape[1:3], self.num_views)
            shifts = sum(self.window.size) if taps == 1 else 0
            costs["ghost"] = Cost(
                2.0 * (pairs * fan_out + count * products * taps * self.inputs.shape[-1]),
                FLOAT * (count * self.groups * products + (3 + shifts) * pairs),
            )
        return costs

    def _measure_instances(self):
        statistics = self.statistics
        if self.weights is not None:
            statistics *= self.weights
        squares = tf.reduce_sum(statistics, axis=2)
        sizes = math.prod(self.kernel_shape[:3]), self.kernel_shape[3]
        errors = rounding.errors_of_squares(sizes)
        if self.choice.sum == "contract":
            return rounding.Measured(squares, 1, None, *errors)
        return rounding.Measured(squares, self.sizes()[1], self._magnitudes(), *errors)

    def allows_ordinary_sum(self):
        """See `Rule.allows_ordinary_sum`."""
        has_known_size = None not in self.convolved_gradients.shape[1:3]
        return (
            self.groups == 1
            and has_known_size
            and self.sizes()[1] <= rounding.MOST_POSITIONS_ALLOWED_FOR
        )

    def _magnitudes(self):
        """Returns M (see `rounding`), computed from the norms of patches and output gradients."""
        pixels = tf.reduce_sum(tf.square(self.inputs), axis=-1, keepdims=True)
        patches = self.window.convolve(pixels, tf.ones([*self.window.size, 1, 1]))
        gradients = tf.square(self.scaled_gradients)
        gradients = tf.reduce_sum(gradients, axis=-1, keepdims=True)
        # The last factor is larger than the rounding errors of the two sums of squares.
        lengths = tf.sqrt(patches) * tf.sqrt(gradients) * (1.0 + 1e-3)
        return self.sum_positions(lengths)

    def _measure_inner_products(self):
        gradients, images = self.by_group(self.scaled_gradients), self.inputs
        if self.groups > 1:  # Each group of channels is a separate image here.
            _, *area, channels = images.shape
            shape = [-1, self.num_views, *area, self.groups, channels // self.groups]
            images = tf.transpose(tf.reshape(images, shape), [0, 4, 1, 2, 3, 5])
            images = tf.reshape(images, [-1, *area, channels // self.groups])
        products = self.window.gram(images, self.num_views, self.call.jit_compile)
        squares, magnitudes = rounding.squared_norms_of_products(
            tf.reshape(products, [-1, self.groups, *products.shape[1:]]),
            gram(gradients),
            self.window.gram_terms(self.kernel_shape[2]),
            gradients.shape[-1],
        )
        squares = tf.reduce_sum(squares, axis=1, keepdims=True)
        return rounding.Measured(squares, rounding.size_of(gradients, 2), length(magnitudes))


@register(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseConvRule(Conv2DRule):
    """The rule of depthwise convolutions, where each channel is a group.

    A sequence is treated as an image with one row.

    The layer convolves each channel separately, so the images of all examples can become channels
    of one image. Then one ordinary weight gradient, or one convolution of images with output
    gradients, contains the gradients of all examples.
    """

    assumes = ("call", "kernel")
    _by_calls = False

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`. The layer must not have both strides and dilation.

        `Window` does not support this combination.
        """
        return not _is_strided_and_dilated(layer) and super().handles(layer, registered_class)

    @property
    def kernel_shape(self):
        """See `Conv2DRule.kernel_shape`."""
        return [*self.window.size, 1, math.prod(self.layer.kernel.shape[-2:])]

    def to_kernel(self, gradients):
        """See `Conv2DRule.to_kernel`."""
        lead = tf.shape(gradients)[:-4]
        return tf.reshape(gradients, tf.concat([lead, self.layer.kernel.shape], axis=0))

    def kernel_gradient(self, inputs, output_gradients):
        """See `Conv2DRule.kernel_gradient`."""
        channels, multiplier = inputs.shape[-1], self.layer.depth_multiplier
        gradient = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=inputs,
            filter_sizes=[*self.window.size, tf.shape(inputs)[-1], multiplier],
            out_backprop=output_gradients,
            strides=[1, *self.window.strides, 1],
            padding=self.window.padding.upper(),
        )
        shape = [*self.window.size, 1, -1 if channels is None else channels * multiplier]
        return tf.reshape(gradient, shape)

    @functools.cached_property
    def kernel_instances(self):
        """See `Conv2DRule.kernel_instances`."""
        sizes = [*self.inputs.shape[1:3], *self.convolved_gradients.shape[1:3]]
        if None in sizes:
            return self._multiply_patches()
        images, gradients = map(_join_as_channels, (self.inputs, self.convolved_gradients))
        # oneDNN has a kernel for this case; TensorFlow's kernel is up to 400 times slower.
        is_plain = max(self.window.dilation) == 1 and len(set(self.window.strides)) == 1
        if is_plain and max(self.window.size) <= 3 <= min(sizes):
            gradients = self.kernel_gradient(images, gradients)
        else:
            shape = [*sizes[2:], -1, self.layer.depth_multiplier]
            gradients = self.window.correlate(images, tf.reshape(gradients, shape))
        height, width, _, out = self.kernel_shape
        gradients = tf.reshape(gradients, [height, width, 1, -1, out])
        return sum_rows(tf.transpose(gradients, [3, 0, 1, 2, 4]), self.num_views)

    def costs(self):
        """See `Rule.costs`. Kernel gradients are always formed, because they are small."""
        costs = super().costs()
        return {way: costs[way] for way in ("instantiate", "contract")}


class _PointwiseRule(Conv2DRule):
    """The rule of the second part of a separable convolution, with a kernel of one pixel."""

    kernel_shape = property(lambda self: [1, 1, *self.layer.kernel.shape[-2:]])
    to_kernel = DepthwiseConvRule.to_kernel


@register(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
class SeparableConvRule(RuleOfParts):
    """The rule of separable convolutions.

    Such a layer is a depthwise convolution, followed by a convolution with a kernel of one pixel.
    The rule also watches the outputs of the first convolution, to get the gradient with respect to
    these.
    """

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`. The layer must not have both strides and dilation."""
        return not _is_strided_and_dilated(layer) and super().handles(layer, registered_class)

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`."""
        layer, ops = call.layer, keras.ops

        def convolve(inputs):
            settings = layer.strides, layer.padding, layer.data_format, layer.dilation_rate
            channels = watch(ops.depthwise_conv(inputs, layer.depthwise_kernel, *settings))
            call.kept["channels"] = channels
            outputs = ops.conv(
                channels, layer.pointwise_kernel, padding="valid", data_format=layer.data_format
            )
            if layer.bias is None:
                return outputs
            is_last = layer.data_format == "channels_last"
            axes = [] if is_last else [1] * layer.rank
            return outputs + ops.reshape(layer.bias, [-1, *axes])

        linear = layer_internals.without(layer, call=convolve)
        return call.activate(watch(layer_internals.call_operation(linear, call.args, call.kwargs)))

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        layer, ones = self.layer, (1,) * self.layer.rank
        at_channels, at_outputs = output_gradients
        shared = {"name": layer.name, "data_format": layer.data_format}
        depthwise = types.SimpleNamespace(
            **shared, kernel=layer.depthwise_kernel, bias=None, kernel_size=layer.kernel_size,
            strides=layer.strides, dilation_rate=layer.dilation_rate, padding=layer.padding,
            depth_multiplier=layer.depth_multiplier,
        )  # fmt: skip
        pointwise = types.SimpleNamespace(
            **shared, kernel=layer.pointwise_kernel, bias=None, kernel_size=ones, strides=ones,
            dilation_rate=ones, padding="valid",
        )  # fmt: skip
        self._pointwise = _PointwiseRule(
            _part(call, pointwise, call.kept["channels"]),
            [at_outputs],
            num_views,
            [pointwise.kernel],
        )
        self._depthwise = DepthwiseConvRule(
            _part(call, depthwise, call.args[0]), [at_channels], num_views, [depthwise.kernel]
        )
        parts = self._depthwise, self._pointwise
        self.parts = [part for part in parts if self.explains(part.layer.kernel)]

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`. Returns the gradients of the bias."""
        if not self.explains(self.layer.bias):
            return []
        gradients = self._pointwise.convolved_gradients
        return [(self.layer.bias, self._pointwise.sum_positions(gradients))]


def _part(call, layer, inputs):
    """Returns a copy of a call, changed to a call of `layer` on `inputs`.

    `layer` is one of the two convolutions of the called layer.
    """
    part = copy.copy(call)
    part.layer, part.args = layer, (inputs,)
    return part


def _is_strided_and_dilated(layer):
    return max(layer.strides) > 1 and max(layer.dilation_rate) > 1


def _join_as_channels(images):
    """Turns images [N, H, W, C] into the channels of one image, [1, H, W, N * C]."""
    channels = tf.transpose(images, [1, 2, 0, 3])
    return tf.reshape(channels, tf.concat([[1], tf.shape(channels)[:2], [-1]], axis=0))


def _loop_over_examples(window, kernel_shape, num_views, inputs, output_gradients, unit=None):
    """Computes `kernel_instances` and `statistics` in a loop, one example after the other."""
    count = Rows(inputs).count // num_views

    def compute_next(index, instances, statistics):
        rows = slice(index * num_views, (index + 1) * num_views)
        gradient = window.kernel_gradient(inputs[rows], output_gradients[rows], kernel_shape)
        # In the loop, the squares and products need memory for only one example at a time.
        values = _statistics(gradient[tf.newaxis], unit)[0]
        return index + 1, instances.write(index, gradient), statistics.write(index, values)

    # A graph with nodes for each example would be slow to make, and would suit only one number of
    # examples.
    arrays = [tf.TensorArray("float32", count) for _ in range(2)]
    _, *values = tf.while_loop(
        lambda index, *_: index < count,
        compute_next,
        (tf.constant(0), *arrays),
        parallel_iterations=2,
    )
    return [array.stack() for array in values]


def _statistics(gradients, unit):
    """Returns `Conv2DRule.statistics` for kernel gradients [n, *kernel_shape]."""
    filters = [1, 2, 3]
    squares = [tf.reduce_sum(tf.square(gradients), filters)]
    if unit is not None:
        for tensor in gradients, gradients * unit:
            squares.append(tf.square(tf.reduce_sum(tensor, filters)))
    return tf.stack(squares, axis=1)


def channels_last(images, layer):
    """Converts images to [N, H, W, C]. A sequence becomes an image with one row."""
    if layer.data_format != "channels_last":
        images = tf.transpose(images, [0, *range(2, images.shape.rank), 1])
    return images if images.shape.rank == 4 else images[:, tf.newaxis]
