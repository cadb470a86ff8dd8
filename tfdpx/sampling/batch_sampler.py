"""Which draws a data set of a plan gives, decided anew each time that it is iterated over.

A draw is named by a key and a step. What an accountant counts holds only if every update draws a
fresh batch. So the training that uses a data set enters its session here: the key follows from the
session's secret, or from a seed that was given, and the step is the number of the update.
"""

import functools
import math
import numbers
import weakref

import keras
import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx._keras import model_internals, tensorflow_internals
from tfdpx.sampling.class_weights import multiply
from tfdpx.sampling.inputs import FLAGS
from tfdpx.sampling.users import Users

_made = weakref.WeakKeyDictionary()
_DP_OPTIMIZER_ATTRIBUTES = ("batch_size", "noise_multiplier", "l2_norm_clip", "ledger")
# Nothing here needs autograph, which takes longer than tracing it.
_plain = tf.autograph.experimental.do_not_convert


class BatchSampler:
    """Gives out the draws of one data set. Each iteration over it is one pass.

    The key follows from `seed`, or else from the session, or else it is fresh for every pass. A
    pass begins at `start`; within a session at the number of its next update.

    Args:
        purpose: Int, sets the keys apart from whatever else is keyed by the same seed.
        draw: Function of a key, int64 tensor [2], a step and a replica, scalar int64 tensors, to
            the rows that these take, int64 [n].
        examples: `Examples`, `RandomAccess` or `Users`, to draw from.
        steps: Int, the number of steps of the whole training, or a function that gives how many are
            left, called when a pass begins.
        shares: `tfdpx.sampling.shares.Shares`.
        seed: Optional int; or for shares a pair of ints, secret.
        start: Int, or scalar variable that is read when a pass begins.
        optimizer: Optional tfdpx optimizer that the data set is made for.

    Attributes:
        plan: The `PrivacyPlan` that made the data set, or None.
        examples: As given.
        held_out: Tuple of arrays to validate on, or None.
        class_weight: `ClassWeights`, or None. They are in the weights of `dataset`, and not in
            those of `fitted`, because the private step has them act after the clip.
        fitted: What `fit` trains on in place of the data set: of no asserted length, since the
            updates that were made before make it shorter. Where examples have no weights, the third
            part is `FLAGS` [rows] of which rows hold an example.
        with_ids: `fitted`, with a fourth part: the number of each row's example, int32 [rows]; 0 in
            padding.
        optimizer: As given.
        session: The `Session` that trains on it, or None.
        ends_at: The number of the update after the last draw; None before a session began to draw.
        is_seeded: Bool, whether somebody gave the seed.

    Raises:
        ValueError: If an argument is out of its range, or two contradict each other.
    """

    def __init__(self, purpose, draw, examples, steps, shares, seed=None, start=0, optimizer=None):
        self.plan = self.held_out = self.class_weight = None
        self.examples, self._draw = examples, draw
        self.optimizer, self.session, self.is_seeded = optimizer, None, isinstance(seed, int)
        self.ends_at = None
        self._purpose, self._steps, self._shares, self._start = purpose, steps, shares, start
        _check_start(start, steps, shares)
        if optimizer is not None and not (isinstance(start, int) and start == 0):
            raise ValueError(
                "Argument `start` must be left out with `optimizer`, which knows the step to begin "
                f"at. Received: start={start!r}."
            )
        if shares.is_split and seed is None:
            raise ValueError(
                "Argument `seed` must be given with an `input_context`: hosts that draw with "
                "different seeds would take examples twice. Received: seed=None."
            )
        # A pair is a session's secret, by which its hosts draw.
        is_secret = shares.is_split and isinstance(seed, tuple)
        self._seed = seed if seed is None or is_secret else noise.make_seed(seed)

    def dataset(self):
        """A `tf.data.Dataset` of the draws that `sampler_of` recognises."""
        dataset = self._pipeline(self._weighted)
        fixed = isinstance(self._start, numbers.Integral) and not callable(self._steps)
        if fixed and not self._shares.is_split:
            count = self._steps - int(self._start)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
        _made[dataset] = self
        return dataset

    @functools.cached_property
    def fitted(self):
        """The data set that `fit` trains on in place of `dataset`; see the class."""
        return self._pipeline(self._flagged)

    @functools.cached_property
    def with_ids(self):
        """`fitted` with the numbers of the examples; see the class."""

        def with_ids(rows, *batch):
            size = self._shares.rows
            ids = tf.pad(tf.cast(rows, tf.int32), [[0, size - tf.shape(rows)[0]]])
            return *self._flagged(rows, *batch), tf.ensure_shape(ids, [size])

        return self._pipeline(with_ids)

    def _weighted(self, rows, x, y, weights):
        if self.class_weight is not None:
            weights = multiply(weights, self.class_weight.of_labels(y))
        return x, y, weights

    def _flagged(self, rows, x, y, weights):
        return x, y, weights if self.examples.is_weighted else tf.cast(weights != 0, FLAGS)

    def _batch(self, key, step, replica):
        """The rows that a step draws, and the examples there."""
        rows = self._draw(key, step, replica)
        # A draw of people chooses some examples of each, by another key.
        more = (noise.fold_in(key, step),) if isinstance(self.examples, Users) else ()
        return rows, *self.examples.batch(rows, self._shares.rows, *more)

    def _pipeline(self, part):
        """A data set of the draws, with a part of the tensors of each batch."""
        if self._shares.is_split:
            key = self._key()
            steps = self._shares.steps(*self._range())
            parts = steps.map(_plain(lambda step, replica: part(*self._batch(key, step, replica))))
            return finished(self._shares.endless(parts))
        begin = tensorflow_internals.weakly(self._begin)

        def steps_of_pass(_):
            key, *ends = tf.numpy_function(begin, [], [tf.int64] * 3)
            key = tf.data.Dataset.from_tensors(tf.ensure_shape(key, [2])).repeat()
            steps = tf.data.Dataset.range(*(tf.ensure_shape(end, []) for end in ends))
            return tf.data.Dataset.zip((key, steps))

        passes = tf.data.Dataset.from_tensors(0)
        passes.sampler = self  # Lives as long as a data set that draws from it.
        named = passes.flat_map(_plain(steps_of_pass))
        return finished(named.map(_plain(lambda key, step: part(*self._batch(key, step, 0)))))

    def _begin(self):
        """The key, the first step and the one after the last, when a pass begins: NumPy int64."""
        first, last = self._range()
        return self._key().numpy(), np.int64(first), np.int64(last)

    def _range(self):
        first = self._start
        if not isinstance(first, numbers.Integral):
            first = keras.ops.convert_to_numpy(first)
        session = self.session
        # Shares are made within the session, for it alone.
        if self._shares.is_split and self.optimizer is not None:
            session = self.optimizer.session
        first = int(first)
        if session is not None:
            first = max(first, session.number)
            self.ends_at = first + session.left
            return first, self.ends_at
        return first, first + self._steps() if callable(self._steps) else max(self._steps, first)

    def _key(self):
        """int64 tensor [2]: of the seed that is given, the session's, or a fresh one."""
        seed = self._seed
        if seed is None:
            seed = noise.make_seed() if self.session is None else self.session.draw_seed()
        return noise.fold_in(tf.constant(seed, tf.int64), self._purpose)


def finished(dataset):
    """What every data set of steps ends with: one batch read ahead, and no mixing of steps."""
    options = tf.data.Options()
    # A pipeline so short is made in less time than its optimizations take.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    # Sharding by elements would mix the draws of several steps. By file, it is an error here.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return dataset.prefetch(1).with_options(options)


def sampler_of(data):
    """The `BatchSampler` of a data set exactly as it was made, or None for anything else.

    A data set that was transformed (`take`, `cache`, `map`, `prefetch`, ...) is something else. A
    `BatchSampler` is its own.
    """
    if isinstance(data, BatchSampler):
        return data
    return _made.get(data) if isinstance(data, tf.data.Dataset) else None


def is_seeded(data):
    """Whether a data set, or one that it was made of, has draws of a seed that somebody gave."""
    sampler = sampler_of(data)
    if sampler is not None and sampler.is_seeded:
        return True
    sources = tensorflow_internals.inputs_of(data) if isinstance(data, tf.data.Dataset) else []
    return any(map(is_seeded, sources))


def check_optimizer(optimizer, plan):
    """The tfdpx optimizer inside of `optimizer`, if it spends what `plan` counts.

    Args:
        optimizer: The optimizer that a model is compiled with.
        plan: A `PrivacyPlan`.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If its batch_size or noise_multiplier is not the plan's.
    """
    optimizer = model_internals.innermost(optimizer)
    missing = [name for name in _DP_OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            "A PrivacyPlan needs a model compiled with a private optimizer. Received: "
            f"optimizer of type {type(optimizer).__name__}, without {', '.join(missing)}. "
            "Compile with optimizer=tfdpx.DPSGD(...)."
        )
    for name in ("batch_size", "noise_multiplier"):
        planned, actual = getattr(plan, name), getattr(optimizer, name)
        # Not ==, since a checkpoint or a config may have kept float32.
        if not math.isclose(planned, actual, rel_tol=1e-6):
            raise ValueError(
                f"The plan and the optimizer disagree on `{name}`. Received: plan.{name}="
                f"{planned}, optimizer.{name}={actual}. Pass `plan=plan` to the optimizer."
            )
    known = optimizer.plan
    if known is not None and known.num_examples != plan.num_examples:
        raise ValueError(
            "The plan and the optimizer disagree on `num_examples`. Received: plan.num_examples="
            f"{plan.num_examples}, optimizer.plan.num_examples={known.num_examples}. Pass "
            "`plan=plan` to the optimizer."
        )
    return optimizer


def _check_start(start, steps, shares):
    fixed = isinstance(start, numbers.Integral)
    if not fixed and not isinstance(start, (tf.Variable, keras.Variable)):
        raise ValueError(
            "Argument `start` must be an int or a scalar integer variable, such as "
            f"`model.optimizer.iterations`. Received: start={start!r}."
        )
    if not fixed and shares.is_split:
        raise ValueError(
            "Argument `start` must be an int with an `input_context`, the same on all hosts. "
            f"Received: start={start!r}."
        )
    stop = None if callable(steps) else steps
    if fixed and (start < 0 or stop is not None and start > stop):
        raise ValueError(
            f"Argument `start` must lie between 0 and `steps`. Received: start={start}, "
            f"steps={stop}."
        )
