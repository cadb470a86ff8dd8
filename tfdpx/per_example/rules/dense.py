"""`keras.layers.Dense`."""

import functools

import keras
import tensorflow as tf

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import positions
from tfdpx.per_example.rules.products import ProductRule


@register(keras.layers.Dense)
class DenseRule(ProductRule):
    """Kernel gradient A^T G and bias gradient 1^T G."""

    @functools.cached_property
    def inputs_by_position(self):
        """See `ProductRule`."""
        return positions(self.call.args[0], self.views)[:, tf.newaxis]

    @functools.cached_property
    def outputs_by_position(self):
        """See `ProductRule`."""
        return positions(self.gradients[0], self.views)[:, tf.newaxis]

    def to_kernel(self, products):
        """See `ProductRule`."""
        return tf.squeeze(products, axis=-3)

    def bias_gradients(self):
        """See `ProductRule`."""
        return tf.reduce_sum(self.outputs_by_position, axis=[1, 2])
