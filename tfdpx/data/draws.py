"""Which draws a data set of a plan gives, decided anew each time that it is iterated over.

A draw is named by a key and a step. What an accountant counts holds only if no draw feeds two
updates, so the training that uses a data set binds it to its `Run`, which knows how far each key
was used: a pass then begins behind the last update, however often the data set was looked at.
"""

import hashlib
import numbers
import weakref

import keras
import tensorflow as tf

from tfdpx import noise

_made = weakref.WeakKeyDictionary()


class Draws:
    """Gives out the draws of one data set. Each iteration over it is one pass.

    The key follows from `seed`, or else from the run, or else it is fresh for every pass. A pass
    begins at `start`; with a run (given here or by `bind`) at the first step that it has not used.

    Args:
        purpose: Int, sets the keys apart from whatever else is keyed by the same seed.
        steps: Int, the number of steps of the whole training, or a function that gives how many are
            left, called when a pass begins.
        shares: `tfdpx.replication.shares.Shares`.
        seed: Optional int.
        start: Int, or scalar variable that is read when a pass begins.
        run: Optional `tfdpx.run.state.Run`.

    Attributes:
        plan: The `PrivacyPlan` that made the data set, or None.
        examples: What it draws from, or None.
        held_out: Tuple of arrays to validate on, or None.
        plain: The data set before its length was asserted, or None. What a run has used makes it
            shorter.
        with_ids: `plain` or the data set, with a fourth part: the number of each row's example,
            int32 [rows]; 0 in padding.
        run: The run that the data set was made for, or None.

    Raises:
        ValueError: If an argument is out of its range, or two contradict each other.
    """

    def __init__(self, purpose, steps, shares, seed=None, start=0, run=None):
        self.plan = self.examples = self.held_out = self.plain = self.with_ids = None
        self.run = run
        self._purpose, self._steps, self._shares, self._start = purpose, steps, shares, start
        self._bound = self._left = None
        _check_start(start, steps, shares)
        if run is not None and not (isinstance(start, int) and start == 0):
            raise ValueError(
                "Argument `start` must be left out with `optimizer`, which knows the step to begin "
                f"at. Received: start={start!r}."
            )
        if shares.is_split and seed is None and run is None:
            raise ValueError(
                "Argument `seed` must be given with an `input_context`: hosts that draw with "
                "different seeds would take examples twice. Received: seed=None."
            )
        self._is_fresh = seed is None and run is None
        self._seed = None if seed is None else tuple(noise.make_seed(seed))

    def dataset(self, draw, examples):
        """The data set of the draws, ready to be trained on.

        Args:
            draw: Function of a key, int64 tensor [2], a step and a replica, scalar int64 tensors,
                to the rows that these take, int64 [n].
            examples: `Examples` or `RandomAccess`.

        Returns:
            A `tf.data.Dataset` that `draws_of` recognises.
        """
        # Nothing in it needs autograph, which takes longer than tracing it.
        draw = tf.autograph.experimental.do_not_convert(draw)
        if self._shares.is_split:
            first, stop = self._range(self.run)
            key = self._key()
            if self.run is not None:
                self.run.begin_pass(self._name(), first)
            rows = self._shares.steps(first, stop).map(
                lambda step, replica: draw(key, step, replica)
            )
        else:
            signature = (tf.TensorSpec([2], tf.int64), tf.TensorSpec([], tf.int64))
            pairs = tf.data.Dataset.from_generator(self._one_pass, output_signature=signature)
            zero = tf.zeros([], tf.int64)
            rows = pairs.map(lambda key, step: draw(key, step, zero))
        dataset, self.with_ids = (
            finished(self._shares.endless(batches) if self._shares.is_split else batches)
            for batches in (
                rows.map(lambda rows: examples.batch(rows, self._shares.rows)),
                rows.map(lambda rows: _with_ids(examples, rows, self._shares.rows)),
            )
        )
        fixed = isinstance(self._start, numbers.Integral) and not callable(self._steps)
        if fixed and not self._shares.is_split:
            self.plain, count = dataset, self._steps - int(self._start)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
        _made[dataset] = self
        return dataset

    def bind(self, run, left=None):
        """From now on passes go on behind the steps that `run` has used; None ends that.

        Args:
            run: `tfdpx.run.state.Run`, or None.
            left: Function that gives the most steps of a pass, called when it begins.
        """
        self._bound, self._left = run, left

    @property
    def is_bound(self):
        """Bool: whether a run trains on the data set."""
        return self._bound is not None

    def count_left(self, run):
        """Int: the steps of the next pass, if `run` is to train on it."""
        first, stop = self._range(run)
        return stop - first

    @property
    def seed_digest(self):
        """String that tells the given seed from others and does not tell it; None without one."""
        if self._seed is None:
            return None
        return hashlib.sha256(f"tfdpx draws of {self._seed}".encode()).hexdigest()

    def _one_pass(self):
        """Yields (key, step), as the data set is iterated over."""
        key = self._key().numpy()
        first, stop = self._range(self._bound or self.run)
        if self._bound is not None and not self._is_fresh:
            self._bound.begin_pass(self._name(), first)
        for step in range(first, stop):
            yield key, step

    def _range(self, run):
        first = self._start
        if not isinstance(first, numbers.Integral):
            first = keras.ops.convert_to_numpy(first)
        first = int(first)
        if run is not None and not self._is_fresh:
            first = max(first, run.first_unused(self._name()))
        if callable(self._steps):
            stop = first + self._steps()
        else:
            stop = max(self._steps, first)
        return first, stop if self._left is None else min(stop, first + self._left())

    def _source(self):
        """Two ints: the seed that is given, the run's, or a fresh one."""
        if self._seed is not None:
            return self._seed
        return tuple(noise.make_seed()) if self.run is None else self.run.draw_seed

    def _key(self):
        """int64 tensor [2]."""
        return noise.fold_in(tf.constant(self._source(), tf.int64), self._purpose)

    def _name(self):
        """What runs know the key by. Two sampling rates share draws, so the rate is no part."""
        return ":".join(str(part) for part in (*self._source(), self._purpose))


def _with_ids(examples, rows, capacity):
    ids = tf.pad(tf.cast(rows, tf.int32), [[0, capacity - tf.shape(rows)[0]]])
    return *examples.batch(rows, capacity), tf.ensure_shape(ids, [capacity])


def finished(dataset):
    """What every data set of steps ends with: one batch read ahead, and no mixing of steps."""
    options = tf.data.Options()
    options.autotune.enabled = False  # It reads ahead.
    # Sharding by elements would mix the draws of several steps. By file, it is an error here.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return dataset.prefetch(1).with_options(options)


def draws_of(data):
    """The `Draws` of a data set exactly as it was made, or None for anything else.

    A data set that was transformed (`take`, `cache`, `map`, `prefetch`, ...) is something else.
    """
    return _made.get(data) if isinstance(data, tf.data.Dataset) else None


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
