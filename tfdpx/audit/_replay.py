"""Holds the noise of a run still: what its private updates release is recorded, then replayed.

Two runs that are handed the same releases have the same weights at every step, whatever their data.
So all that differs between them came from the data past the noise.
"""

import contextlib
import random
import secrets
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfdpx import mechanism
from tfdpx._keras import layer_internals
from tfdpx.training.private_optimizer import PrivateOptimizer


class GradientRecorder:
    """The noisy gradients and learning rates of one run, in the order of its updates.

    Args:
        most: Int, room for so many updates of a model.
        recorded: Optional `GradientRecorder` of another run, to give in place of this run's own.
    """

    def __init__(self, most, recorded=None):
        self._most, self._recorded = most, recorded
        self._tables = {}  # By the number of weights: models do not share it.
        self._current = None
        self.traced = []  # Shapes of the batches that steps were traced for, in order.

    def rates(self):
        """`{number of weights: learning rate of each update}`, the rates float32 arrays.

        Raises:
            ValueError: If there was no room for all updates.
        """
        rates = {}
        for size, table in self._tables.items():
            count = int(table.count)
            if count > self._most:
                raise ValueError(
                    f"A run made {count} updates, and there is room to record {self._most}. Give "
                    f"`max_updates={count}`, or train for fewer: a few show as much."
                )
            rates[size] = table.rates.numpy()[:count]
        return rates

    @contextlib.contextmanager
    def held(self, seed):
        """Within it, private updates are recorded or replayed, and nothing else is random.

        Args:
            seed: Int; no secret, so that nothing trained here is private.
        """
        privatize, record = mechanism.privatize, PrivateOptimizer.record
        step, drawn = PrivateOptimizer.private_train_step, random.Random(seed)

        def held_privatize(*arguments):
            return self._give(privatize(*arguments))

        def held_record(optimizer, *arguments):
            record(optimizer, *arguments)
            self._count(optimizer.learning_rate)

        def seen_step(optimizer, model, data):
            if model.distribute_strategy.num_replicas_in_sync > 1:
                raise ValueError(
                    "`check_run` trains on one replica. Received a model under a strategy of "
                    f"{model.distribute_strategy.num_replicas_in_sync}. Build it without."
                )
            shapes = tf.nest.map_structure(lambda t: None if t is None else tuple(t.shape), data)
            self.traced.append(f"{type(optimizer).__name__} on {shapes}")
            return step(optimizer, model, data)

        with (
            mock.patch.object(mechanism, "privatize", held_privatize),
            mock.patch.object(PrivateOptimizer, "record", held_record),
            mock.patch.object(PrivateOptimizer, "private_train_step", seen_step),
            mock.patch.object(secrets, "token_bytes", drawn.randbytes),
            mock.patch.object(secrets, "randbits", drawn.getrandbits),
            layer_internals.fresh_names(),
        ):
            keras.utils.set_random_seed(seed)
            yield

    def _give(self, gradients):
        """The `PrivateGradient`s of an update, with what another run released in their place."""
        tensors = [gradient.tensor for gradient in gradients]
        flat = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
        size = int(flat.shape[0])
        table = self._current = self._table(size)
        place = tf.minimum(table.count, self._most - 1)
        if self._recorded is None:
            table.values.scatter_update(tf.IndexedSlices(flat[tf.newaxis], place[tf.newaxis]))
            return gradients
        flat = tf.gather(self._recorded._table(size).values, place)
        parts = tf.split(flat, [int(np.prod(t.shape)) for t in tensors])
        for gradient, part, tensor in zip(gradients, parts, tensors, strict=True):
            gradient.tensor = tf.reshape(part, tensor.shape)
        return gradients

    def _count(self, rate):
        """Keeps the learning rate of the update under way."""
        table = self._current
        place = tf.minimum(table.count, self._most - 1)[tf.newaxis]
        rate = tf.cast(rate, "float32")[tf.newaxis]
        table.rates.scatter_update(tf.IndexedSlices(rate, place))
        table.count.assign_add(1)

    def _table(self, size):
        if size not in self._tables:
            # Not in the graph of the step that is being traced.
            with tf.init_scope():
                self._tables[size] = _Table(self._most, size)
        return self._tables[size]


class _Table:
    """Updates of a model with `size` weights; one that replays needs no values of its own."""

    def __init__(self, most, size):
        self.values = tf.Variable(tf.zeros([most, size]), trainable=False)
        self.rates = tf.Variable(tf.zeros([most]), trainable=False)
        self.count = tf.Variable(0, trainable=False)
