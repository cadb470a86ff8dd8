"""The kernel gradient of each example of a two-dimensional convolution."""

import functools
import math

import tensorflow as tf

from tfdpx.per_example.cost_model import Cost, cheapest
from tfdpx.per_example.rows import Rows, split_views, sum_rows
from tfdpx.per_example.rules.base import BeforeActivation, positions
from tfdpx.per_example.rules.products import FLOAT
from tfdpx.per_example.rules.window import Window


class ConvolutionGradients(BeforeActivation):
    """What a convolution saw, and each example's gradient at its kernel.

    That is formed as a product of patches and output gradients for all examples at once, or by one
    ordinary kernel gradient an example, of its images alone.

    Attributes:
        inputs: float32 [B * K, H, W, C], channels last whatever the layer's data format.
        convolved_gradients: float32 [B * K, H', W', out]: gradients at what the convolution gives.
        window: The `Window`.
        groups: Int.
    """

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        self.window = Window(self.layer)
        self.inputs = channels_last(tf.cast(call.args[0], "float32"), self.layer)
        self.convolved_gradients = channels_last(self.output_gradients[0], self.layer)
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

    def sum_positions(self, images):
        """[B * K, H', W', out] summed over an example's views and positions: [B, out]."""
        return sum_rows(images, self.num_views, [1, 2])

    def kernel_gradient(self, inputs, output_gradients):
        """The gradient at the convolution's kernel, summed over all images: [*kernel_shape].

        Args:
            inputs: float32 [N, H, W, C].
            output_gradients: float32 [N, H', W', out].
        """
        padding = self.window.padding.upper()
        # Without oneDNN, TensorFlow's gradient knows neither dilation nor groups on CPUs.
        if max(self.window.dilation) > 1:
            inputs, output_gradients = self.window.by_phase(inputs, output_gradients)
            padding = "VALID"
        of_groups = [
            tf.raw_ops.Conv2DBackpropFilter(
                input=part,
                filter_sizes=[*self.kernel_shape[:3], self.kernel_shape[3] // self.groups],
                out_backprop=gradients,
                strides=[1, *self.window.strides, 1],
                padding=padding,
            )
            for part, gradients in zip(
                self._split(inputs), self._split(output_gradients), strict=True
            )
        ]
        return of_groups[0] if self.groups == 1 else tf.concat(of_groups, axis=-1)

    def _split(self, images):
        """`images` [..., c] as a list of one tensor [..., c / groups] a group."""
        return [images] if self.groups == 1 else tf.split(images, self.groups, axis=-1)

    @functools.cached_property
    def kernel_instances(self):
        """float32 [B, *kernel_shape]: each example's gradient at the convolution's kernel."""
        return self._in_a_loop[0] if self._by_calls else self._by_matmul()

    @property
    def squares_by_filter(self):
        """float32 [B, out]: sums of the squares of `kernel_instances`."""
        return self._in_a_loop[1] if self._by_calls else _squares(self.kernel_instances)

    def instance_costs(self):
        """Of one kernel gradient an example, and of one product of patches for all."""
        count, positions, fan_in, fan_out = self.sizes()
        multiply = 2.0 * count * positions * self.groups * fan_in * fan_out
        patches = FLOAT * count * positions * self.groups * fan_in
        calls = math.inf if self.call.jit_compile else count * self.groups
        by_calls = Cost(multiply, calls=calls)
        return by_calls, Cost(multiply, bytes=4 * patches)

    def sizes(self):
        """Examples, positions of all views, fan-in and out of a group; nominal if unknown."""
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
    def _in_a_loop(self):
        """`kernel_instances` and `squares_by_filter`, example by example."""
        inputs, gradients = (
            split_views(t, self.num_views) for t in (self.inputs, self.convolved_gradients)
        )

        count = Rows(inputs).count
        shapes = self.kernel_shape, self.kernel_shape[-1:]

        def one(index, stacks):
            gradient = self.kernel_gradient(inputs[index], gradients[index])
            # Squared here, so that the squares of all examples never need memory at once.
            made = zip(stacks, (gradient, _squares(gradient)), strict=True)
            return index + 1, [stack.write(index, each) for stack, each in made]

        # A graph with a node for each example would be slow to make, and for one number alone.
        _, stacks = tf.while_loop(
            lambda index, _: index < count,
            one,
            (tf.constant(0), [tf.TensorArray("float32", count, element_shape=s) for s in shapes]),
            parallel_iterations=2,
        )
        return [stack.stack() for stack in stacks]

    def _by_matmul(self):
        # Slices put together are the fastest patches, but not with strides outside of XLA.
        contiguous = self.call.jit_compile or max(self.window.strides) == 1
        patches = self.window.patches(self.inputs, contiguous)
        # Channels run over (tap, group, channel in the group).
        patches = self.by_group(patches, self.window.taps)
        gradients = self.by_group(self.convolved_gradients)
        products = tf.matmul(patches, gradients, transpose_a=True)
        if self.groups > 1:
            products = tf.transpose(products, [0, 2, 1, 3])
        return tf.reshape(products, [-1, *self.kernel_shape])

    def by_group(self, images, taps=1):
        """[B * K, H', W', taps * groups * c] as [B, groups, T, taps * c]."""
        pixels = positions(images, self.num_views)
        channels = pixels.shape[-1] // self.groups
        if self.groups == 1:
            return pixels[:, tf.newaxis]
        split = [tf.shape(pixels)[0], tf.shape(pixels)[1], taps, self.groups, channels // taps]
        pixels = tf.transpose(tf.reshape(pixels, split), [0, 3, 1, 2, 4])
        return tf.reshape(pixels, [split[0], self.groups, split[1], channels])


def _squares(gradients):
    """float32 [..., out]: sums of squares of `gradients` [..., *kernel_shape], by filter."""
    return tf.reduce_sum(tf.square(gradients), axis=[-4, -3, -2])


def channels_last(images, layer):
    """`images` [N, H, W, C], whatever the layer's data format."""
    if layer.data_format == "channels_last":
        return images
    return tf.transpose(images, [0, 2, 3, 1])
