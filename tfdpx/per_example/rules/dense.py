"""`keras.layers.Dense`."""

import copy
import functools

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import positions
from tfdpx.per_example.rules.products import ProductRule


@register(keras.layers.Dense)
class DenseRule(ProductRule):
    """Kernel gradient A^T G and bias gradient 1^T G."""

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`: the calls' positions in line."""
        joined = copy.copy(rules[0])
        joined.output_gradients = [g for rule in rules for g in rule.output_gradients]
        joined.inputs_by_position = tf.concat([r.inputs_by_position for r in rules], axis=2)
        joined.output_gradients_by_position = tf.concat(
            [r.output_gradients_by_position for r in rules], axis=2
        )
        return joined

    @functools.cached_property
    def inputs_by_position(self):
        """See `ProductRule`."""
        return positions(self.call.args[0], self.num_views, groups=True)

    @functools.cached_property
    def output_gradients_by_position(self):
        """See `ProductRule`."""
        return positions(self.output_gradients[0], self.num_views, groups=True)

    def to_kernel(self, products):
        """See `ProductRule`."""
        return tf.squeeze(products, axis=-3)

    def bias_gradients(self):
        """See `ProductRule`."""
        return tf.reduce_sum(self.output_gradients_by_position, axis=[1, 2])
