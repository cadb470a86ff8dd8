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

from tfdpx import replicas
from tfdpx.run import fresh_state


def agree(strategy, optimizer, parts):
    """Raises on every host unless all hold equal `parts`, and sees to it that they share one run.

    Must be called on every host. The seeds travel over the hosts' network, as gradients will.

    Args:
        strategy: The `tf.distribute.Strategy`.
        optimizer: The tfdpx optimizer. A run that has made no update takes the chief's seeds.
        parts: Dict from a name (for the error) to arrays, a nest of variables or a JSON value.

    Raises:
        ValueError: On every host, if two differ in a part.
    """
    talks = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not talks or replicas.hosts(strategy) == 1:
        return
    run = optimizer.run
    is_new = run.updates == 0 and optimizer.seed is None
    if not is_new:
        parts = {
            **parts,
            "seeds of the run": {k: v for k, v in run.state().items() if k != "number"},
        }
    words = np.frombuffer(secrets.token_bytes(16), "uint32")
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
    if is_new:
        seed = int.from_bytes(rows[0, :4].astype("uint32").tobytes(), "big")
        optimizer.take_over(fresh_state(seed, number=run.number))


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
