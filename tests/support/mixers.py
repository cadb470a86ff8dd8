"""Functions of a batch that mix its examples, and the layer that applies one."""

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers


class Between(layers.Layer):
    """Applies a function of the whole batch."""

    def __init__(self, function, **arguments):
        super().__init__(**arguments)
        self.function = function

    def call(self, x, training=None):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def mean(x):
    return tf.reduce_mean(x, axis=0, keepdims=True)


def sorted_and_back(x):
    """Keeps every row in its place, but what stands between the two sorts does not."""
    order = tf.argsort(tf.reduce_sum(x, axis=1))
    mixed = tf.gather(x, order)
    mixed = mixed + 0.5 * tf.roll(mixed, 1, axis=0)
    return tf.gather(mixed, tf.argsort(order))


def scaled_by_the_largest(x):
    return x / tf.maximum(1.0, tf.reduce_max(tf.abs(x)))


def experts_with_capacity(x):
    """Of the rows that prefer an expert, those beyond its capacity are dropped."""
    router = tf.constant(np.random.default_rng(5).normal(size=(x.shape[1], 4)), x.dtype)
    chosen = tf.one_hot(tf.argmax(x @ router, axis=1), 4)
    place = tf.reduce_sum(tf.cumsum(chosen, axis=0) * chosen, axis=1)
    capacity = tf.math.ceil(1.25 * tf.cast(tf.shape(x)[0], "float32") / 4)
    return tf.where((place <= capacity)[:, tf.newaxis], x, 0.0)


def switched_on(condition):
    return lambda x: tf.cond(condition(x), lambda: x - mean(x), lambda: x)


def rows_above(threshold):
    """Only rows with a large value mix, and only among themselves."""

    def apply(x):
        large = tf.reduce_max(tf.abs(x), axis=1, keepdims=True) > threshold
        among = tf.reduce_sum(tf.where(large, x, 0.0), axis=0, keepdims=True)
        return tf.where(large, x + among, x)

    return apply


@tf.custom_gradient
def clips_the_gradient_of_the_batch(x):
    return tf.identity(x), lambda g: g / tf.maximum(1e-3, tf.linalg.global_norm([g]))


def attention_over_the_batch(x):
    return tf.nn.softmax(x @ tf.transpose(x)) @ x


def by_position(x):
    return x * (1.0 + tf.cast(tf.range(tf.shape(x)[0]), x.dtype)[:, tf.newaxis])


def only_in_large_batches(x):
    return x - mean(x) if x.shape[0] is None or x.shape[0] > 8 else x


MIXES = {
    "rows sorted and unsorted": sorted_and_back,
    "divided by the largest": scaled_by_the_largest,
    "experts with a capacity": experts_with_capacity,
    "gradient clipped over the batch": clips_the_gradient_of_the_batch,
    "large batches": only_in_large_batches,
    "large batches, in the graph": switched_on(lambda x: tf.shape(x)[0] > 8),
    "batch size modulo": switched_on(lambda x: tf.equal(tf.shape(x)[0] % 8, 0)),
    "wide values": switched_on(lambda x: tf.reduce_max(x) > 10.0),
    "wide rows among themselves": rows_above(50.0),
    "very wide values": switched_on(lambda x: tf.reduce_max(x) > 1e4),
    "small values": switched_on(lambda x: tf.reduce_max(tf.abs(x)) < 10.0),
    "negative values": switched_on(lambda x: tf.reduce_min(x) < 0.0),
    "attention over the batch": attention_over_the_batch,
    "by position": by_position,
    "neighbours": lambda x: x + tf.roll(x, 1, axis=0),
    "weakly": lambda x: x + 1e-3 * mean(x),
}
