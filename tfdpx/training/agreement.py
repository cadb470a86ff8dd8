"""Hosts find out, once before they train, whether they are about to train the same thing.

Each host works out its share of a batch alone. That is right only if all of them hold the same
data, seed, weights and settings: otherwise examples are drawn twice in one update, or the weights
drift apart. So each sends a digest of what it holds, and all stop if two differ.
"""

import hashlib
import json
import secrets

import keras
import numpy as np
import tensorflow as tf

from tfdpx.training import replicas


def agree(strategy, seed, parts):
    """The chief's seed, once all hosts hold equal `parts`.

    Must be called on every host. The seed travels over the hosts' network, as gradients will.

    Args:
        strategy: The `tf.distribute.Strategy`.
        seed: Int in [0, 2**128), or None for one from the operating system of the chief.
        parts: Dict from a name (for the error) to arrays, a nest of variables or a JSON value.

    Returns:
        The seed, an int: the chief's where the hosts' own differ.

    Raises:
        ValueError: On every host, if two differ in a part.
    """
    if seed is None:
        seed = secrets.randbits(128)
    talks = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not talks or replicas.hosts(strategy) == 1:
        return seed
    words = [seed >> shift & (2**32 - 1) for shift in range(0, 128, 32)]
    digests = [int.from_bytes(_digest(part)[:7], "big") for part in parts.values()]
    rows = _gather(strategy, np.array([*words, *digests], "int64"))
    for name, column in zip(parts, rows[:, 4:].T, strict=True):
        if len(set(column)) > 1:
            hosts = np.flatnonzero(column != column[0])
            raise ValueError(
                f"The hosts hold different {name}: replicas {hosts.tolist()} differ from replica 0."
                " Every host must be given the same, in the same order, and restore the same "
                "checkpoint."
            )
    return sum(
        int(word) << shift for word, shift in zip(rows[0, :4], range(0, 128, 32), strict=True)
    )


def share_secret(strategy, session, seed, parts):
    """`agree` before a training: the session of every host takes the chief's secret.

    Args:
        strategy: The `tf.distribute.Strategy`.
        session: The `tfdpx.training.session.Session` of this host.
        seed: Int for the draws, or None.
        parts: As for `agree`.

    Returns:
        The seed for the draws, the chief's if it is an int; or None.

    Raises:
        ValueError: On every host, if two differ in a part.
    """
    if replicas.hosts(strategy) == 1:
        return seed
    chiefs = agree(strategy, seed, {**parts, "arguments `seed`": seed is None})
    session.share(agree(strategy, None, {}))
    return None if seed is None else chiefs


def _gather(strategy, vector):
    """What each replica's host holds, an array [replicas, ...], on every host."""

    def gather():
        context = tf.distribute.get_replica_context()
        return context.all_gather(tf.constant(vector)[tf.newaxis], axis=0)

    rows = strategy.run(tf.function(gather, autograph=False))
    return strategy.experimental_local_results(rows)[0].numpy()


def _digest(part):
    """BLAKE2 of a nest of arrays and variables, or of a JSON value."""
    digest = hashlib.blake2b()
    for leaf in tf.nest.flatten(part):
        if isinstance(leaf, keras.Variable) or hasattr(leaf, "dtype"):
            array = np.ascontiguousarray(keras.ops.convert_to_numpy(leaf))
            digest.update(f"{array.dtype}{array.shape}".encode())
            strings = array.dtype == object
            digest.update(repr(array.tolist()).encode() if strings else array.view("uint8").data)
        else:
            digest.update(json.dumps(leaf, default=str).encode())
    return digest.digest()
