"""Batches by true Poisson sampling, and shuffled ones, of fixed shapes and resumable at any step.

Accounting multiplies the privacy loss of a step by what sampling takes off it (amplification by
sampling). That holds only while nobody but the trainer knows which examples a step drew: whoever
knows the seed can replay every draw and meets the loss of an unsampled Gaussian. So the seed comes
from the operating system unless given; give one for experiments, and keep it as secret as the data.

Both samplings give `(x, y, sample_weight)` for `keras.Model.fit`. An example of sample_weight 0 is
absent: tfdpx's optimizers let it contribute exactly zero.
"""

import math
import numbers

import keras
import numpy as np
import tensorflow as tf

from tfdpx import noise

# Set the draws apart from whatever else is keyed by the same seed.
_POISSON_KEY = int.from_bytes(b"poisson", "big")
_SHUFFLE_KEY = int.from_bytes(b"shuffle", "big")

# What a look at the first batch takes from a pass, read-ahead included: 2 steps, and 5 under
# tf.distribute, where Keras looks itself to build the model.
_MAX_LOOKED_AT = 8


class Examples:
    """Examples held in memory, as tensors that share their first axis.

    Args:
        x: Array, or nest (dict, tuple) of arrays, of shape `[num_examples, ...]`. float64 becomes
            `keras.config.floatx()`; any other dtype is kept.
        y: Like `x`, or None.
        sample_weight: Optional array of shape `[num_examples]`, finite and >= 0.
        class_weight: Optional dict from class (int) to weight, finite and >= 0, for a single `y` of
            class indices `[num_examples]` or `[num_examples, 1]`, or one-hot
            `[num_examples, num_classes]`. Classes not in it weigh 1.

    Attributes:
        count: Int. Number of examples.

    Raises:
        ValueError: If the arrays differ in length, are empty, or a weight is unfit.
    """

    def __init__(self, x, y=None, sample_weight=None, *, class_weight=None):
        with tf.device("CPU:0"):  # The draws run there; a data set may not fit an accelerator.
            x, y = _tensors(x), None if y is None else _tensors(y)
        arrays = [array for array in tf.nest.flatten((x, y)) if array is not None]
        counts = {array.shape[0] if array.shape.rank else 0 for array in arrays}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "Arguments `x` and `y` must hold arrays of one length, at least 1. "
                f"Received: lengths {sorted(counts)}. Pass several inputs as a tuple or dict."
            )
        self.count = counts.pop()
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError(
                    "Arguments `sample_weight` and `class_weight` exclude each other. "
                    "Received both. Multiply them into one `sample_weight`."
                )
            sample_weight = _class_weights(y, class_weight)
        weights = np.ones(self.count) if sample_weight is None else np.asarray(sample_weight)
        if weights.shape != (self.count,):
            raise ValueError(
                f"Argument `sample_weight` must have shape ({self.count},), a weight an example. "
                f"Received: shape {weights.shape}."
            )
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError(
                "Weights must be finite and >= 0, since an example of weight 0 is absent. "
                f"Received: weights from {weights.min()} to {weights.max()}."
            )
        with tf.device("CPU:0"):
            self._arrays = (x, y, tf.constant(weights, tf.float32))

    def batch(self, rows, capacity):
        """The examples `rows`, padded with zeros.

        Args:
            rows: int64 tensor of shape `[n]`, n <= capacity.
            capacity: Int.

        Returns:
            Tuple `(x, y, sample_weight)` of tensors of static shapes `[capacity, ...]`.
        """

        def take(array):
            if array is None:
                return None
            padding = tf.zeros([capacity - tf.shape(rows)[0], *array.shape[1:]], array.dtype)
            batch = tf.concat([tf.gather(array, rows), padding], axis=0)
            return tf.ensure_shape(batch, [capacity, *array.shape[1:]])

        return tf.nest.map_structure(take, self._arrays)


def poisson_batches(examples, *, sampling_probability, capacity, steps, seed=None, start=0):
    """Batches that hold each example with `sampling_probability`, independently.

    Step t is a function of (seed, t) alone, so that it can be replayed without those before it. The
    probability is rounded down to a multiple of 2**-32.

    Args:
        examples: `Examples`.
        sampling_probability: Float in (0, 1].
        capacity: Int. Number of rows of every batch; a step that draws more is an error.
        steps: Int. Number of steps of the whole training; the dataset ends there.
        seed: Optional int; None takes a seed from the operating system.
        start: Int or scalar variable, such as `optimizer.iterations`, which is read when the first
            batch of an iterator is. A step must count itself only when it has read its batch, as
            those of tfdpx's optimizers do; Keras's own may do it before.

    Returns:
        A `tf.data.Dataset` of `(x, y, sample_weight)` of static shapes `[capacity, ...]`; padding
        is zero and has sample_weight 0. Iterating raises `tf.errors.InvalidArgumentError` when a
        step exceeds `capacity`, `tf.errors.UnknownError` when an int `start` would replay steps.

    Raises:
        ValueError: If an argument is out of its range.
    """
    if not 0 < sampling_probability <= 1:
        raise ValueError(
            "Argument `sampling_probability` must lie in (0, 1]. "
            f"Received: sampling_probability={sampling_probability!r}."
        )
    key = noise.fold_in(noise.make_seed(seed), _POISSON_KEY)

    def draw(step):
        rows = poisson_rows(key, step, examples.count, sampling_probability)
        fits = tf.debugging.assert_less_equal(
            tf.shape(rows)[0],
            capacity,
            message="Poisson sampling drew more examples than the batch has rows for. Examples may "
            "not be left out: raise the capacity.",
        )
        with tf.control_dependencies([fits]):
            return examples.batch(tf.identity(rows), capacity)

    passes = _Passes(start, steps)
    indices = tf.data.Dataset.from_generator(passes, output_signature=tf.TensorSpec([], tf.int64))
    return passes.finish(indices.map(draw))


def shuffled_batches(examples, *, batch_size, capacity, steps, seed=None, start=0):
    """Batches of `batch_size` cut from a permutation of the examples, a new one every epoch.

    An epoch is `num_examples // batch_size` steps; what is left over is dropped. The permutation is
    a function of (seed, epoch) alone. Epsilon as computed for Poisson sampling is only an
    approximation here.

    Args:
        examples: `Examples`.
        batch_size: Int in [1, number of examples].
        capacity: Int >= batch_size. Number of rows of every batch.
        steps: Int. Number of steps of the whole training; the dataset ends there.
        seed: As in `poisson_batches`.
        start: As in `poisson_batches`.

    Returns:
        A `tf.data.Dataset` like that of `poisson_batches`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    if not 1 <= batch_size <= examples.count:
        raise ValueError(
            "Argument `batch_size` must lie between 1 and the number of examples. "
            f"Received: batch_size={batch_size}, for {examples.count} examples."
        )
    key = noise.fold_in(noise.make_seed(seed), _SHUFFLE_KEY)
    per_epoch = examples.count // batch_size
    passes = _Passes(start, steps)

    def rows_of_steps():
        epoch, order = None, None
        for step in passes():
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                order = _permutation(key, epoch, examples.count)
            first = step % per_epoch * batch_size
            yield order[first : first + batch_size]

    rows = tf.data.Dataset.from_generator(
        rows_of_steps, output_signature=tf.TensorSpec([batch_size], tf.int64)
    )
    return passes.finish(rows.map(lambda rows: examples.batch(rows, capacity)))


def poisson_rows(key, step, num_examples, sampling_probability):
    """The examples that a step draws.

    Args:
        key: int64 tensor of shape `[2]`.
        step: Scalar int64 tensor.
        num_examples: Int.
        sampling_probability: Float in (0, 1].

    Returns:
        int64 tensor of shape `[drawn]`, ascending.
    """
    if sampling_probability == 1:
        return tf.range(num_examples, dtype=tf.int64)
    bits = _bits(noise.fold_in(key, step), num_examples, tf.uint32)
    threshold = tf.constant(math.floor(sampling_probability * 2**32), tf.uint32)
    return tf.where(bits < threshold)[:, 0]


def _permutation(key, epoch, num_examples):
    # 64 bits: ties, which the sort would resolve by position, practically never occur.
    bits = _bits(noise.fold_in(key, epoch), num_examples, tf.uint64)
    return np.argsort(bits.numpy(), kind="stable")


def _bits(key, count, dtype):
    return tf.random.stateless_uniform(
        [count], key, minval=None, maxval=None, dtype=dtype, alg="philox"
    )


class _Passes:
    """Gives out the numbers of the steps to take, each time that a dataset is iterated over."""

    def __init__(self, start, stop):
        self._start, self._stop, self._given_out = start, stop, 0
        self._is_fixed = isinstance(start, numbers.Integral)
        if not self._is_fixed and not isinstance(start, (tf.Variable, keras.Variable)):
            raise ValueError(
                "Argument `start` must be an int or a scalar integer variable, such as "
                f"`model.optimizer.iterations`. Received: start={start!r}."
            )
        if self._is_fixed and not 0 <= start <= stop:
            raise ValueError(
                f"Argument `start` must lie between 0 and `steps`. Received: start={start}, "
                f"steps={stop}."
            )

    def __call__(self):
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
        if self._is_fixed:
            remaining = self._stop - int(self._start)
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(remaining))
        options = tf.data.Options()
        options.autotune.enabled = False  # It reads ahead, which _Passes would count.
        # Sharding by elements would mix the draws of several steps. By file, it is an error here.
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.FILE
        )
        return dataset.prefetch(1).with_options(options)


def _tensors(arrays):
    """The nest `arrays`, each array as a tensor."""
    if isinstance(arrays, dict):
        return {name: _tensors(array) for name, array in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(_tensors(array) for array in arrays)
    if not tf.is_tensor(arrays):
        arrays = np.asarray(arrays)
        if arrays.dtype == np.float64:
            arrays = arrays.astype(keras.config.floatx())
    return tf.convert_to_tensor(arrays)


def _class_weights(y, class_weight):
    """The weight of each example, by its class."""
    if not tf.is_tensor(y):
        raise ValueError(
            "Argument `class_weight` needs a single array `y` of classes. "
            f"Received: y of type {type(y).__name__}. Pass `sample_weight` instead."
        )
    classes = y.numpy()
    if classes.ndim == 2:
        classes = classes.argmax(axis=1) if classes.shape[1] > 1 else classes[:, 0]
    if classes.ndim != 1:
        raise ValueError(
            "Argument `class_weight` needs `y` of shape [num_examples], [num_examples, 1] or "
            f"[num_examples, num_classes]. Received: shape {tuple(y.shape)}."
        )
    values, places = np.unique(classes, return_inverse=True)
    return np.array([class_weight.get(int(value), 1.0) for value in values])[places]
