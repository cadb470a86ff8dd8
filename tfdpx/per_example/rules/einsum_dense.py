"""`keras.layers.EinsumDense`, of which attention layers are made."""

import functools
import math
import string

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rows import split_views
from tfdpx.per_example.rules.products import ProductRule


@register(keras.layers.EinsumDense)
class EinsumDenseRule(ProductRule):
    """The equation as products: axes of the kernel and of positions, each put in one.

    An axis of inputs and kernel is summed over (in), one of kernel and outputs is new (out), one
    of all three is a group, and one of inputs and outputs alone is a position.
    """

    @classmethod
    def handles(cls, layer, registered_class):
        """Equations whose first axis is the batch, without ellipsis, repeats or lone axes."""
        inputs, kernel, outputs = letters(layer)
        fits = (
            "." not in layer.equation
            and inputs[:1] == outputs[:1]
            and inputs[:1] not in kernel
            and all(len(set(axes)) == len(axes) for axes in (inputs, kernel, outputs))
            and set(kernel) <= set(inputs) | set(outputs)
            and set(inputs) <= set(kernel) | set(outputs)
            and set(outputs) <= set(kernel) | set(inputs)
        )
        return fits and super().handles(layer, registered_class)

    @functools.cached_property
    def inputs_by_position(self):
        """See `ProductRule`."""
        return self._by_position(self.call.args[0], letters(self.layer)[0], self._axes()[2])

    @functools.cached_property
    def output_gradients_by_position(self):
        """See `ProductRule`."""
        return self._by_position(self.output_gradients[0], letters(self.layer)[2], self._axes()[3])

    def to_kernel(self, products):
        """See `ProductRule`."""
        _, groups, fan_in, fan_out = self._axes()
        kernel = letters(self.layer)[1]
        sizes = dict(zip(kernel, self.layer.kernel.shape, strict=True))
        order = groups + fan_in + fan_out
        lead = products.shape.rank - 3
        split = tf.reshape(
            products, tf.concat([tf.shape(products)[:lead], [sizes[a] for a in order]], axis=0)
        )
        return tf.transpose(split, [*range(lead), *(lead + order.index(axis) for axis in kernel)])

    def bias_gradients(self):
        """See `ProductRule`."""
        return bias_gradients(self.output_gradients[0], self.layer.bias.shape, self.num_views)

    def _axes(self):
        """The letters of positions, groups, in and out."""
        inputs, kernel, outputs = letters(self.layer)
        return (
            "".join(a for a in inputs[1:] if a not in kernel),
            "".join(a for a in kernel if a in inputs and a in outputs),
            "".join(a for a in kernel if a in inputs and a not in outputs),
            "".join(a for a in kernel if a not in inputs),
        )

    def _by_position(self, tensor, axes, features):
        """[B * K, ...] with `axes` as float32 [B, groups, T, features]."""
        positions, groups, _, _ = self._axes()
        tensor = split_views(tf.cast(tensor, "float32"), self.num_views)
        view = next(a for a in string.ascii_letters if a not in self.layer.equation)
        axes = axes[0] + view + axes[1:]
        wanted = axes[0] + groups + view + positions + features
        tensor = tf.transpose(tensor, [axes.index(a) for a in wanted])
        sizes = dict(zip(wanted, tensor.shape, strict=True))

        def product(names):
            lengths = [sizes[a] for a in names]
            return -1 if None in lengths else math.prod(lengths)

        return _reshape(tensor, [product(groups), product(view + positions), product(features)])


def bias_gradients(output_gradients, shape, num_views):
    """float32 [B, *shape] of output gradients [B * K, ...] of a bias that was broadcast."""
    # Views are one more axis to sum over, next to those along which the bias was broadcast.
    gradients = tf.reduce_sum(split_views(output_gradients, num_views), axis=1)
    extra = gradients.shape.rank - 1 - len(shape)
    if extra:
        gradients = tf.reduce_sum(gradients, axis=list(range(1, 1 + extra)))
    ones = [1 + i for i, size in enumerate(shape) if size == 1]
    return tf.reduce_sum(gradients, axis=ones, keepdims=True) if ones else gradients


def letters(layer):
    """Those of the inputs, the kernel and the outputs in a layer's equation, strings."""
    left, outputs = layer.equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs


def _reshape(tensor, sizes):
    """[B, ...] as [B, *sizes], of which at most one is -1."""
    count = tensor.shape[0]
    if count is None and -1 in sizes:
        return tf.reshape(tensor, [tf.shape(tensor)[0], *sizes])
    return tf.reshape(tensor, [-1 if count is None else count, *sizes])
