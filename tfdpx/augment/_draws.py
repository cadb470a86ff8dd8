"""Draws random integers for all views of a batch, with the same values with and without XLA."""

import tensorflow as tf


def draw_below(counts, batch_size, augmult, seed):
    """Draws uniform random integers for each view of each example.

    Args:
        counts: List of ints. Integer i of a view is uniform in [0, counts[i]).
        batch_size: Int or int tensor, the number of examples.
        augmult: Int, the number of views of each example.
        seed: int64 tensor of shape [2].

    Returns:
        int32 tensor [batch_size, augmult, len(counts)].
    """
    bits = tf.random.stateless_uniform(
        tf.stack([batch_size, augmult, len(counts)]),
        seed,
        minval=0,
        maxval=2**31 - 1,
        dtype=tf.int32,
        alg="philox",
    )
    return bits % tf.constant(counts)
