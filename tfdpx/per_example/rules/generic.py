"""The rule for every layer without one of its own: the layer's VJP, vectorised over examples."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdpx.per_example.invalid_values import invalid_left_out
from tfdpx.per_example.registry import register
from tfdpx.per_example.rows import split_views
from tfdpx.per_example.rules.base import Rule
from tfdpx.per_example.vectorize import vectorized_map


# These call sublayers inside loops, where their inputs cannot be captured one by one.
@register(keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)
class GenericRule(Rule):
    """Runs the layer again, one example (with its K views) at a time, and differentiates that.

    Right for any layer whose examples do not mix. Costs running the layer forward and backward,
    and the memory of one gradient an example.
    """

    @classmethod
    def handles(cls, layer: keras.Layer, registered_class: type) -> bool:
        """True: nothing about the layer is assumed."""
        del layer, registered_class
        return True

    def per_example_gradients(self) -> list[tf.Tensor]:
        """See `Rule.per_example_gradients`."""
        targets = [v.value for v in self.variables]

        def gradient_of_one(inputs):
            seeds, rows, output_gradients = inputs
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(targets)
                made = self.call.run(rows, seeds)
                outputs = made.select(made.tensors)
            with invalid_left_out():
                gradients = tape.gradient(
                    outputs,
                    targets,
                    output_gradients=[
                        tf.cast(g, o.dtype) for g, o in zip(output_gradients, outputs, strict=True)
                    ],
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            return [tf.convert_to_tensor(g) for g in gradients]

        gradients = [split_views(g, self.num_views) for g in self.output_gradients]
        call = self.call
        examples = (call.seeds(tf.shape(gradients[0])[0]), call.examples(), gradients)
        instances = vectorized_map(gradient_of_one, examples, call.description, call.jit_compile)
        return [tf.cast(g, "float32") for g in instances]
