"""Variables of the private step, which replicas share but Keras neither tracks nor saves."""

import numpy as np
import tensorflow as tf


def variable(value, dtype, shape=None):
    """Returns a `tf.Variable` that all replicas update in the same way.

    It is not a `keras.Variable`, which an optimizer would track and save.
    """
    return tf.Variable(
        np.array(value, dtype),
        trainable=False,
        shape=shape,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def value_of(variable):
    """Returns the value of a `tf.Variable`, with or without replicas, as a NumPy array."""
    return tf.convert_to_tensor(variable).numpy()
