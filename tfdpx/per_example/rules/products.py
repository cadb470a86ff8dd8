"""Kernels whose per-example gradient is a product of two matrices, A^T G."""

import functools

import tensorflow as tf

from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost
from tfdpx.per_example.rules.base import (
    BeforeActivation,
    scale_examples,
    sum_examples,
)

FLOAT = 4  # Bytes.


class ProductRule(BeforeActivation):
    """For each group g: A^T G with inputs A [T, in] and output gradients G [T, out] of an example.

    The squared norm of A^T G is `<A A^T, G G^T>` (Goodfellow 2015, arXiv:1510.01799; Li et al.
    2021, arXiv:2110.05679), the "ghost" norm: cheaper where the T positions are few against the
    kernel. The sum over examples is one product over all positions of the batch.

    A subclass gives `inputs_by_position`, `output_gradients_by_position`, `to_kernel` and
    `bias_gradients`.
    """

    assumes = ("call", "kernel")

    @functools.cached_property
    def inputs_by_position(self):
        """A, float32 [B, groups, T, in]."""
        raise NotImplementedError

    @functools.cached_property
    def output_gradients_by_position(self):
        """G, float32 [B, groups, T, out]."""
        raise NotImplementedError

    def to_kernel(self, products):
        """[..., groups, in, out] as [..., *kernel shape]."""
        raise NotImplementedError

    def bias_gradients(self):
        """float32 [B, *bias shape]."""
        raise NotImplementedError

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        kernel = self.layer.kernel
        pairs = [(kernel, self._kernel_instances)] if self.explains(kernel) else []
        return self.in_order([*pairs, *self.small_gradients])

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        return ghost_product_norms(*self._matrices)

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`."""
        squares = rounding.squared_norms([self._kernel_instances])
        if self.choice.sum == "contract":
            return squares
        lengths = [tf.sqrt(rounding.squared_lengths(t)) for t in self._matrices]
        magnitudes = length(tf.reduce_sum(lengths[0] * lengths[1], axis=2))
        count = rounding.size_of(self.inputs_by_position, 2)
        return rounding.Measured(squares[:, tf.newaxis], count, magnitudes)

    @property
    def inputs_to_mask(self):
        """See `Rule.inputs_to_mask`."""
        return [] if self.choice.sum == "contract" else [self.inputs_by_position]

    def contracted_clipped_sum(self, factors, masked):
        """See `Rule.contracted_clipped_sum`."""
        del masked
        return [sum_examples(self._kernel_instances, factors)]

    def allows_ordinary_sum(self):
        """See `Rule.allows_ordinary_sum`."""
        count = self.inputs_by_position.shape[2]
        return count is not None and count <= rounding.MOST_POSITIONS_ALLOWED_FOR

    def ordinary_clipped_sum(self, factors, masked):
        """See `Rule.ordinary_clipped_sum`."""
        gradients = scale_examples(self.output_gradients_by_position, factors)
        return [self.to_kernel(sum_of_products(*masked, gradients))]

    def costs(self):
        """See `Rule.costs`."""
        examples, groups, count, fan_in = self.inputs_by_position.shape
        fan_out = self.output_gradients_by_position.shape[-1]
        # Nominal, where they are not known.
        examples, count = examples or 32, count or 1024
        multiply = 2.0 * examples * groups * count * fan_in * fan_out
        instances = FLOAT * examples * groups * fan_in * fan_out
        pairs = examples * groups * count**2
        return {
            "instantiate": Cost(flops=multiply, bytes=3 * instances),
            "contract": Cost(bytes=instances),
            "ghost": Cost(flops=2.0 * pairs * (fan_in + fan_out), bytes=4 * FLOAT * pairs),
            "ordinary": Cost(flops=multiply, bytes=FLOAT * examples * groups * count * fan_out),
        }

    @property
    def _matrices(self):
        """A and G."""
        return self.inputs_by_position, self.output_gradients_by_position

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`: the bias."""
        bias = self.layer.bias
        return [(bias, self.bias_gradients())] if self.explains(bias) else []

    @functools.cached_property
    def _kernel_instances(self):
        """float32 [B, *kernel shape]."""
        return self.to_kernel(tf.matmul(*self._matrices, transpose_a=True))


def ghost_product_norms(inputs, output_gradients):
    """`rounding.Measured`: |A^T G|^2 of each example from inner products of positions.

    Args:
        inputs: A, float32 [B, groups, T, in].
        output_gradients: G, float32 [B, groups, T, out].
    """
    fan_in, fan_out = inputs.shape[3], output_gradients.shape[3]
    count = rounding.size_of(inputs, 2)
    if inputs.shape[2] == 1:
        lengths = [rounding.squared_lengths(t[:, :, 0]) for t in (inputs, output_gradients)]
        squares = lengths[0] * lengths[1]
        magnitudes = tf.sqrt(squares)
    else:
        squares, magnitudes = rounding.squared_norms_of_products(
            gram(inputs), gram(output_gradients), fan_in, fan_out
        )
    squares = tf.reduce_sum(squares, axis=1, keepdims=True)
    return rounding.Measured(squares, count, length(magnitudes))


def length(magnitudes):
    """float32 [B, 1]: the l2 norm over groups of [B, groups]."""
    if magnitudes.shape[1] == 1:
        return magnitudes
    return tf.sqrt(tf.reduce_sum(tf.square(magnitudes), axis=1, keepdims=True))


def gram(vectors):
    """Inner products of positions, [..., T, T], of [..., T, d]."""
    return tf.matmul(vectors, vectors, transpose_b=True)


def sum_of_products(inputs, output_gradients):
    """The sum of A^T G over positions and examples alike: float32 [groups, in, out]."""
    if inputs.shape[1] == 1:
        flat = [tf.reshape(t, [-1, t.shape[-1]]) for t in (inputs, output_gradients)]
        return tf.matmul(*flat, transpose_a=True)[tf.newaxis]
    flat = [
        tf.reshape(tf.transpose(t, [1, 0, 2, 3]), [t.shape[1], -1, t.shape[3]])
        for t in (inputs, output_gradients)
    ]
    return tf.matmul(*flat, transpose_a=True)
