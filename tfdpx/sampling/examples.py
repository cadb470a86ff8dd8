"""Examples to draw from: arrays in memory, a data set read into memory, or a source on disk."""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import math
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import tensorflow_internals
from tfdpx.sampling.inputs import check_dense, refuse_repeat

# The number of examples that a thread reads at a time. With a small number, all threads end at
# about the same time.
_AT_A_TIME = 8
# The number of examples that the digest of a source is computed from.
_LOOKED_AT = 64


class RandomAccess:
    """Examples from a source that can be read in any order, for example `tfds.data_source`.

    Pass it in place of arrays to any function that draws batches, for example
    `plan.batches(RandomAccess(source))`. Memory holds only the batches that are being prepared.
    Several threads read the examples of a batch. They run in parallel while Pillow, NumPy or
    TensorFlow decode the examples. With the same seed, the draws are the same as for arrays in the
    same order.

    Args:
        source: Object with `__len__` and `__getitem__(int)`, safe to call from several threads. An
            item is a tuple `(x, y)` of arrays or numbers, or of nested structures of these. All
            items have the structure, shapes and dtypes of item 0. To save memory, return 8-bit
            images as uint8. float64 becomes `keras.config.floatx()`. If the source has a method
            `__getitems__(list of int)`, it is called instead of `__getitem__`.
        num_threads: Optional int, the number of threads that read. Defaults to the number of
            processors.

    Attributes:
        count: Int. Number of examples.
        is_weighted: False, because the examples have no sample weights.

    Raises:
        ValueError: If the source is empty, or item 0 is not a pair of arrays.
    """

    is_weighted = False

    def __init__(self, source: Any, num_threads: int | None = None) -> None:
        self.count = len(source)
        if not self.count:
            raise ValueError("Argument `source` must hold at least one example. Received: none.")
        self._source = source
        self._first = self._items([0])[0]
        if not isinstance(self._first, tuple) or len(self._first) != 2:
            raise ValueError(
                "Argument `source` must return tuples (x, y). Received: item 0 of type "
                f"{type(self._first).__name__}. Wrap it in a class that returns pairs."
            )
        self._specs = [(np.shape(leaf), _dtype(leaf)) for leaf in tf.nest.flatten(self._first)]
        self._num_threads = num_threads or os.cpu_count()

    def batch(self, rows: Any, capacity: int) -> tuple:
        """Returns the examples with the indices `rows`, padded with zeros to `capacity` rows.

        Args:
            rows: int64 tensor of shape `[n]`, n <= capacity.
            capacity: Int, the number of rows of the batch.

        Returns:
            Tuple `(x, y, sample_weight)` of tensors with static shapes `[capacity, ...]`. The
            weight is 1 for an example and 0 for padding.
        """
        dtypes = [tf.as_dtype(dtype) for _, dtype in self._specs]
        read = tensorflow_internals.weakly(self._read)
        tensors = tf.numpy_function(lambda rows: read(rows, capacity), [rows], dtypes)
        for tensor, (shape, _) in zip(tensors, self._specs, strict=True):
            tensor.set_shape([capacity, *shape])
        x, y = tf.nest.pack_sequence_as(self._first, tensors)
        return x, y, tf.cast(tf.range(capacity) < tf.shape(rows)[0], tf.float32)

    def fingerprint(self) -> Any:
        """Returns a string that identifies the source: a digest of 64 evenly spaced examples.

        Raises:
            ValueError: If an example changes from one read to the next.
        """
        rows = np.unique(np.linspace(0, self.count - 1, _LOOKED_AT).astype(int))
        first, second = (self._digest_of(rows) for _ in range(2))
        if first != second:
            raise ValueError(
                "Argument `source` returns other arrays each time that an example is read, for "
                "example because of an augmentation in `__getitem__`. Pass the augmentation to the "
                "optimizer, as `augment=`."
            )
        return first

    def _digest_of(self, rows):
        digest = hashlib.blake2b(f"{self.count}{self._specs}".encode())
        for array in self._read(rows, len(rows)):
            strings = array.dtype == object
            digest.update(repr(array.tolist()).encode() if strings else array.tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _threads(self):
        return concurrent.futures.ThreadPoolExecutor(self._num_threads)

    def _read(self, rows, capacity):
        """Returns a list of the arrays `[capacity, ...]` of x, then of y, at the indices `rows`."""
        batch = [np.zeros([capacity, *shape], dtype) for shape, dtype in self._specs]

        def fill(places):
            items = self._items([int(row) for row in rows[places]])
            for place, item in zip(places, items, strict=True):
                for array, leaf in zip(batch, tf.nest.flatten(item), strict=True):
                    # Otherwise NumPy would broadcast an array of another shape.
                    if np.shape(leaf) != array.shape[1:] or _dtype(leaf) != array.dtype:
                        raise ValueError(
                            f"Example {rows[place]} has an array of shape {np.shape(leaf)} and "
                            f"dtype {_dtype(leaf)} where example 0 has {array.shape[1:]} and "
                            f"{array.dtype}. Resize and cast in the source."
                        )
                    array[place] = leaf

        parts = np.array_split(np.arange(len(rows)), math.ceil(len(rows) / _AT_A_TIME) or 1)
        list(self._threads.map(fill, parts))
        return batch

    def _items(self, rows):
        if hasattr(self._source, "__getitems__"):
            return self._source.__getitems__(rows) if rows else []
        return [self._source[row] for row in rows]


def _dtype(leaf):
    dtype = np.asarray(leaf).dtype
    return np.dtype(keras.config.floatx()) if dtype == np.float64 else dtype


class Examples:
    """Examples in memory, stored as tensors. The first axis of each tensor is for examples.

    Args:
        x: Array, or nested structure (dict, tuple) of arrays, with shapes `[num_examples, ...]`.
            float64 becomes `keras.config.floatx()`; other dtypes stay the same.
        y: Like `x`, or None.
        sample_weight: Optional array, or structure of arrays like `y`, with finite values >= 0. The
            shape is `[num_examples]`, possibly with further axes of the loss, for example
            `[num_examples, time_steps]`.

    Attributes:
        count: Int. Number of examples.
        is_weighted: Bool, whether examples have weights.

    Raises:
        ValueError: If arrays have different lengths, are empty, sparse or ragged, or hold objects,
            or if a weight is invalid.
    """

    def __init__(self, x, y=None, sample_weight=None):
        with tf.device("CPU:0"):  # Draws run there; accelerators may lack the memory.
            x, y = _tensors("x", x), None if y is None else _tensors("y", y)
        arrays = [array for array in tf.nest.flatten((x, y)) if array is not None]
        counts = {array.shape[0] if array.shape.rank else 0 for array in arrays}
        if len(counts) != 1 or 0 in counts:
            raise ValueError(
                "Arguments `x` and `y` must hold arrays of the same length, at least 1. "
                f"Received: lengths {sorted(counts)}. A list of arrays means several inputs, as in "
                "`fit`. If each array is one example, use `np.stack` to make one array."
            )
        self.count = counts.pop()
        self.is_weighted = sample_weight is not None
        weights = np.ones(self.count) if sample_weight is None else sample_weight
        with tf.device("CPU:0"):
            weights = tf.nest.map_structure(self._weights, _tensors("sample_weight", weights))
        self._arrays = (x, y, weights)

    def _weights(self, weights):
        if weights.shape.rank == 0 or weights.shape[0] != self.count:
            raise ValueError(
                f"Argument `sample_weight` must have shape ({self.count},), a weight per example, "
                f"or ({self.count}, ...), one for each of its positions. Received: shape "
                f"{tuple(weights.shape)}."
            )
        values = tf.get_static_value(weights)  # Works inside of a graph, too.
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(
                "Weights must be finite and >= 0, because an example of weight 0 is absent. "
                f"Received: weights from {values.min()} to {values.max()}. If they are inputs: the "
                "third part of `(x, y, sample_weight)` is weights; give several inputs as one "
                "part, `((first, second, third),)`."
            )
        return tf.cast(weights, "float32")

    def batch(self, rows, capacity):
        """Returns the examples with the indices `rows`, padded with zeros to `capacity` rows.

        Args:
            rows: int64 tensor of shape `[n]`, n <= capacity.
            capacity: Int, the number of rows of the batch.

        Returns:
            Tuple `(x, y, sample_weight)` of tensors of static shapes `[capacity, ...]`.
        """
        held = [array for array in tf.nest.flatten(self._arrays) if array is not None]
        rows_taken = iter(tensorflow_internals.call_cached_trace(_take, (capacity,), rows, *held))
        return tf.nest.map_structure(
            lambda a: None if a is None else next(rows_taken), self._arrays
        )

    def split(self, count, weighted):
        """Returns the first `count` examples, and the remaining ones as arrays for validation.

        Args:
            count: Int in [1, number of examples).
            weighted: Bool, whether the remaining examples come with their sample weights.

        Returns:
            Pair of `Examples` and a tuple `(x, y)` or `(x, y, sample_weight)`.
        """

        def part(places):
            return tf.nest.map_structure(lambda t: None if t is None else t[places], self._arrays)

        first = object.__new__(Examples)
        first.count, first._arrays = count, part(slice(count))
        first.is_weighted = self.is_weighted
        return first, part(slice(count, None))[: 3 if weighted else 2]

    def present(self):
        """Returns x and y of the examples with a nonzero weight, as a flat list of NumPy arrays."""
        # The static values are readable even if the data set is made inside of a graph.
        x, y, weights = tf.nest.map_structure(tf.get_static_value, self._arrays)
        arrays = [array for array in tf.nest.flatten((x, y)) if array is not None]
        if self.is_weighted:
            flags = [w.reshape(len(w), -1).any(axis=1) for w in tf.nest.flatten(weights)]
            arrays = [array[np.any(flags, axis=0)] for array in arrays]
        return arrays

    @functools.cached_property
    def _digest(self):
        digest = hashlib.blake2b()
        for array in tf.nest.flatten(self._arrays):
            if array is not None:
                digest.update(f"{array.dtype}{array.shape}".encode())
                values = array.numpy()
                strings = values.dtype == object
                digest.update(repr(values.tolist()).encode() if strings else values.tobytes())
        return digest.hexdigest()

    def fingerprint(self):
        """Returns a string that identifies these examples."""
        return self._digest


def as_examples(x, y=None, sample_weight=None, *, num_examples=None):
    """Returns `x` if it is a `RandomAccess`, which includes the targets; otherwise `Examples`.

    Args:
        x: `RandomAccess`, a `tf.data.Dataset` of known size, or as for `Examples`.
        y: As for `Examples`. With a `RandomAccess` or a data set, `y` and `sample_weight` must be
            None.
        sample_weight: As for `Examples`.
        num_examples: Optional int. If a data set has this number of elements, each element is one
            example; otherwise each element is a batch.

    Raises:
        ValueError: If the arguments contradict each other.
    """
    if isinstance(x, tf.data.Dataset):
        if y is not None or sample_weight is not None:
            raise ValueError(
                "Argument `x`, a tf.data.Dataset, yields (x, y) or (x, y, sample_weight), so "
                "neither `y` nor `sample_weight` may be passed. Leave them out."
            )
        x, y, sample_weight = _arrays_of(x, num_examples)
    if not isinstance(x, RandomAccess):
        return Examples(x, y, sample_weight)
    arguments = {"y": y, "sample_weight": sample_weight}
    names = [f"`{name}`" for name, value in arguments.items() if value is not None]
    if names:
        raise ValueError(
            "Argument `x`, a RandomAccess, yields pairs (x, y), each of weight 1, so no other data "
            f"may be passed. Received also: {', '.join(names)}. Leave them out."
        )
    return x


def _tensors(name, arrays):
    """Returns a nest of arrays as tensors. `name` is the name of the argument for errors."""
    if isinstance(arrays, dict):
        return {key: _tensors(name, array) for key, array in arrays.items()}
    if isinstance(arrays, tuple):
        return tuple(_tensors(name, array) for array in arrays)
    if isinstance(arrays, list) and arrays and all(getattr(a, "shape", ()) for a in arrays):
        return tuple(_tensors(name, array) for array in arrays)  # As in `fit`, one for each input.
    # A list of numbers is one array, but `check_dense` would check each number.
    if not isinstance(arrays, list):
        check_dense(name, arrays)
    if not tf.is_tensor(arrays):
        is_series = hasattr(arrays, "to_frame")  # Keras treats a pandas Series as one column.
        columns = getattr(arrays, "columns", None)
        try:
            arrays = np.asarray(arrays.to_frame() if is_series else arrays)
        except ValueError as error:
            raise ValueError(
                f"Argument `{name}` must hold rows of one length. Received: lists of different "
                "lengths. Pad them, for example by `keras.utils.pad_sequences(...)`."
            ) from error
        check_dense(name, arrays, columns)
        if arrays.dtype == np.float64:
            arrays = arrays.astype(keras.config.floatx())
    return tf.convert_to_tensor(arrays)


def _take(capacity, rows, *arrays):
    """Returns the entries `rows` of each array, padded with zeros to `capacity` entries."""

    def take(array):
        padding = tf.zeros([capacity - tf.shape(rows)[0], *array.shape[1:]], array.dtype)
        batch = tf.concat([tf.gather(array, rows), padding], axis=0)
        return tf.ensure_shape(batch, [capacity, *array.shape[1:]])

    return [take(array) for array in arrays]


def _arrays_of(dataset, num_examples=None):
    """Reads a whole data set into arrays, and prints their size.

    Args:
        dataset: `tf.data.Dataset` of `x`, `(x, y)` or `(x, y, sample_weight)`, of known size.
        num_examples: Optional int. If the data set has this number of elements, each element is one
            example; otherwise each element is a batch.

    Returns:
        Tuple `(x, y, sample_weight)`; y and sample_weight can be None.

    Raises:
        ValueError: If the data set has an unknown or infinite size, is empty, or repeats examples.
    """
    count = int(dataset.cardinality())
    if count < 0:
        kind = "infinite" if count == tf.data.INFINITE_CARDINALITY else "unknown"
        raise ValueError(
            f"Argument `x`, a tf.data.Dataset, must have a known size. Received: one of {kind} "
            "size. Leave out `repeat`. If TensorFlow cannot know the size, declare it: "
            "`dataset.apply(tf.data.experimental.assert_cardinality(n))`."
        )
    refuse_repeat("x", dataset)
    elements = list(dataset.as_numpy_iterator())
    if not elements:
        raise ValueError("Argument `x`, a tf.data.Dataset, must hold examples. Received: none.")
    # If an element has a part without axes, the element is a single example.
    single = count == num_examples or any(not np.ndim(p) for p in tf.nest.flatten(elements[0]))
    join = np.stack if single else np.concatenate
    arrays = tf.nest.map_structure(lambda *parts: join([np.asarray(p) for p in parts]), *elements)
    leaves = tf.nest.flatten(arrays)
    megabytes = sum(leaf.nbytes for leaf in leaves) / 2**20
    print(
        f"plan.batches has read a tf.data.Dataset of {len(leaves[0]):,} examples into memory, "
        f"{megabytes:,.1f} MiB. For data that are larger than memory, use tfdpx.RandomAccess."
    )
    return keras.utils.unpack_x_y_sample_weight(arrays)
