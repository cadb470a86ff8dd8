"""How many examples of one data set are in others, by a hash of each example's inputs.

Inputs are equal if they are as float32, whatever their dtype, order, names or shape; of strings,
their bytes count. Hashes are in memory alone, while data sets are compared. An input that was
rescaled, cropped or computed once more is another.
"""

import collections
import hashlib
import math

import keras
import numpy as np
import tensorflow as tf

from tfdpx.sampling.batch_sampler import sampler_of
from tfdpx.sampling.examples import Examples, as_examples
from tfdpx.sampling.random_access import RandomAccess

# Examples that are read and hashed at a time.
_ROWS = 1024


def examples_of(data):
    """The `Examples` or `RandomAccess` behind a data set; None where each pass may give others.

    Args:
        data: What `fit` takes as `x`, without targets, or either of the two.
    """
    if isinstance(data, tf.data.Dataset):
        draws = sampler_of(data)
        return None if draws is None else getattr(draws.examples, "examples", draws.examples)
    if isinstance(data, (Examples, RandomAccess)):
        return data
    if not all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(data)):
        return None
    try:
        return as_examples(data)
    except (TypeError, ValueError):  # Sparse or ragged arrays, arrays of objects, ...
        return None


def count_common(examples, others, views=1):
    """How many of some examples are among others, by their inputs.

    Args:
        examples: What `fit` takes to validate on, without targets. A `tf.data.Dataset` or a
            `keras.utils.PyDataset` of known size is read once; what else cannot be read twice is
            not read at all.
        others: List of `Examples` or `RandomAccess`, each read once.
        views: Int, the views of each of `others`, whose inputs have shape `[n, views, ...]`; with 1
            there is no such axis.

    Returns:
        Pair of ints: the examples that are among `others`, and all of them; or None if they cannot
        be read.
    """
    parts = _parts(examples)
    if parts is None:
        return None
    counts = collections.Counter(digest for part in parts for digest in _digests(part))
    found = {
        digest
        for other in others
        for part in _in_order(other)
        for digest in _digests(part, views)
        if digest in counts
    }
    return sum(counts[digest] for digest in found), counts.total()


def _parts(data):
    """Iterable of nests of arrays `[n, ...]`, or None."""
    examples = examples_of(data)
    if examples is not None:
        return _in_order(examples)
    if isinstance(data, keras.utils.PyDataset):
        count = data.num_batches
        return None if count is None else (_inputs(data[i]) for i in range(count))
    if not isinstance(data, tf.data.Dataset) or sampler_of(data) is not None:
        return None
    dense = all(isinstance(t, tf.TensorSpec) for t in tf.nest.flatten(_inputs(data.element_spec)))
    return map(_inputs, data) if dense and data.cardinality() >= 0 else None


def _in_order(examples):
    for start in range(0, examples.count, _ROWS):
        rows = tf.range(start, min(start + _ROWS, examples.count), dtype=tf.int64)
        yield examples.batch(rows, len(rows))[0]


def _inputs(batch):
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def _digests(inputs, views=1):
    """List of bytes, of each row of a nest of arrays `[n, ...]`, or of each view of each."""
    leaves = [_rows(leaf, views) for leaf in tf.nest.flatten(inputs) if leaf is not None]
    # Sorted: by name or by position, inputs are the same.
    return [b"".join(sorted(map(_digest, row))) for row in zip(*leaves, strict=True)]


def _rows(leaf, views):
    """Array `[n * views, values of a row]`."""
    values = np.atleast_1d(np.asarray(leaf))
    if values.dtype.kind in "OSU":
        values = tf.convert_to_tensor(values).numpy()
    else:
        with np.errstate(over="ignore"):
            values = values.astype("float32") + 0.0  # Zero has no sign.
    return values.reshape(len(values) * views, math.prod(values.shape[1:]) // views)


def _digest(row):
    content = repr(row.tolist()).encode() if row.dtype == object else row.tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()
