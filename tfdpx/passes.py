"""The steps of a training run as a dataset that gives out each of them once."""

import numbers

import keras
import tensorflow as tf

# What a look at the first batch takes from a pass, read-ahead included: 2 steps, and 5 under
# tf.distribute, where Keras looks itself to build the model.
_MAX_LOOKED_AT = 8


class Passes:
    """Gives out the numbers of the steps to take, each time that a dataset is iterated over.

    Args:
        start: Int, or scalar variable that is read when a pass begins.
        stop: Int, the number of steps of the whole training.
        shares: `tfdpx.shares.Shares`.

    Raises:
        ValueError: If `start` is neither, or out of range.
    """

    def __init__(self, start, stop, shares):
        self._start, self._stop, self._shares, self._given_out = start, stop, shares, 0
        self._is_fixed = isinstance(start, numbers.Integral)
        if not self._is_fixed and not isinstance(start, (tf.Variable, keras.Variable)):
            raise ValueError(
                "Argument `start` must be an int or a scalar integer variable, such as "
                f"`model.optimizer.iterations`. Received: start={start!r}."
            )
        if not self._is_fixed and shares.is_split:
            raise ValueError(
                "Argument `start` must be an int with an `input_context`, the same on all hosts. "
                f"Received: start={start!r}."
            )
        if self._is_fixed and not 0 <= start <= stop:
            raise ValueError(
                f"Argument `start` must lie between 0 and `steps`. Received: start={start}, "
                f"steps={stop}."
            )

    def steps(self):
        """Pairs (step, replica), scalar int64 tensors: a dataset for `map` and then `finish`."""
        if self._shares.is_split:
            return self._shares.steps(int(self._start), self._stop)
        steps = tf.data.Dataset.from_generator(self, output_signature=tf.TensorSpec([], tf.int64))
        return steps.map(lambda step: (step, tf.zeros([], tf.int64)))

    def __call__(self):
        """Yields the steps of one pass."""
        first = int(self._start) if self._is_fixed else int(keras.ops.convert_to_numpy(self._start))
        # Looks are let through; all of a short run is no mere look.
        looked_at = min(_MAX_LOOKED_AT, max(self._stop - first - 1, 0))
        if self._is_fixed and self._given_out > looked_at:
            raise RuntimeError(
                f"Another pass over these batches would replay the draws from step {first} on, "
                "which voids the accounting. Pass `start=model.optimizer.iterations` to "
                "`batches`, or `steps_per_epoch` to `fit`, which then goes on with one pass."
            )
        for step in range(first, self._stop):
            self._given_out += 1
            yield step

    def finish(self, dataset):
        """What every dataset of steps ends with."""
        if self._shares.is_split:
            dataset = self._shares.endless(dataset)
        elif self._is_fixed:
            remaining = self._stop - int(self._start)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(remaining))
        options = tf.data.Options()
        options.autotune.enabled = False  # It reads ahead, which would count.
        # Sharding by elements would mix the draws of several steps. By file, it is an error here.
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        return dataset.prefetch(1).with_options(options)
