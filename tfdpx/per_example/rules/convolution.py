"""`keras.layers.Conv2D`."""

import functools
import math

import keras
import tensorflow as tf

from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost, cheapest
from tfdpx.per_example.registry import register
from tfdpx.per_example.rows import repeat_views
from tfdpx.per_example.rules.base import scale_examples
from tfdpx.per_example.rules.convolution_gradients import ConvolutionGradients
from tfdpx.per_example.rules.products import FLOAT, gram, length
from tfdpx.per_example.rules.window import split_channels


@register(keras.layers.Conv2D)
class Conv2DRule(ConvolutionGradients):
    """Any stride, padding, dilation, groups and data format.

    With the patches A [T, fan_in] and output gradients G [T, out] of an example's T positions, the
    kernel gradient is A^T G. Its norm needs only `<A A^T, G G^T>`, cheaper where positions are few
    (late layers).

    A subclass whose convolution uses a function of the trained kernel (weight standardization)
    sets `filter_scale` and `weights` and replaces `to_kernel`, `to_sum`, `measured` and
    `small_gradients`.

    Attributes:
        filter_scale: float32 [out], or None for ones: what each filter's gradient is multiplied by,
            which is cheaper done to gradients of kernels than to those of outputs.
        weights: float32 [n, out], or None for ones: what `statistics` are multiplied by.
    """

    assumes: tuple[str, ...] = ("call", "convolution_op", "kernel")

    filter_scale = weights = None

    def to_kernel(self, gradients):
        """Carries gradients at the convolution's kernel to the trained kernel; linear.

        Args:
            gradients: float32 [..., *kernel_shape].
        """
        return gradients

    def scaled(self, gradients):
        """`gradients` [..., out] times `filter_scale`."""
        return gradients if self.filter_scale is None else gradients * self.filter_scale

    @functools.cached_property
    def scaled_gradients(self):
        """`convolved_gradients` times `filter_scale`."""
        return self.scaled(self.convolved_gradients)

    def to_sum(self, total):
        """Carries a sum over examples at the convolution's kernel to the sum of `clipped_sum`."""
        return self.to_kernel(total)

    def measured(self, found):
        """A `rounding.Measured` of the gradients at the convolution's kernel, at the trained one.

        Args:
            found: `rounding.Measured`, of gradients times `filter_scale`. Its `squares` are the
                weighted sums over filters of `statistics`, or the squared norm alone.
        """
        return found

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`: what is trained besides the kernel."""
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
        return self.measured(self._of_instances())

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        return self.measured(self._of_inner_products())

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
        of_rows = repeat_views(factors, self.num_views)
        scaled = scale_examples(self.convolved_gradients, of_rows)
        return [self.to_sum(self.kernel_gradient(*masked, scaled))]

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

    def _of_instances(self):
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
        """float32 [B, 1]: the M of `rounding`, from the lengths of patches and output gradients."""
        pixels = tf.reduce_sum(tf.square(self.inputs), axis=-1, keepdims=True)
        patches = self.window.convolve(pixels, tf.ones([*self.window.size, 1, 1]))
        gradients = tf.square(self.scaled_gradients)
        gradients = tf.reduce_sum(gradients, axis=-1, keepdims=True)
        # Raised by more than what rounding takes of the two sums of squares.
        lengths = tf.sqrt(patches) * tf.sqrt(gradients) * (1.0 + 1e-3)
        return self.sum_positions(lengths)

    def _of_inner_products(self):
        gradients = self.by_group(self.scaled_gradients)
        parts = split_channels(self.inputs, self.groups)
        grams = [self.window.gram(part, self.num_views, self.call.jit_compile) for part in parts]
        squares, magnitudes = rounding.squared_norms_of_products(
            tf.expand_dims(grams[0], 1) if len(grams) == 1 else tf.stack(grams, axis=1),
            gram(gradients),
            self.window.gram_terms(self.kernel_shape[2]),
            gradients.shape[-1],
        )
        squares = tf.reduce_sum(squares, axis=1, keepdims=True)
        return rounding.Measured(squares, rounding.size_of(gradients, 2), length(magnitudes))
