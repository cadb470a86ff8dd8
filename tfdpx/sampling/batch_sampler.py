"""Samples the batches of a plan's data set, and samples again in each iteration over it.

A key and a step identify a draw. The privacy account holds only if every update draws a fresh
batch. A training that uses a data set therefore registers its session here: the key comes from the
session's secret, or from the user's seed, and the step is the number of the update.
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
# Nothing here needs autograph, and it takes longer than tracing.
_plain = tf.autograph.experimental.do_not_convert


class BatchSampler:
    """Samples the batches of one data set. Each iteration over it is one pass.

    The key follows from `seed` or, without one, from the session; otherwise every pass gets a new
    key. A pass begins at `start`, or within a session at its next update.

    Args:
        purpose: Int that makes the keys different from other uses of the same seed.
        draw: Function of a key, int64 tensor [2], a step and a replica, scalar int64 tensors, that
            returns the drawn rows, int64 [n].
        examples: `Examples`, `RandomAccess` or `Users` to draw from.
        steps: Int, the number of steps of the whole training, or a function that returns how many
            are left, which is called when a pass begins.
        shards: `tfdpx.sampling.shards.ReplicaShards`.
        seed: Optional int; for shards also a pair of ints, which is secret.
        start: Int, or scalar variable that is read when a pass begins.
        optimizer: Optional tfdpx optimizer that the data set is made for.

    Attributes:
        plan: The `PrivacyPlan` that made the data set, or None.
        examples: The argument.
        held_out: Tuple of arrays to validate on, or None.
        class_weight: `ClassWeights`, or None. They are in the weights of `dataset`, but not in
            those of `fitted`, because the private step applies them after the clip.
        fitted: The data set that `fit` trains on instead. It asserts no length, because earlier
            updates shorten it. If examples have no weights, the third part is `FLAGS` [rows] that
            mark the rows with an example.
        with_ids: `fitted` with a fourth part: the number of each row's example, int32 [rows]; 0 in
            padding.
        optimizer: The argument.
        session: The `Session` that trains on it, or None.
        ends_at: The number of the update after the last draw; None before a session draws.
        is_seeded: Bool, whether the user chose the seed.

    Raises:
        ValueError: If an argument is out of range, or two contradict each other.
    """

    def __init__(self, purpose, draw, examples, steps, shards, seed=None, start=0, optimizer=None):
        self.plan = self.held_out = self.class_weight = None
        self.examples, self._draw = examples, draw
        self.optimizer, self.session, self.is_seeded = optimizer, None, isinstance(seed, int)
        self.ends_at = None
        self._purpose, self._steps, self._shards, self._start = purpose, steps, shards, start
        _check_start(start, steps, shards)
        if optimizer is not None and not (isinstance(start, int) and start == 0):
            raise ValueError(
                "Argument `start` must be left out with `optimizer`, which has the first step. "
                f"Received: start={start!r}."
            )
        if shards.is_split and seed is None:
            raise ValueError(
                "Argument `seed` is required with an `input_context`, because hosts that draw with "
                "different seeds would take examples twice. Received: seed=None."
            )
        # A pair is the secret of a session, shared by the hosts for their draws.
        is_secret = shards.is_split and isinstance(seed, tuple)
        self._seed = seed if seed is None or is_secret else noise.make_seed(seed)

    def dataset(self):
        """Returns a `tf.data.Dataset` of the draws, which `sampler_of` recognises."""
        dataset = self._pipeline(self._weighted)
        fixed = isinstance(self._start, numbers.Integral) and not callable(self._steps)
        if fixed and not self._shards.is_split:
            count = self._steps - int(self._start)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
        _made[dataset] = self
        return dataset

    @functools.cached_property
    def fitted(self):
        """Returns the data set that `fit` trains on instead of `dataset`; see the class."""
        return self._pipeline(self._flagged)

    @functools.cached_property
    def with_ids(self):
        """Returns `fitted` with the numbers of the examples; see the class."""

        def with_ids(rows, *batch):
            size = self._shards.rows
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
        """Returns the rows that a step draws, and their examples."""
        rows = self._draw(key, step, replica)
        # A draw of people chooses some examples of each person, with another key.
        more = (noise.fold_in(key, step),) if isinstance(self.examples, Users) else ()
        return rows, *self.examples.batch(rows, self._shards.rows, *more)

    def _pipeline(self, part):
        """Returns a data set of the draws with `part` of the tensors of each batch."""
        if self._shards.is_split:
            key = self._key()
            steps = self._shards.steps(*self._range())
            parts = steps.map(_plain(lambda step, replica: part(*self._batch(key, step, replica))))
            return finished(self._shards.endless(parts))
        begin = tensorflow_internals.weakly(self._begin)

        def steps_of_pass(_):
            key, *ends = tf.numpy_function(begin, [], [tf.int64] * 3)
            key = tf.data.Dataset.from_tensors(tf.ensure_shape(key, [2])).repeat()
            steps = tf.data.Dataset.range(*(tf.ensure_shape(end, []) for end in ends))
            return tf.data.Dataset.zip((key, steps))

        passes = tf.data.Dataset.from_tensors(0)
        passes.sampler = self  # It lives as long as a data set that draws from it.
        named = passes.flat_map(_plain(steps_of_pass))
        return finished(named.map(_plain(lambda key, step: part(*self._batch(key, step, 0)))))

    def _begin(self):
        """Returns the key, the first step and the one after the last of a new pass, NumPy int64."""
        first, last = self._range()
        return self._key().numpy(), np.int64(first), np.int64(last)

    def _range(self):
        first = self._start
        if not isinstance(first, numbers.Integral):
            first = keras.ops.convert_to_numpy(first)
        session = self.session
        # Shards are made within a session, only for this session.
        if self._shards.is_split and self.optimizer is not None:
            session = self.optimizer.session
        first = int(first)
        if session is not None:
            first = max(first, session.number)
            self.ends_at = first + session.left
            return first, self.ends_at
        return first, first + self._steps() if callable(self._steps) else max(self._steps, first)

    def _key(self):
        """Returns the int64 tensor [2] of the seed, of the session, or a new one."""
        seed = self._seed
        if seed is None:
            seed = noise.make_seed() if self.session is None else self.session.draw_seed()
        return noise.fold_in(tf.constant(seed, tf.int64), self._purpose)


def finished(dataset):
    """Applies the last stages of every data set of steps: prefetch one batch, keep steps apart."""
    options = tf.data.Options()
    # Building such a short pipeline takes less time than optimizing it.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    # Sharding by elements would mix the draws of several steps; sharding by file is an error here.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return dataset.prefetch(1).with_options(options)


def sampler_of(data):
    """Returns the `BatchSampler` of a data set exactly as it was made, or None for other data.

    A data set that was transformed (for example by `take`, `cache`, `map` or `prefetch`) is
    different. A `BatchSampler` is returned as it is.
    """
    if isinstance(data, BatchSampler):
        return data
    return _made.get(data) if isinstance(data, tf.data.Dataset) else None


def is_seeded(data):
    """Returns whether a data set, or one it was made from, draws by a seed that a user chose."""
    sampler = sampler_of(data)
    if sampler is not None and sampler.is_seeded:
        return True
    sources = tensorflow_internals.inputs_of(data) if isinstance(data, tf.data.Dataset) else []
    return any(map(is_seeded, sources))


def check_optimizer(optimizer, plan):
    """Returns the tfdpx optimizer inside of `optimizer`, if it matches `plan`.

    Args:
        optimizer: The optimizer of a compiled model.
        plan: A `PrivacyPlan`.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If its batch_size, noise_multiplier or delta differs from the plan's.
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
        # Not ==: a checkpoint or a config may have stored float32.
        if not math.isclose(planned, actual, rel_tol=1e-6):
            raise ValueError(
                f"The plan and the optimizer disagree on `{name}`. Received: plan.{name}="
                f"{planned}, optimizer.{name}={actual}. Pass `plan=plan` to the optimizer."
            )
    trained_plan = optimizer.plan
    if trained_plan is not None:
        check_delta(plan, trained_plan)
    if trained_plan is not None and trained_plan.num_examples != plan.num_examples:
        raise ValueError(
            "The plan and the optimizer disagree on `num_examples`. Received: plan.num_examples="
            f"{plan.num_examples}, optimizer.plan.num_examples={trained_plan.num_examples}. Pass "
            "`plan=plan` to the optimizer."
        )
    return optimizer


def check_delta(plan, other):
    """Raises ValueError unless two plans of one training have one delta.

    Epsilon at a larger delta is smaller, so a run would have several, and show the least.
    """
    if not math.isclose(plan.delta, other.delta, rel_tol=1e-6):
        raise ValueError(
            "All plans of a training must have one delta, because epsilon is stated at it. "
            f"Received: plans with delta={plan.delta} and delta={other.delta}. Make both with the "
            "delta that you will state, `PrivacyPlan(..., delta=...)`."
        )


def _check_start(start, steps, shards):
    fixed = isinstance(start, numbers.Integral)
    if not fixed and not isinstance(start, (tf.Variable, keras.Variable)):
        raise ValueError(
            "Argument `start` must be an int or a scalar integer variable, for example "
            f"`model.optimizer.iterations`. Received: start={start!r}."
        )
    if not fixed and shards.is_split:
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
