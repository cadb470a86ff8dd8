"""The kernel gradient of each example of a two-dimensional convolution."""

import dataclasses
import functools
import math

import tensorflow as tf

from tfdpx.per_example._traced import alike
from tfdpx.per_example.cost_model import Cost, cheapest
from tfdpx.per_example.rows import Rows, sum_rows
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
        unit: float32 [*kernel_shape], with which the `statistics` are to have inner products; None
            for none.
    """

    unit = None

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        self.window = Window.of(self.layer)
        self.inputs = channels_last(tf.cast(call.args[0], "float32"), self.layer)
        self.convolved_gradients = channels_last(self.output_gradients[0], self.layer)
        if self.window.taps == 1 and max(self.window.strides) > 1:
            # TensorFlow 2.21's gradient of such kernels writes beyond its memory on CPUs (oneDNN's
            # 1x1 convolution on channels that are no multiple of 16). Without strides it is safe.
            rows, columns = self.window.strides
            self.inputs = self.inputs[:, ::rows, ::columns]
            self.window = dataclasses.replace(self.window, strides=(1, 1))
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
        return self.window.kernel_gradient(inputs, output_gradients, self.kernel_shape)

    @functools.cached_property
    def kernel_instances(self):
        """float32 [B, *kernel_shape]: each example's gradient at the convolution's kernel."""
        return self._in_a_loop[0] if self._by_calls else self._by_matmul()

    @property
    def statistics(self):
        """float32 [B, 1 or 3, out]: sums of squares of each filter of `kernel_instances`.

        With `unit`, also the squares of sums, and of inner products with it.
        """
        if self._by_calls:
            return self._in_a_loop[1]
        return _statistics(self.kernel_instances, self.unit)

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
        """`kernel_instances` and `statistics`, example by example."""
        tensors = self.inputs, self.convolved_gradients, self.unit
        tensors = [t for t in tensors if t is not None]
        kind = self.window, tuple(self.kernel_shape), self.num_views
        return alike(_of_examples, kind, *tensors)

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
        if self.groups == 1:
            return positions(images, self.num_views, groups=True)
        pixels = positions(images, self.num_views)
        channels = pixels.shape[-1] // self.groups
        split = [tf.shape(pixels)[0], tf.shape(pixels)[1], taps, self.groups, channels // taps]
        pixels = tf.transpose(tf.reshape(pixels, split), [0, 3, 1, 2, 4])
        return tf.reshape(pixels, [split[0], self.groups, split[1], channels])


def _of_examples(window, kernel_shape, num_views, inputs, output_gradients, unit=None):
    """Kernel gradients and statistics, from one call an example."""
    count = Rows(inputs).count // num_views

    def one(index, instances, statistics):
        rows = slice(index * num_views, (index + 1) * num_views)
        gradient = window.kernel_gradient(inputs[rows], output_gradients[rows], kernel_shape)
        # Here, so that products and squares never need memory for all examples at once.
        found = _statistics(gradient[tf.newaxis], unit)[0]
        return index + 1, instances.write(index, gradient), statistics.write(index, found)

    # A graph with a node for each example would be slow to make, and for one number alone.
    empty = [tf.TensorArray("float32", count) for _ in range(2)]
    _, *found = tf.while_loop(
        lambda index, *_: index < count, one, (tf.constant(0), *empty), parallel_iterations=2
    )
    return [array.stack() for array in found]


def _statistics(gradients, unit):
    """float32 [n, 1 or 3, out] of `gradients` [n, *kernel_shape]; see `ConvolutionGradients`."""
    filters = [1, 2, 3]
    squares = [tf.reduce_sum(tf.square(gradients), filters)]
    if unit is not None:
        for each in gradients, gradients * unit:
            squares.append(tf.square(tf.reduce_sum(each, filters)))
    return tf.stack(squares, axis=1)


def channels_last(images, layer):
    """`images` [N, H, W, C], whatever the layer's data format."""
    if layer.data_format == "channels_last":
        return images
    return tf.transpose(images, [0, 2, 3, 1])
