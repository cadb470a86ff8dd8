"""Kernels whose per-example gradient is a product of two matrices, A^T G."""

import functools

import tensorflow as tf

from tfdpx.per_example.choice import Cost
from tfdpx.per_example.rules.base import BeforeActivation, weigh

FLOAT = 4  # Bytes.
_ROUNDING = 2.0**-24


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
        return self.in_order([*pairs, *self._with_bias(self.bias_gradients)])

    def ghost_squared_norms(self):
        """See `Rule.ghost_squared_norms`."""
        norms = []
        if self.explains(self.layer.kernel):
            norms.append(ghost_product_norms(self.inputs_by_position, self.outputs_by_position))
        for _, bias in self._with_bias(self.bias_gradients):
            norms.append(tf.reduce_sum(tf.square(bias), axis=list(range(1, bias.shape.rank))))
        return tf.add_n(norms)

    def ordinary_sum(self, factors):
        """See `Rule.ordinary_sum`."""
        pairs = []
        if self.explains(self.layer.kernel):
            inputs = self.kept_rows(self.inputs_by_position, factors)
            outputs = weigh(self.outputs_by_position, factors)
            pairs.append((self.layer.kernel, self.to_kernel(summed_products(inputs, outputs))))
        bias = self._with_bias(lambda: tf.reduce_sum(weigh(self.bias_gradients(), factors), axis=0))
        return self.in_order([*pairs, *bias])

    def costs(self):
        """See `Rule.costs`."""
        rows, groups, count, fan_in = self.inputs_by_position.shape
        fan_out = self.outputs_by_position.shape[-1]
        return product_costs(rows, groups, count, fan_in, fan_out)

    def _with_bias(self, value):
        bias = self.layer.bias
        return [(bias, value())] if self.explains(bias) else []


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
    """float32 [B]: |A^T G|^2 from inner products of positions, never less than it is.

    Args:
        inputs: A, float32 [B, groups, T, in].
        outputs: G, float32 [B, groups, T, out].
    """
    if inputs.shape[2] == 1:
        return tf.reduce_sum(
            tf.reduce_sum(tf.square(inputs), axis=[2, 3])
            * tf.reduce_sum(tf.square(outputs), axis=[2, 3]),
            axis=1,
        )
    return product_of_grams(gram(inputs), gram(outputs))


def gram(rows):
    """Inner products of positions, [..., T, T], of [..., T, d]."""
    return tf.matmul(rows, rows, transpose_b=True)


def product_of_grams(inputs, outputs):
    """float32 [B]: <A A^T, G G^T>, never less than |A^T G|^2.

    Where large terms cancel, rounding could hide a part of the norm: an allowance is added.

    Args:
        inputs: A A^T, float32 [B, groups, T, T].
        outputs: G G^T, likewise.
    """
    norm = tf.reduce_sum(inputs * outputs, axis=[2, 3])
    largest = tf.linalg.trace(inputs) * tf.linalg.trace(outputs)
    return tf.reduce_sum(tf.maximum(norm, 0.0) + _ROUNDING * largest, axis=1)


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
