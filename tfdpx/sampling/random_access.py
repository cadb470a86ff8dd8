"""Examples read from disk as they are drawn, for data sets that do not fit in memory."""

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

# Examples that a thread reads at a time: few, so that all threads end together.
_AT_A_TIME = 8
# Examples by which two sources are compared.
_LOOKED_AT = 64


class RandomAccess:
    """Examples of a source that can be read in any order, such as `tfds.data_source`.

    Stands in for the arrays wherever tfdpx draws batches: `plan.batches(RandomAccess(source))`. Of
    the data, memory holds no more than the batches in flight. Threads of the host read and decode
    the examples of a batch; Pillow, NumPy and TensorFlow let them run side by side. The draws are
    those for arrays in the same order.

    Args:
        source: Object with `__len__` and `__getitem__(int)`, safe to call from several threads. An
            item is a tuple `(x, y)` of nests of arrays or numbers, of the structure, shapes and
            dtypes of item 0; 8-bit images are best left 8-bit. float64 becomes
            `keras.config.floatx()`. If it has `__getitems__(list of int)`, that is called instead.
        num_threads: Optional int; as many as there are processors if left out.

    Attributes:
        count: Int. Number of examples.
        is_weighted: False.

    Raises:
        ValueError: If the source is empty, or item 0 is no pair of arrays.
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
                "Argument `source` must give tuples (x, y). Received: item 0 of type "
                f"{type(self._first).__name__}. Wrap it in a class whose `__getitem__` gives pairs."
            )
        self._specs = [(np.shape(leaf), _dtype(leaf)) for leaf in tf.nest.flatten(self._first)]
        self._num_threads = num_threads or os.cpu_count()

    def batch(self, rows: Any, capacity: int) -> tuple:
        """The examples `rows`, padded with zeros; see `tfdpx.sampling.examples.Examples.batch`.

        Args:
            rows: int64 tensor of shape `[n]`, n <= capacity.
            capacity: Int.

        Returns:
            Tuple `(x, y, sample_weight)` of tensors of static shapes `[capacity, ...]`.
        """
        dtypes = [tf.as_dtype(dtype) for _, dtype in self._specs]
        read = tensorflow_internals.weakly(self._read)
        tensors = tf.numpy_function(lambda rows: read(rows, capacity), [rows], dtypes)
        for tensor, (shape, _) in zip(tensors, self._specs, strict=True):
            tensor.set_shape([capacity, *shape])
        x, y = tf.nest.pack_sequence_as(self._first, tensors)
        return x, y, tf.cast(tf.range(capacity) < tf.shape(rows)[0], tf.float32)

    def fingerprint(self) -> Any:
        """String that identifies these examples, by some of them.

        Raises:
            ValueError: If an example is another each time that it is read.
        """
        rows = np.unique(np.linspace(0, self.count - 1, _LOOKED_AT).astype(int))
        first, second = (self._digest_of(rows) for _ in range(2))
        if first != second:
            raise ValueError(
                "Argument `source` gives other arrays each time that an example is read, as an "
                "augmentation in `__getitem__` does. Give the augmentation to the optimizer, as "
                "`augment=`."
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
        """List of arrays `[capacity, ...]`."""
        batch = [np.zeros([capacity, *shape], dtype) for shape, dtype in self._specs]

        def fill(places):
            items = self._items([int(row) for row in rows[places]])
            for place, item in zip(places, items, strict=True):
                for array, leaf in zip(batch, tf.nest.flatten(item), strict=True):
                    # NumPy would stretch a leaf of another shape to fit.
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
