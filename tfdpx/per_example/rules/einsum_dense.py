"""`keras.layers.EinsumDense`, of which attention layers are made."""

import string

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule, by_example, sum_to_shape, weigh


@register(keras.layers.EinsumDense)
class EinsumDenseRule(Rule):
    """The kernel's gradient is itself an einsum of inputs and output gradients."""

    splits_activation = True
    assumes = ("call", "kernel")

    @classmethod
    def handles(cls, layer, registered_class):
        """Equations whose first axis is the batch, without ellipsis, repeats or lone axes."""
        inputs, kernel, outputs = _axes(layer)
        fits = (
            "." not in layer.equation
            and inputs[:1] == outputs[:1]
            and inputs[:1] not in kernel
            and all(len(set(axes)) == len(axes) for axes in (inputs, kernel, outputs))
            and set(kernel) <= set(inputs) | set(outputs)
            and set(inputs) <= set(kernel) | set(outputs)
        )
        return fits and super().handles(layer, registered_class)

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        axes, view = _axes(self.layer), self._unused_axis()
        inputs, outputs = self._inputs(), self._outputs()
        batch = axes[0][0]
        equation = f"{batch}{view}{axes[0][1:]},{batch}{view}{axes[2][1:]}->{batch}{axes[1]}"
        return self._pairs(tf.einsum(equation, inputs, outputs), outputs)

    def clipped_sum(self, factors):
        """See `Rule.clipped_sum`."""
        axes, view = _axes(self.layer), self._unused_axis()
        inputs = weigh(self._inputs(), tf.cast(factors > 0, "float32"))
        outputs = weigh(self._outputs(), factors)
        batch = axes[0][0]
        equation = f"{batch}{view}{axes[0][1:]},{batch}{view}{axes[2][1:]}->{axes[1]}"
        kernel = tf.einsum(equation, inputs, outputs)
        sums = self._pairs(kernel, tf.reduce_sum(outputs, axis=0, keepdims=True))
        return [tf.reshape(s, v.shape) for s, v in zip(sums, self.variables, strict=True)]

    def _pairs(self, kernel, outputs):
        layer = self.layer
        pairs = [(layer.kernel, kernel)]
        if self.explains(layer.bias):
            # Views are one more axis to sum over.
            bias = sum_to_shape(tf.reduce_sum(outputs, axis=1), layer.bias.shape)
            pairs.append((layer.bias, bias))
        return self.in_order(pairs)

    def _inputs(self):
        return by_example(self.call.args[0], self.views)

    def _outputs(self):
        return by_example(self.gradients[0], self.views)

    def _unused_axis(self):
        return next(a for a in string.ascii_letters if a not in self.layer.equation)


def _axes(layer):
    left, outputs = layer.equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs
