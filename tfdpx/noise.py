"""Gaussian noise that is the same on every replica and can be replayed by (seed, step).

The normals are Box-Muller transforms of Philox bits, because `tf.random.stateless_normal` has
different values with and without XLA for one seed; the integers of `stateless_uniform` do not.
Seeds are 128 bits and secret: anyone who knows them can remove the noise.
"""

import hashlib
import math
import secrets

import tensorflow as tf

from tfdpx._arguments import shortened
from tfdpx._keras import tensorflow_internals


def make_seed(seed=None):
    """Returns an int64 array-like of shape [2]: 128 bits for `tf.random.stateless_*`.

    Args:
        seed: Optional int. None draws from the operating system, as private training requires.
            An int is stretched by SHA-256, for repeatable experiments.

    Returns:
        List of two ints in [-2**63, 2**63).

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


# Number of values drawn at a time, which bounds the memory of intermediate results.
_CHUNK = 2**20
_UNLIKELY = 0x5DEECE66D
# For `tf.raw_ops`: the algorithm, and the key with which TensorFlow scrambles a seed.
_PHILOX, _SCRAMBLING = 1, 0x02461E293EC8F720
# Makes the seeds of radii and angles different from all others.
_KEY = int.from_bytes(b"normal", "big")

_RADIUS_BITS = 64
# In units of the standard deviation: the least uniform is half a step of its bits.
LARGEST_RADIUS = math.sqrt(2.0 * (_RADIUS_BITS + 1) * math.log(2.0))


def fold_in(seed, *numbers):
    """Returns an int64 seed of shape [2] that depends on `seed` and on `numbers` in order.

    All 128 bits stay secret; `tf.random.experimental.stateless_fold_in` would halve them.
    """
    for number in numbers:
        number = tf.cast(number, "int64")
        mixed = tf.bitwise.bitwise_xor(seed, tf.stack([tf.zeros_like(number), number]))
        seed = words([2], mixed, tf.int64)
    return seed


def words(shape, seed, dtype):
    """Returns uniform integers, a pure function of the arguments on every device and with XLA.

    They are the bits of `tf.random.stateless_uniform(..., alg="philox")`, in a third of its
    operations.

    Args:
        shape: Sequence of ints, or int32 tensor.
        seed: Integer tensor of shape [2].
        dtype: tf.int32, tf.int64, tf.uint32 or tf.uint64.
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
    """Returns independent N(0, stddev^2) float32 values, a pure function of the arguments.

    Values come in pairs of a radius and an angle. The tail: a radius takes 64 bits, so that none
    exceeds `LARGEST_RADIUS`, 9.49 `stddev`; a true normal pair exceeds it with probability 2**-65.
    `tfdpx.accounting.gaussian` bounds the delta that this adds. The body: radius and angle are
    rounded to float32, so values form a discrete set with steps of about 1e-7 of the radius, also
    near zero and in the tail. Privacy against an adversary who reads the last bits of a float32 is
    not covered (Mironov 2012, "On Significance of the Least Significant Bits for Differential
    Privacy"): epsilon is computed for real numbers.

    Args:
        shape: Static shape, a sequence of ints.
        seed: int64 tensor of shape [2].
        stddev: Float.

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
    # One loop is faster to trace; separate loops run in parallel if XLA compiles for a CPU.
    groups = tf.split(seeds, count) if under_xla else [seeds]
    pairs = -(-size // (2 * count))
    drawn = tf.concat([_in_a_loop(pairs, group, stddev) for group in groups], axis=0)
    return tf.reshape(tf.reshape(drawn, [-1])[:size], shape)


def _seeds(seed, count):
    """Returns int64 [count, 2, 2]: for each chunk a seed of the radii and one of the angles."""
    return tf.reshape(words([4 * count], fold_in(seed, _KEY), tf.int64), [count, 2, 2])


def _in_a_loop(pairs, seeds, stddev):
    """Returns float32 [2 * count, pairs]: the `_box_muller` of each of `seeds` [count, 2, 2].

    XLA does not fuse a loop into its readers. Without the loop it would draw the bits again for
    every element of every reader.
    """
    count = seeds.shape[0]
    # This equals `count`, but no compiler can know it: XLA unrolls a loop of one turn.
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
    """Two float32 [pairs], the first and the second of each pair."""
    log = _log_uniform(words([pairs], radius_seed, tf.int64))
    radius = tf.sqrt((-2.0 * stddev**2) * log)
    word = words([pairs], angle_seed, tf.int32)
    angle = (2.0 * math.pi * 2.0**-32) * tf.cast(word, "float32")
    return radius * tf.cos(angle), radius * tf.sin(angle)


def _log_uniform(word):
    """Returns float32 log(u) for u = (word + 0.5) / 2**64 modulo 1, from int64 words; below zero.

    A float32 cannot resolve u near 1, where radii are small, but it resolves 1 - u.
    """
    # Half a step up: neither end of the interval can occur. From -0.5 to 0.5, as u modulo 1 is.
    nearest = (tf.cast(word, "float32") + 0.5) * 2.0**-_RADIUS_BITS
    return tf.where(nearest > 0, tf.math.log(nearest), tf.math.log1p(nearest))
