"""Random integers of all views at once, the same eagerly and under XLA."""

import tensorflow as tf


def draw_below(counts, batch_size, augmult, seed):
    """Returns int32 [batch_size, augmult, len(counts)], uniform in [0, counts) on the last axis."""
    bits = tf.random.stateless_uniform(
        tf.stack([batch_size, augmult, len(counts)]),
        seed,
        minval=0,
        maxval=2**31 - 1,
        dtype=tf.int32,
        alg="philox",
    )
    return bits % tf.constant(counts)
