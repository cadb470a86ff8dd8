"""Variables of the private step: on every replica, but not tracked by Keras and its files."""

import numpy as np
import tensorflow as tf


def variable(value, dtype, shape=None):
    """Returns a `tf.Variable` that replicas update alike. An optimizer would track Keras's."""
    return tf.Variable(
        np.array(value, dtype),
        trainable=False,
        shape=shape,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def value_of(variable):
    """Returns the value of a `tf.Variable`, with or without replicas, as a NumPy array."""
    return tf.convert_to_tensor(variable).numpy()
