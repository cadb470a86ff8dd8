"""Rules of `Dense` and `EinsumDense`, where a kernel's gradient is a product of two matrices."""

import copy
import functools
import math
import string

import keras
import tensorflow as tf

from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost
from tfdpx.per_example.rows import positions, scale_examples, split_views, sum_examples
from tfdpx.per_example.rule import BeforeActivation, register

FLOAT = 4  # Bytes.
# How much longer an operation takes in products of size T x T than in large products.
_SMALL_PRODUCTS = 1.75


class ProductRule(BeforeActivation):
    """A rule for a kernel with the gradient A^T G, for inputs A and output gradients G.

    For each example and group, A is [T, in] and G is [T, out], where T counts positions. Groups are
    multiplied separately, like the groups of a convolution. The squared norm of A^T G is equal to
    `<A A^T, G G^T>` (Goodfellow 2015, arXiv:1510.01799; Li et al. 2021, arXiv:2110.05679), the
    "ghost" norm. The ghost norm is cheaper if T is small compared with the size of the kernel. The
    sum over examples is one matrix product over all positions of the batch.

    A subclass defines `inputs_by_position`, `output_gradients_by_position`, `to_kernel` and
    `bias_gradients`.
    """

    assumes = ("call", "kernel")

    @functools.cached_property
    def inputs_by_position(self):
        """Returns A, float32 [B, groups, T, in]."""
        raise NotImplementedError

    @functools.cached_property
    def output_gradients_by_position(self):
        """Returns G, float32 [B, groups, T, out]."""
        raise NotImplementedError

    def to_kernel(self, products):
        """Reshapes `products` [..., groups, in, out] to [..., *kernel shape]."""
        raise NotImplementedError

    def bias_gradients(self):
        """Returns the gradients of the bias, float32 [B, *bias shape]."""
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
        # Assumed numbers, if the shape is not static.
        examples, count = examples or 32, count or 1024
        multiply = 2.0 * examples * groups * count * fan_in * fan_out
        instances = FLOAT * examples * groups * fan_in * fan_out
        pairs = examples * groups * count**2
        return {
            "instantiate": Cost(flops=multiply, bytes=3 * instances),
            "contract": Cost(bytes=instances),
            "ghost": Cost(
                flops=_SMALL_PRODUCTS * 2.0 * pairs * (fan_in + fan_out), bytes=4 * FLOAT * pairs
            ),
            "ordinary": Cost(flops=multiply, bytes=FLOAT * examples * groups * count * fan_out),
        }

    @property
    def _matrices(self):
        """Returns A and G."""
        return self.inputs_by_position, self.output_gradients_by_position

    @functools.cached_property
    def small_gradients(self):
        """See `Rule.small_gradients`. Returns the gradients of the bias."""
        bias = self.layer.bias
        return [(bias, self.bias_gradients())] if self.explains(bias) else []

    @functools.cached_property
    def _kernel_instances(self):
        """Returns each example's gradient of the kernel, float32 [B, *kernel shape]."""
        return self.to_kernel(tf.matmul(*self._matrices, transpose_a=True))


def ghost_product_norms(inputs, output_gradients):
    """Returns the squared norm of A^T G as a `rounding.Measured`, without forming A^T G.

    Args:
        inputs: A, float32 [B, groups, T, in].
        output_gradients: G, float32 [B, groups, T, out].
    """
    count = rounding.size_of(inputs, 2)
    if inputs.shape[2] == 1:
        lengths = [rounding.squared_lengths(t[:, :, 0]) for t in (inputs, output_gradients)]
        squares = lengths[0] * lengths[1]
        magnitudes = tf.sqrt(squares)
    else:
        squares, magnitudes = rounding.squared_norms_of_products(
            *(gram(vectors) for vectors in (inputs, output_gradients)),
            *(rounding.terms_in_line(vectors) for vectors in (inputs, output_gradients)),
        )
    squares = tf.reduce_sum(squares, axis=1, keepdims=True)
    return rounding.Measured(squares, count, length(magnitudes))


def length(magnitudes):
    """Returns the l2 norm of `magnitudes` [B, groups] along the groups, float32 [B, 1]."""
    if magnitudes.shape[1] == 1:
        return magnitudes
    return tf.sqrt(tf.reduce_sum(tf.square(magnitudes), axis=1, keepdims=True))


def gram(vectors):
    """Returns the inner products [..., T, T] of all pairs of T vectors [..., T, d].

    For long vectors, the inner products of parts are added up, which reduces rounding errors.
    """

    def product(start, size):
        shape = tf.concat([tf.shape(vectors)[:-1], [size]], axis=0)
        part = tf.slice(vectors, [*[0] * (vectors.shape.rank - 1), start], shape)
        return tf.matmul(part, part, transpose_b=True)

    if not rounding.is_long(vectors):
        return tf.matmul(vectors, vectors, transpose_b=True)
    # A loop copies only one part at a time, and keeps XLA from making one long product.
    count, rest = divmod(vectors.shape[-1], rounding.PART)
    return tf.while_loop(
        lambda index, _: index < count,
        lambda index, total: (index + 1, total + product(index * rounding.PART, rounding.PART)),
        (tf.constant(0), product(count * rounding.PART, rest)),
        parallel_iterations=1,
    )[1]


def sum_of_products(inputs, output_gradients):
    """Returns the sum of A^T G over all examples, float32 [groups, in, out]."""
    if inputs.shape[1] == 1:
        flat = [tf.reshape(t, [-1, t.shape[-1]]) for t in (inputs, output_gradients)]
        return tf.expand_dims(tf.matmul(*flat, transpose_a=True), 0)
    flat = [
        tf.reshape(tf.transpose(t, [1, 0, 2, 3]), [t.shape[1], -1, t.shape[3]])
        for t in (inputs, output_gradients)
    ]
    return tf.matmul(*flat, transpose_a=True)


@register(keras.layers.Dense)
class DenseRule(ProductRule):
    """The rule of `Dense`. The gradient of the bias is the sum of G over positions."""

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`. The new rule concatenates the positions of all calls."""
        joined_rule = copy.copy(rules[0])
        joined_rule.output_gradients = [g for rule in rules for g in rule.output_gradients]
        joined_rule.inputs_by_position = tf.concat([r.inputs_by_position for r in rules], axis=2)
        joined_rule.output_gradients_by_position = tf.concat(
            [r.output_gradients_by_position for r in rules], axis=2
        )
        return joined_rule

    @functools.cached_property
    def inputs_by_position(self):
        """See `ProductRule.inputs_by_position`."""
        return positions(self.call.args[0], self.num_views, groups=True)

    @functools.cached_property
    def output_gradients_by_position(self):
        """See `ProductRule.output_gradients_by_position`."""
        return positions(self.output_gradients[0], self.num_views, groups=True)

    def to_kernel(self, products):
        """See `ProductRule.to_kernel`."""
        return tf.squeeze(products, axis=-3)

    def bias_gradients(self):
        """See `ProductRule.bias_gradients`."""
        return tf.reduce_sum(self.output_gradients_by_position, axis=[1, 2])


@register(keras.layers.EinsumDense)
class EinsumDenseRule(ProductRule):
    """The rule of `EinsumDense`. It writes the equation as one matrix product for each group.

    Each axis other than the batch axis is of one of four kinds:

    - input features (in): axes that only inputs and kernel have; the layer sums over these axes;
    - output features (out): axes that only kernel and outputs have;
    - groups: axes that inputs, kernel and outputs have;
    - positions: axes that only inputs and outputs have.
    """

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`. The layer's equation must meet three more conditions.

        The first axis of inputs and outputs is the batch. The equation has no ellipsis. Each axis
        occurs at most once in a tensor, and in at least two of inputs, kernel and outputs.
        """
        inputs, kernel, outputs = letters(layer)
        is_valid = (
            "." not in layer.equation
            and inputs[:1] == outputs[:1]
            and inputs[:1] not in kernel
            and all(len(set(axes)) == len(axes) for axes in (inputs, kernel, outputs))
            and set(kernel) <= set(inputs) | set(outputs)
            and set(inputs) <= set(kernel) | set(outputs)
            and set(outputs) <= set(kernel) | set(inputs)
        )
        return is_valid and super().handles(layer, registered_class)

    @functools.cached_property
    def inputs_by_position(self):
        """See `ProductRule.inputs_by_position`."""
        return self._by_position(self.call.args[0], letters(self.layer)[0], self._axes()[2])

    @functools.cached_property
    def output_gradients_by_position(self):
        """See `ProductRule.output_gradients_by_position`."""
        return self._by_position(self.output_gradients[0], letters(self.layer)[2], self._axes()[3])

    def to_kernel(self, products):
        """See `ProductRule.to_kernel`."""
        _, groups, fan_in, fan_out = self._axes()
        kernel = letters(self.layer)[1]
        sizes = dict(zip(kernel, self.layer.kernel.shape, strict=True))
        order = groups + fan_in + fan_out
        lead = products.shape.rank - 3
        sizes = [sizes[axis] for axis in order]
        split = _reshape(products, sizes) if lead else tf.reshape(products, sizes)
        return tf.transpose(split, [*range(lead), *(lead + order.index(axis) for axis in kernel)])

    def bias_gradients(self):
        """See `ProductRule.bias_gradients`."""
        return bias_gradients(self.output_gradients[0], self.layer.bias.shape, self.num_views)

    def _axes(self):
        """Returns four strings, the letters in the equation for the four kinds of axes.

        Their order is positions, groups, input features and output features.
        """
        inputs, kernel, outputs = letters(self.layer)
        return (
            "".join(a for a in inputs[1:] if a not in kernel),
            "".join(a for a in kernel if a in inputs and a in outputs),
            "".join(a for a in kernel if a in inputs and a not in outputs),
            "".join(a for a in kernel if a not in inputs),
        )

    def _by_position(self, tensor, axes, features):
        """Reshapes a tensor [B * K, ...] to float32 [B, groups, T, features].

        `axes` has the letters of all axes of the tensor, and `features` has the letters of the
        feature axes.
        """
        positions, groups, _, _ = self._axes()
        tensor = split_views(tf.cast(tensor, "float32"), self.num_views)
        view = next(a for a in string.ascii_letters if a not in self.layer.equation)
        axes = axes[0] + view + axes[1:]
        new_axes = axes[0] + groups + view + positions + features
        tensor = tf.transpose(tensor, [axes.index(a) for a in new_axes])
        sizes = dict(zip(new_axes, tensor.shape, strict=True))

        def product(names):
            lengths = [sizes[a] for a in names]
            return -1 if None in lengths else math.prod(lengths)

        return _reshape(tensor, [product(groups), product(view + positions), product(features)])


def bias_gradients(output_gradients, shape, num_views):
    """Returns the per-example gradients of a bias, float32 [B, *shape].

    Args:
        output_gradients: float32 [B * K, ...], the gradients with respect to the outputs.
        shape: Sequence of ints, the shape of the bias.
        num_views: Int K, the number of rows of an example.
    """
    # Sum over views, and over the axes along which the bias was broadcast.
    gradients = tf.reduce_sum(split_views(output_gradients, num_views), axis=1)
    num_extra = gradients.shape.rank - 1 - len(shape)
    if num_extra:
        gradients = tf.reduce_sum(gradients, axis=list(range(1, 1 + num_extra)))
    unit_axes = [1 + i for i, size in enumerate(shape) if size == 1]
    return tf.reduce_sum(gradients, axis=unit_axes, keepdims=True) if unit_axes else gradients


def letters(layer):
    """Returns three strings, the letters in a layer's equation for inputs, kernel and outputs."""
    left, outputs = layer.equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs


def _reshape(tensor, sizes):
    """Reshapes a tensor [B, ...] to [B, *sizes]. At most one size may be -1."""
    count = tensor.shape[0]
    if count is None and -1 in sizes:
        return tf.reshape(tensor, [tf.shape(tensor)[0], *sizes])
    return tf.reshape(tensor, [-1 if count is None else count, *sizes])
