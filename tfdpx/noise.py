"""Gaussian noise that depends only on a seed, so that all replicas draw the same noise.

The normals are Box-Muller transforms of integers from the Philox generator.
`tf.random.stateless_normal` cannot be used, because its values for one seed differ with and without
XLA. The integers of `tf.random.stateless_uniform` do not differ. A seed has 128 bits and is secret:
anyone who knows it can subtract the noise.
"""

import hashlib
import math
import secrets

import tensorflow as tf

from tfdpx._arguments import shortened
from tfdpx._keras import tensorflow_internals


def make_seed(seed=None):
    """Returns a seed of 128 bits for the functions of this module.

    Args:
        seed: Optional int, only for experiments that must be repeatable; it is hashed by SHA-256.
            With None, which private training requires, the operating system draws the seed.

    Returns:
        List of two ints in [-2**63, 2**63), for an int64 tensor of shape [2].

    Raises:
        ValueError: If `seed` is neither None nor an int.
    """
    if seed is None:
        bits = secrets.token_bytes(16)
    elif isinstance(seed, int) and not isinstance(seed, bool):
        bits = hashlib.sha256(f"tfdpx seed {seed}".encode()).digest()[:16]
    else:
        raise ValueError(
            f"Argument `seed` must be an int or None. Received: seed={shortened(seed)}. Leave it "
            "out for a seed from the operating system."
        )
    return [int.from_bytes(bits[i : i + 8], "big", signed=True) for i in (0, 8)]


# The most values that are drawn at once, to bound the memory of intermediate results.
_CHUNK = 2**20
# A number that practically never equals all words of random seeds; see `_in_a_loop`.
_UNLIKELY = 0x5DEECE66D
# Constants of TensorFlow: the number of the algorithm, and the key that scrambles a seed.
_PHILOX, _SCRAMBLING = 1, 0x02461E293EC8F720
# Folded into a seed, so that radii and angles have other seeds than all other random numbers.
_KEY = int.from_bytes(b"normal", "big")

_RADIUS_BITS = 64
# The largest radius, in standard deviations. It belongs to the smallest uniform number, which is
# half of 2**-64.
LARGEST_RADIUS = math.sqrt(2.0 * (_RADIUS_BITS + 1) * math.log(2.0))


def fold_in(seed, *numbers):
    """Returns a new seed that depends on `seed` and on `numbers`, including their order.

    The new seed has 128 secret bits, too; `tf.random.experimental.stateless_fold_in` would halve
    them.

    Args:
        seed: int64 tensor of shape [2].
        *numbers: Ints or integer scalars, for example the number of the update.

    Returns:
        int64 tensor of shape [2].
    """
    for number in numbers:
        number = tf.cast(number, "int64")
        mixed = tf.bitwise.bitwise_xor(seed, tf.stack([tf.zeros_like(number), number]))
        seed = words([2], mixed, tf.int64)
    return seed


def words(shape, seed, dtype):
    """Returns uniform random integers that depend only on the arguments.

    The integers are the same on every device, with and without XLA. They also equal the results of
    `tf.random.stateless_uniform(..., alg="philox")`, which needs three times as many operations.

    Args:
        shape: Sequence of ints, or int32 tensor.
        seed: Integer tensor of shape [2].
        dtype: tf.int32, tf.int64, tf.uint32 or tf.uint64.

    Returns:
        Tensor of `shape` and `dtype`, uniform over all values of `dtype`.
    """

    def philox(shape, key, counter, dtype):
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=shape, key=key, counter=counter, dtype=dtype, alg=_PHILOX
        )

    # TensorFlow scrambles a seed into the key and the upper half of the counter.
    scrambling = tf.constant([_SCRAMBLING], tf.uint64)
    key, counter = tf.split(philox([2], scrambling, tf.cast(seed, tf.uint64), tf.uint64), 2)
    return philox(shape, key, tf.concat([tf.zeros([1], tf.uint64), counter], 0), dtype)


def normal(shape, seed, stddev=1.0):
    """Returns independent N(0, stddev^2) values that depend only on the arguments.

    Each pair of values is computed from a random radius and a random angle. Two approximations
    matter for privacy:

    - The tail is cut off. A radius is computed from 64 random bits and never exceeds
      `LARGEST_RADIUS`, which is 9.49 `stddev`. The radius of a true pair of normals is larger with
      a probability of 2**-65. `tfdpx.accounting.gaussian` bounds the delta that this adds.
    - Radius and angle are rounded to float32, so the values are discrete, with steps of about 1e-7
      of the radius. Epsilon is computed for real numbers, so the guarantee does not hold against an
      adversary who reads the last bits of a float32 (Mironov 2012, "On Significance of the Least
      Significant Bits for Differential Privacy").

    Args:
        shape: Static shape, a sequence of ints.
        seed: int64 tensor of shape [2].
        stddev: Float, the standard deviation.

    Returns:
        float32 tensor of `shape`.
    """
    size = math.prod(shape)
    count = max(-(-size // _CHUNK), 1)
    seeds = _seeds(seed, count)
    under_xla = tensorflow_internals.is_under_xla()
    if count == 1 and not under_xla:
        drawn = tf.concat(_box_muller(-(-size // 2), *tf.unstack(seeds[0]), stddev), axis=0)
        return tf.reshape(drawn[:size], shape)
    # One loop over all chunks is faster to trace. With XLA each chunk has a separate loop, because
    # XLA runs these in parallel on a CPU.
    groups = tf.split(seeds, count) if under_xla else [seeds]
    pairs = -(-size // (2 * count))
    drawn = tf.concat([_in_a_loop(pairs, group, stddev) for group in groups], axis=0)
    return tf.reshape(tf.reshape(drawn, [-1])[:size], shape)


def _seeds(seed, count):
    """Returns two seeds for each chunk, for its radii and its angles, int64 [count, 2, 2]."""
    return tf.reshape(words([4 * count], fold_in(seed, _KEY), tf.int64), [count, 2, 2])


def _in_a_loop(pairs, seeds, stddev):
    """Returns the results of `_box_muller` for all pairs of seeds, computed in a loop.

    The loop is for XLA, which does not fuse a loop with the operations that read its result.
    Without a loop, XLA would draw the same random bits again in each of these operations.

    Args:
        pairs: Int, the number of pairs of values for one pair of seeds.
        seeds: int64 [count, 2, 2], as `_seeds` returns them.
        stddev: Float.

    Returns:
        float32 [2 * count, pairs].
    """
    count = seeds.shape[0]
    # `turns` equals `count`, but the compiler cannot know that. XLA would unroll a loop with one
    # turn.
    turns = count + tf.cast(tf.reduce_all(seeds == _UNLIKELY), "int32")

    def turn(index, drawn):
        place = tf.minimum(index, count - 1)
        first, second = _box_muller(pairs, *tf.unstack(seeds[place]), stddev)
        return index + 1, drawn.write(2 * place, first).write(2 * place + 1, second)

    drawn = tf.TensorArray("float32", 2 * count, element_shape=[pairs])
    _, drawn = tf.while_loop(
        lambda index, _: index < turns, turn, (tf.constant(0), drawn), parallel_iterations=2
    )
    return drawn.stack()


def _box_muller(pairs, radius_seed, angle_seed, stddev):
    """Returns independent N(0, stddev^2) values as two float32 tensors of shape [pairs]."""
    log = _log_uniform(words([pairs], radius_seed, tf.int64))
    radius = tf.sqrt((-2.0 * stddev**2) * log)
    word = words([pairs], angle_seed, tf.int32)
    angle = (2.0 * math.pi * 2.0**-32) * tf.cast(word, "float32")
    return radius * tf.cos(angle), radius * tf.sin(angle)


def _log_uniform(word):
    """Returns log(u) for uniform u in (0, 1), from random words: u = (word + 0.5) / 2**64 mod 1.

    A float32 cannot represent u precisely near 1, where radii are small. The function therefore
    computes log1p(u - 1) there.

    Args:
        word: int64 tensor.

    Returns:
        float32 tensor of the same shape, with values below zero.
    """
    # u, or u - 1 for negative words: between -0.5 and 0.5. Adding 0.5 excludes u = 0.
    nearest = (tf.cast(word, "float32") + 0.5) * 2.0**-_RADIUS_BITS
    return tf.where(nearest > 0, tf.math.log(nearest), tf.math.log1p(nearest))
