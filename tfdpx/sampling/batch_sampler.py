"""Makes data sets that draw the batches of a privacy plan, with new batches in every pass.

The batch of a step is determined by a random key and the number of the step. Epsilon is valid only
if every update draws a fresh batch. So a `fit` sets the attribute `session` of the `BatchSampler`
that it trains on. The key then comes from the secret of the session, or from the user's seed, and
the number of the step is the number of the update.
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
# AutoGraph takes longer than tracing, and no function of this module needs it.
_plain = tf.autograph.experimental.do_not_convert


class BatchSampler:
    """Draws the batches of one data set. One iteration over the data set is one pass.

    The key of the draws comes from `seed`. Without a seed, the key comes from the session that
    trains on the data set. Outside of a session, every pass gets a new random key. A pass begins at
    step `start`, or in a session at the session's next update.

    Args:
        purpose: Int that is mixed into the key, so draws for other purposes differ with one seed.
        draw: Function `draw(key, step, replica)` that returns the indices of the drawn examples,
            int64 [n]. `key` is an int64 tensor [2]; `step` and `replica` are scalar int64 tensors.
        examples: `Examples`, `RandomAccess` or `Users` to draw from.
        steps: Int, the number of steps of the whole training; or a function without arguments that
            returns the number of remaining steps, which is called when a pass begins.
        shards: `tfdpx.sampling.shards.ReplicaShards`, which splits a draw over replicas.
        seed: Optional int, for experiments. If several hosts split draws, it may also be a pair of
            ints, the secret that the hosts share.
        start: Int, the first step; or a scalar variable that is read when a pass begins.
        optimizer: Optional tfdpx optimizer that will train on the data set.

    Attributes:
        plan: The `PrivacyPlan` that made the data set, or None.
        examples: The argument `examples`.
        held_out: Tuple of arrays for validation, or None.
        class_weight: `ClassWeights`, or None. `dataset` multiplies the sample weights by them.
            `fitted` does not, because the private step applies them after clipping.
        fitted: The data set that `fit` trains on in place of `dataset`. Its length is unknown,
            because it ends at the last update of the plan. If the examples have no weights, the
            third part of a batch holds flags [rows] of dtype `FLAGS`: 1 for a row with an example,
            0 for padding.
        with_ids: `fitted` with a fourth part: the index of the example in each row, int32 [rows],
            which is 0 for padding.
        optimizer: The argument `optimizer`.
        session: The `Session` of the `fit` that trains on the data set, or None.
        ends_at: The number of the update at which the current pass of a session ends (exclusive);
            None before a session draws.
        is_seeded: Bool, whether the user chose the seed.

    Raises:
        ValueError: If an argument is out of range, or two arguments contradict each other.
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
        # A pair is the secret of a session, which the hosts share for their draws.
        is_secret = shards.is_split and isinstance(seed, tuple)
        self._seed = seed if seed is None or is_secret else noise.make_seed(seed)

    def dataset(self):
        """Returns a `tf.data.Dataset` of the drawn batches, which `sampler_of` maps to `self`."""
        dataset = self._pipeline(self._weighted)
        fixed = isinstance(self._start, numbers.Integral) and not callable(self._steps)
        if fixed and not self._shards.is_split:
            count = self._steps - int(self._start)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
        _made[dataset] = self
        return dataset

    @functools.cached_property
    def fitted(self):
        """Returns the data set that `fit` trains on instead of `dataset()`; see the class."""
        return self._pipeline(self._flagged)

    @functools.cached_property
    def with_ids(self):
        """Returns `fitted` with the indices of the examples; see the class."""

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
        """Returns the examples that a step draws: their indices, x, y and sample weights."""
        rows = self._draw(key, step, replica)
        # For people, another key chooses some examples of each person.
        more = (noise.fold_in(key, step),) if isinstance(self.examples, Users) else ()
        return rows, *self.examples.batch(rows, self._shards.rows, *more)

    def _pipeline(self, part):
        """Returns a data set of the results of `part(rows, x, y, sample_weight)`, one per step."""
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
        passes.sampler = self  # Keeps this sampler alive while the data set is.
        named = passes.flat_map(_plain(steps_of_pass))
        return finished(named.map(_plain(lambda key, step: part(*self._batch(key, step, 0)))))

    def _begin(self):
        """Begins a pass. Returns its key, first step and end (exclusive), as NumPy int64."""
        first, last = self._range()
        return self._key().numpy(), np.int64(first), np.int64(last)

    def _range(self):
        first = self._start
        if not isinstance(first, numbers.Integral):
            first = keras.ops.convert_to_numpy(first)
        session = self.session
        # A data set with shards is made within a session and serves only that session.
        if self._shards.is_split and self.optimizer is not None:
            session = self.optimizer.session
        first = int(first)
        if session is not None:
            first = max(first, session.number)
            self.ends_at = first + session.left
            return first, self.ends_at
        return first, first + self._steps() if callable(self._steps) else max(self._steps, first)

    def _key(self):
        """Returns the key of a pass, int64 [2], from the seed, from the session, or at random."""
        seed = self._seed
        if seed is None:
            seed = noise.make_seed() if self.session is None else self.session.draw_seed()
        return noise.fold_in(tf.constant(seed, tf.int64), self._purpose)


def finished(dataset):
    """Returns the data set with prefetching of one batch, and without `tf.data`'s optimizations."""
    options = tf.data.Options()
    # The pipeline is so short that optimizing it takes longer than running it as it is.
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    # If `tf.distribute` sharded by elements, it would mix the draws of several steps. With this
    # policy it raises an error.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return dataset.prefetch(1).with_options(options)


def sampler_of(data):
    """Returns the `BatchSampler` that made a data set, or None for other data.

    A data set that was transformed, for example by `take`, `cache`, `map` or `prefetch`, counts as
    other data. A `BatchSampler` is returned unchanged.
    """
    if isinstance(data, BatchSampler):
        return data
    return _made.get(data) if isinstance(data, tf.data.Dataset) else None


def is_seeded(data):
    """Returns whether the draws of a data set, or of one that it transforms, use a user's seed."""
    sampler = sampler_of(data)
    if sampler is not None and sampler.is_seeded:
        return True
    sources = tensorflow_internals.inputs_of(data) if isinstance(data, tf.data.Dataset) else []
    return any(map(is_seeded, sources))


def check_optimizer(optimizer, plan):
    """Checks an optimizer against a plan, and returns the tfdpx optimizer without wrappers.

    Args:
        optimizer: The optimizer of a compiled model.
        plan: A `PrivacyPlan`.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If the optimizer's batch_size, noise_multiplier, num_examples or delta differs
            from the plan's.
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
        # Values need not be exactly equal, because a checkpoint or a config may have stored
        # float32.
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
    """Raises ValueError unless two plans of one training have the same delta.

    Epsilon is smaller at a larger delta. With two deltas, a run would have two epsilons, and could
    report the smaller one.
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
