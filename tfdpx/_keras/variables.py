"""Variables of the private step: on every replica, and unknown to Keras and its files."""

import numpy as np
import tensorflow as tf


def variable(value, dtype):
    """A `tf.Variable` that replicas update alike. Not Keras's, which an optimizer would track."""
    return tf.Variable(
        np.array(value, dtype),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def value_of(variable):
    """The value of a `tf.Variable`, also of one with a copy on each replica, as a NumPy array."""
    return tf.convert_to_tensor(variable).numpy()
