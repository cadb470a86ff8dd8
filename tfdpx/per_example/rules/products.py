"""Kernels whose per-example gradient is a product of two matrices, A^T G."""

import functools

import tensorflow as tf

from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost
from tfdpx.per_example.rules.base import BeforeActivation, weigh

FLOAT = 4  # Bytes.


class ProductRule(BeforeActivation):
    """For each group g: A^T G with inputs A [T, in] and output gradients G [T, out] of an example.

    The squared norm of A^T G is `<A A^T, G G^T>` (Goodfellow 2015, arXiv:1510.01799; Li et al.
    2021, arXiv:2110.05679), the "ghost" norm: cheaper where the T positions are few against the
    kernel. The sum over examples is one product over all positions of the batch.

    A subclass gives `inputs_by_position`, `outputs_by_position`, `to_kernel` and `bias_gradients`.
    """

    assumes = ("call", "kernel")

    @functools.cached_property
    def inputs_by_position(self):
        """A, float32 [B, groups, T, in]."""
        raise NotImplementedError

    @functools.cached_property
    def outputs_by_position(self):
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
        pairs = []
        if self.explains(self.layer.kernel):
            inputs, outputs = self.inputs_by_position, self.outputs_by_position
            products = tf.matmul(inputs, outputs, transpose_a=True)
            pairs.append((self.layer.kernel, self.to_kernel(products)))
        return self.in_order([*pairs, *self._bias])

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        norms = []
        if self.explains(self.layer.kernel):
            norms.append(ghost_product_norms(self.inputs_by_position, self.outputs_by_position))
        norms += [rounding.squared_norms([bias]) for _, bias in self._bias]
        return tf.add_n(norms)

    def instantiated_squared_norms(self):
        """See `Rule.instantiated_squared_norms`."""
        squares = super().instantiated_squared_norms()
        if self.choice.sum == "contract" or not self.explains(self.layer.kernel):
            return squares
        tensors = self.inputs_by_position, self.outputs_by_position
        lengths = [tf.sqrt(rounding.squared_lengths(t)) for t in tensors]
        magnitudes = tf.reduce_sum(lengths[0] * lengths[1], axis=2)
        magnitudes = tf.sqrt(tf.reduce_sum(tf.square(magnitudes), axis=1))
        return rounding.allow(squares, magnitudes, tensors[0].shape[2])

    def allows_sums_anew(self):
        """See `Rule.allows_sums_anew`."""
        count = self.inputs_by_position.shape[2]
        return count is not None and count <= rounding.MOST_POSITIONS_ANEW

    def ordinary_sum(self, factors):
        """See `Rule.ordinary_sum`."""
        pairs = []
        if self.explains(self.layer.kernel):
            inputs = self.kept_rows(self.inputs_by_position, factors)
            outputs = weigh(self.outputs_by_position, factors)
            pairs.append((self.layer.kernel, self.to_kernel(summed_products(inputs, outputs))))
        pairs += [(v, tf.reduce_sum(weigh(g, factors), axis=0)) for v, g in self._bias]
        return self.in_order(pairs)

    def costs(self):
        """See `Rule.costs`."""
        rows, groups, count, fan_in = self.inputs_by_position.shape
        fan_out = self.outputs_by_position.shape[-1]
        return product_costs(rows, groups, count, fan_in, fan_out)

    @functools.cached_property
    def _bias(self):
        """Pairs (bias, gradients), one or none; computed once, for norm and sum."""
        bias = self.layer.bias
        return [(bias, self.bias_gradients())] if self.explains(bias) else []


def product_costs(rows, groups, count, fan_in, fan_out):
    """`Rule.costs` for products A^T G of [T, in] with [T, out]; unknown sizes are None."""
    rows, count = rows or 32, count or 1024
    multiply = 2.0 * rows * groups * count * fan_in * fan_out
    instances = FLOAT * rows * groups * fan_in * fan_out
    pairs = rows * groups * count**2
    return {
        "instantiate": Cost(flops=multiply, bytes=3 * instances),
        "contract": Cost(bytes=instances),
        "ghost": Cost(flops=2.0 * pairs * (fan_in + fan_out), bytes=4 * FLOAT * pairs),
        "ordinary": Cost(flops=multiply, bytes=FLOAT * rows * groups * count * fan_out),
    }


def ghost_product_norms(inputs, outputs):
    """float32 [B]: |A^T G|^2 from inner products of positions, with what rounding may add.

    Args:
        inputs: A, float32 [B, groups, T, in].
        outputs: G, float32 [B, groups, T, out].
    """
    fan_in, fan_out = inputs.shape[3], outputs.shape[3]
    count = rounding.size_of(inputs, 2)
    if inputs.shape[2] == 1:
        lengths = [rounding.squared_lengths(t[:, :, 0]) for t in (inputs, outputs)]
        squares = lengths[0] * lengths[1]
        magnitudes = tf.sqrt(squares)
    else:
        squares, magnitudes = rounding.squared_norms_of_products(
            gram(inputs), gram(outputs), fan_in, fan_out
        )
    return tf.reduce_sum(rounding.allow(squares, magnitudes, count), axis=1)


def gram(rows):
    """Inner products of positions, [..., T, T], of [..., T, d]."""
    return tf.matmul(rows, rows, transpose_b=True)


def summed_products(inputs, outputs):
    """The sum of A^T G over examples: float32 [groups, in, out]."""
    if inputs.shape[1] == 1:
        flat = [tf.reshape(t, [-1, t.shape[-1]]) for t in (inputs, outputs)]
        return tf.matmul(*flat, transpose_a=True)[tf.newaxis]
    flat = [
        tf.reshape(tf.transpose(t, [1, 0, 2, 3]), [t.shape[1], -1, t.shape[3]])
        for t in (inputs, outputs)
    ]
    return tf.matmul(*flat, transpose_a=True)
