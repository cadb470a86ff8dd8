"""`keras.layers.Conv2D`."""

import functools
import math

import keras
import tensorflow as tf

from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost, cheapest
from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import (
    BeforeActivation,
    by_example,
    positions,
    weigh,
)
from tfdpx.per_example.rules.products import FLOAT, gram
from tfdpx.per_example.rules.window import Window

# Up to here one graph node an example; beyond, a loop keeps the graph small.
_UNROLLED = 64


@register(keras.layers.Conv2D)
class Conv2DRule(BeforeActivation):
    """Any stride, padding, dilation, groups and data format.

    With the patches A [T, fan_in] and output gradients G [T, out] of an example's T positions, the
    kernel gradient is A^T G. It is formed as that product, or by an ordinary weight gradient of the
    example's images alone. Its norm needs only `<A A^T, G G^T>`, cheaper where positions are few
    (late layers).

    A subclass whose convolution uses a function of the trained kernel (weight standardization)
    sets `filter_scale` and replaces `to_kernel`, `kernel_squared_norms` and `small_gradients`.

    Attributes:
        filter_scale: float32 [out], or None for ones: what each filter's gradient is multiplied by,
            which is cheaper done to gradients of kernels than to those of outputs.
    """

    assumes = ("call", "convolution_op", "kernel")

    filter_scale = None

    def __init__(self, call, gradients, views, variables):
        super().__init__(call, gradients, views, variables)
        layer = self.layer
        self.window = Window(layer)
        self.inputs = channels_last(tf.cast(call.args[0], "float32"), layer)
        self.outputs = channels_last(tf.cast(gradients[0], "float32"), layer)
        if self.window.taps == 1 and max(self.window.strides) > 1:
            # TensorFlow 2.21's gradient of such kernels writes beyond its memory on CPUs (oneDNN's
            # 1x1 convolution on channels that are no multiple of 16). Without strides it is safe.
            rows, columns = self.window.strides
            self.inputs, self.window.strides = self.inputs[:, ::rows, ::columns], (1, 1)
        self.groups = self.inputs.shape[-1] // self.kernel_shape[2]

    @property
    def kernel_shape(self):
        """[height, width, in / groups, out] of the convolution's kernel."""
        return list(self.layer.kernel.shape)

    def to_kernel(self, gradients):
        """Carries gradients at the convolution's kernel to the trained kernel; linear.

        Args:
            gradients: float32 [..., *kernel_shape].
        """
        return gradients

    def scaled(self, gradients):
        """`gradients` [..., out] times `filter_scale`."""
        return gradients if self.filter_scale is None else gradients * self.filter_scale

    def kernel_squared_norms(self, squares, magnitudes):
        """float32 [B]: squared norms of the gradients at the trained kernel, never too small.

        Args:
            squares: float32 [B], the same at the convolution's kernel, times `filter_scale`.
            magnitudes: float32 [B], the M of `tfdpx.per_example.rounding`, likewise.
        """
        del magnitudes
        return squares

    @functools.cached_property
    def small_gradients(self):
        """Pairs (variable, float32 [B, ...]) for what is trained besides the kernel."""
        if not self.explains(self.layer.bias):
            return []
        outputs = by_example(self.outputs, self.views)
        return [(self.layer.bias, tf.reduce_sum(outputs, axis=[1, 2, 3]))]

    def weight_gradient(self, inputs, outputs):
        """The gradient at the convolution's kernel, summed over all rows: [*kernel_shape].

        Args:
            inputs: float32 [N, H, W, C].
            outputs: float32 [N, H', W', out], gradients.
        """
        return tf.raw_ops.Conv2DBackpropFilter(
            input=inputs,
            filter_sizes=self.kernel_shape,
            out_backprop=outputs,
            strides=[1, *self.window.strides, 1],
            padding=self.window.padding.upper(),
            dilations=[1, *self.window.dilation, 1],
        )

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        pairs = list(self.small_gradients)
        if self.explains(self.layer.kernel):
            instances = self.scaled(self.kernel_instances)
            pairs.append((self.layer.kernel, self.to_kernel(instances)))
        return self.in_order(pairs)

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`."""
        return self._all_norms(self._instance_squares)

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        return self._all_norms(self._ghost_squares)

    def contract(self, factors):
        """See `Rule.contract`."""
        return self._all_sums(
            factors,
            lambda: tf.tensordot(factors, self.kept_rows(self.kernel_instances, factors), axes=1),
        )

    def ordinary_sum(self, factors):
        """See `Rule.ordinary_sum`."""
        rows = tf.repeat(factors, self.views)
        return self._all_sums(
            factors,
            lambda: self.weight_gradient(
                self.kept_rows(self.inputs, rows), weigh(self.outputs, rows)
            ),
        )

    @functools.cached_property
    def kernel_instances(self):
        """float32 [B, *kernel_shape]: each example's gradient at the convolution's kernel."""
        if self._instances_apart is not None:
            return tf.stack(self._instances_apart)
        return self._in_a_loop() if self._by_calls else self._by_matmul()

    def costs(self):
        """See `Rule.costs`."""
        count, positions, fan_in, fan_out = self.sizes()
        multiply = 2.0 * count * positions * self.groups * fan_in * fan_out
        instances = FLOAT * count * self.groups * fan_in * fan_out
        pairs = count * self.groups * positions**2
        costs = {
            "instantiate": cheapest(*self._instance_costs()) + Cost(bytes=3 * instances),
            "contract": Cost(bytes=instances),
            "ordinary": Cost(multiply, bytes=FLOAT * count * positions * self.groups * fan_out),
        }
        if None not in (*self.inputs.shape[1:3], *self.outputs.shape[1:3]):
            pixels = self.views * self.window.padded_pixels(*self.inputs.shape[1:3])
            shifts = sum(self.window.size)
            costs["ghost"] = Cost(
                2.0 * (pairs * fan_out + count * pixels**2 * self.inputs.shape[-1]),
                FLOAT * (count * self.groups * pixels**2 + (3 + shifts) * pairs),
            )
        return costs

    def _instance_costs(self):
        """Of one weight gradient an example, and of one product of patches for all."""
        count, positions, fan_in, fan_out = self.sizes()
        multiply = 2.0 * count * positions * self.groups * fan_in * fan_out
        patches = FLOAT * count * positions * self.groups * fan_in
        by_calls = Cost(multiply, calls=math.inf if self.call.jit_compile else count)
        return by_calls, Cost(multiply, bytes=4 * patches)

    def sizes(self):
        """Examples, positions of all views, fan-in and out of a group; nominal if unknown."""
        rows, height, width, out = self.outputs.shape
        fan_in = self.window.taps * self.kernel_shape[2]
        area = 1024 if None in (height, width) else height * width
        count = 32 if rows is None else rows // self.views
        return count, area * self.views, fan_in, out // self.groups

    @property
    def _by_calls(self):
        by_calls, by_patches = self._instance_costs()
        return cheapest(by_calls, by_patches) is by_calls

    @functools.cached_property
    def _instances_apart(self):
        """List of the examples' float32 [*kernel_shape], or None where no graph holds so many."""
        inputs, outputs = by_example(self.inputs, self.views), by_example(self.outputs, self.views)
        count = inputs.shape[0]
        if not self._by_calls or count is None or count > _UNROLLED:
            return None
        each = zip(tf.unstack(inputs), tf.unstack(outputs), strict=True)
        return [self.weight_gradient(*one) for one in each]

    def _in_a_loop(self):
        inputs, outputs = by_example(self.inputs, self.views), by_example(self.outputs, self.views)
        return tf.map_fn(
            lambda i: self.weight_gradient(inputs[i], outputs[i]),
            tf.range(tf.shape(inputs)[0]),
            fn_output_signature=tf.TensorSpec(self.kernel_shape, "float32"),
            parallel_iterations=2,
        )

    def _by_matmul(self):
        # Slices put together are the fastest patches, but not with strides outside of XLA.
        contiguous = self.call.jit_compile or max(self.window.strides) == 1
        patches = self.window.patches(self.inputs, contiguous)
        # Channels run over (tap, group, channel in the group).
        patches = self._by_group(patches, self.window.taps)
        products = tf.matmul(patches, self._by_group(self.outputs), transpose_a=True)
        if self.groups > 1:
            products = tf.transpose(products, [0, 2, 1, 3])
        return tf.reshape(products, [-1, *self.kernel_shape])

    def _input_gram(self):
        """A A^T of each group: [B, groups, T, T]."""
        images = by_example(self.inputs, self.views)
        parts = tf.split(images, self.groups, axis=-1)
        return tf.stack([self.window.gram(part) for part in parts], axis=1)

    def _by_group(self, rows, taps=1):
        """[B * K, H', W', taps * groups * c] as [B, groups, T, taps * c]."""
        rows = positions(rows, self.views)
        channels = rows.shape[-1] // self.groups
        if self.groups == 1:
            return rows[:, tf.newaxis]
        split = [tf.shape(rows)[0], tf.shape(rows)[1], taps, self.groups, channels // taps]
        rows = tf.transpose(tf.reshape(rows, split), [0, 3, 1, 2, 4])
        return tf.reshape(rows, [split[0], self.groups, split[1], channels])

    def _instance_squares(self):
        """Squared norms at the convolution's kernel [B], the M of `rounding`, and its terms."""

        def squares(gradients):
            # One sum, not one for each axis: there may be one of these for every example.
            return tf.reduce_sum(tf.square(gradients), axis=[-4, -3, -2])

        if self._instances_apart is None:
            by_filter = squares(self.kernel_instances)
        else:  # Neither all squares nor a second copy of the instances need memory at once.
            by_filter = tf.stack([squares(gradient) for gradient in self._instances_apart])
        squares = tf.reduce_sum(self.scaled(self.scaled(by_filter)), axis=1)
        squares = rounding.raised(squares, [math.prod(self.kernel_shape[:3]), self.kernel_shape[3]])
        if self.choice.sum == "contract":
            return squares, tf.sqrt(squares), 1
        return squares, self._magnitudes(), self.sizes()[1]

    def allows_sums_anew(self):
        """See `Rule.allows_sums_anew`."""
        known = None not in self.outputs.shape[1:3]
        return self.groups == 1 and known and self.sizes()[1] <= rounding.MOST_POSITIONS_ANEW

    def _magnitudes(self):
        """float32 [B]: the M of `rounding`, from the lengths of patches and output gradients."""
        window = self.window
        pixels = tf.reduce_sum(tf.square(self.inputs), axis=-1, keepdims=True)
        patches = tf.nn.conv2d(
            pixels,
            tf.ones([*window.size, 1, 1]),
            strides=window.strides,
            padding=window.padding.upper(),
            dilations=window.dilation,
        )
        gradients = tf.reduce_sum(tf.square(self.scaled(self.outputs)), axis=-1, keepdims=True)
        # Raised by more than what rounding takes of the two sums of squares.
        lengths = tf.sqrt(patches) * tf.sqrt(gradients) * (1.0 + 1e-3)
        return tf.reduce_sum(by_example(lengths, self.views), axis=[1, 2, 3, 4])

    def _ghost_squares(self):
        """As `_instance_squares`, from inner products of positions."""
        outputs = self._by_group(self.scaled(self.outputs))
        squares, magnitudes = rounding.squared_norms_of_products(
            self._input_gram(),
            gram(outputs),
            # Products of pixels, then as many sums as the window has rows and columns.
            self.kernel_shape[2] + sum(self.window.size),
            outputs.shape[-1],
        )
        squares = tf.reduce_sum(squares, axis=1)
        magnitudes = tf.sqrt(tf.reduce_sum(tf.square(magnitudes), axis=1))
        return squares, magnitudes, rounding.size_of(outputs, 2)

    def _all_norms(self, kernel_squares):
        norms = [rounding.squared_norms([g]) for _, g in list(self.small_gradients)]
        if self.explains(self.layer.kernel):
            squares, magnitudes, terms = kernel_squares()
            squares = self.kernel_squared_norms(squares, magnitudes)
            norms.append(rounding.allow(squares, magnitudes, terms))
        return tf.add_n(norms)

    def _all_sums(self, factors, kernel_sum):
        pairs = [(v, tf.reduce_sum(weigh(g, factors), 0)) for v, g in list(self.small_gradients)]
        if self.explains(self.layer.kernel):
            pairs.append((self.layer.kernel, self.to_kernel(self.scaled(kernel_sum()))))
        return self.in_order(pairs)


def channels_last(images, layer):
    """`images` [N, H, W, C], whatever the layer's data format."""
    if layer.data_format == "channels_last":
        return images
    return tf.transpose(images, [0, 2, 3, 1])
