"""Checks that the private step can use the data, for example that tensors are dense.

The checks read only types, dtypes and shapes, before anything else is done with a batch.
"""

import datetime

import keras
import numpy as np
import scipy.sparse
import tensorflow as tf

from tfdpx._keras import tensorflow_internals

# Flags of this dtype tell which rows of a drawn batch hold an example. The dtype is not bool,
# because Keras must be able to add the flags of replicas.
FLAGS = tf.uint32

_DENSE = {
    "sparse data": "Use `tf.sparse.to_dense(...)` (of a SciPy matrix: `.toarray()`).",
    "ragged data": "Pad it with `.to_tensor()`, and let a `keras.layers.Masking` or "
    "`Embedding(mask_zero=True)` skip the padding.",
    "objects": "Convert it to an array of numbers with rows padded to one length, for example by "
    '`.astype("float32")`.',
    "dates": "Replace them by numbers, such as days since a public date, or leave the column out.",
    "texts": "Encode them as numbers, by categories that are publicly known, or give each column "
    "as an input by itself, in a dict: texts for a lookup as strings, by `tf.constant(...)`.",
}


def check_dense(name, nest, columns=None):
    """Refuses sparse, ragged and object arrays, because single rows cannot be taken from them.

    Args:
        name: String, the name of the argument, for the message.
        nest: Array or tensor, or a nested structure of these.
        columns: Names of the columns of a table, for the message; or None.

    Raises:
        ValueError: If an array is not dense. The message says how to convert it.
    """
    for leaf in tf.nest.flatten(nest):
        kind, place = _kind(leaf), ""
        if kind == "objects":
            column, kind = unfit_column(leaf, columns)
            place = f" in column {column!r}" if kind and leaf.ndim == 2 else ""
            kind = kind or "objects"
        if kind is not None:
            raise ValueError(
                f"Argument `{name}` must hold dense arrays or tensors, one row per example. "
                f"Received: {kind}{place}, of type {type(leaf).__name__}. {_DENSE[kind]}"
            )


def unfit_column(table, names=None):
    """Finds the first column of a table that does not hold only numbers.

    Args:
        table: Array or data frame [rows, columns]. An array of another rank counts as one column.
        names: Names of the columns. None means the names in a data frame, or the column numbers.

    Returns:
        Pair of the name of the column, and "dates", "texts" or "objects", the kind of its values.
        (None, None) if all columns hold only numbers.
    """
    names, table = getattr(table, "columns", names), np.asarray(table)
    if table.dtype.kind in "biuf":
        return None, None
    columns = table.T if table.ndim == 2 else [table.ravel()]
    for name, column in zip(range(len(columns)) if names is None else names, columns, strict=True):
        is_date = column.dtype.kind in "mM"
        kind = "dates" if is_date else next(filter(None, map(_kind_of_value, column)), None)
        if kind is not None:
            return name, kind
    return None, None


def _kind_of_value(value):
    """Returns "dates", "texts" or "objects"; None for a number or a missing value."""
    if isinstance(value, datetime.timedelta | np.datetime64) or hasattr(value, "year"):
        return "dates"
    if np.iscomplexobj(value):
        return "objects"
    try:
        if value is not None and type(value).__name__ != "NAType":  # The type of `pandas.NA`.
            float(value)
    except (TypeError, ValueError):
        return "texts" if isinstance(value, str | bytes) else "objects"
    return None


def check_batch(model, data):
    """Refuses batches that the private step cannot split into examples.

    Args:
        model: A compiled `keras.Model`.
        data: `x`, `(x, y)` or `(x, y, sample_weight)` of arrays or tensors [B, ...].

    Raises:
        ValueError: If the batch holds sparse or ragged tensors, targets that are strings, no
            targets although the loss or a metric needs them, or arrays of different lengths.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    for name, nest in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        check_dense(name, nest)
    if any(leaf is not None and tf.as_dtype(leaf.dtype) == tf.string for leaf in _leaves(y)):
        raise ValueError(
            "Argument `y` must hold numbers. Received: strings. Encode classes as integers, with "
            "`keras.layers.StringLookup` or `np.unique(y, return_inverse=True)`."
        )
    if not _leaves(y):
        _check_needs_no_targets(model)


def refuse_repeat(name, dataset):
    """Refuses a `tf.data.Dataset` that never ends or is made by `repeat`.

    Args:
        name: String, the name of the argument, for the message.
        dataset: `tf.data.Dataset` that tfdpx will read once to its end.

    Raises:
        ValueError: If the data set is infinite or contains `repeat`.
    """
    is_endless = dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    if is_endless or tensorflow_internals.repeats_examples(dataset):
        raise ValueError(
            f"Argument `{name}` must be a dataset that ends and yields every example once, "
            "because an example that comes twice needs twice the noise. Received: an infinite "
            "dataset, or one with `repeat`. Leave out `repeat`; a training makes its own passes."
        )


def same_rows(data):
    """Checks that all tensors of a batch have the same number of rows, and returns the batch.

    If a batch had fewer targets than inputs, TensorFlow could use one target for several inputs: by
    broadcasting, or under XLA by reading past the last target. One example would then change
    several gradients.

    Args:
        data: Nested structure of tensors [B, ...] and None.

    Returns:
        `data`. If some numbers of rows are unknown during tracing, they are compared when the step
        runs, or under XLA when it is compiled. The step raises `tf.errors.InvalidArgumentError` if
        they differ.

    Raises:
        ValueError: If numbers of rows that are known during tracing differ.
    """
    tensors = _leaves(data)
    if any(not tensor.shape.rank for tensor in tensors if tensor.shape.rank is not None):
        raise ValueError(
            "A batch must hold tensors of shape [batch, ...]. Received: shapes "
            f"{[tuple(tensor.shape) for tensor in tensors]}. Call `.batch(...)` on the dataset."
        )
    lengths = {tensor.shape[0] for tensor in tensors}
    if len(lengths - {None}) > 1:
        raise ValueError(
            "The inputs, targets and sample weights of a batch must have one length. Received: "
            f"shapes {[tuple(tensor.shape) for tensor in tensors]}. Pass one target per example."
        )
    if lengths == {None}:
        rows = tf.shape(tensors[0])[0]
    elif None in lengths:
        [rows] = lengths - {None}
    else:
        return data

    def with_rows(tensor):
        # XLA drops the assertion, and ordinary graphs drop the reshape, so both are needed.
        same = tf.debugging.assert_equal(
            tf.shape(tensor)[0],
            rows,
            message="The inputs, targets and sample weights of a batch must have one length.",
        )
        with tf.control_dependencies([same]):
            reshaped = tf.reshape(tensor, tf.concat([[rows], tf.shape(tensor)[1:]], axis=0))
        return tf.ensure_shape(reshaped, tensor.shape)

    return tf.nest.map_structure(lambda t: None if t is None else with_rows(t), data)


def without_flags(sample_weight, is_drawn):
    """Returns `sample_weight`, or None if the values are not weights but flags of present rows.

    Flags have shape [B], or [B, k] for the examples of people.

    Args:
        sample_weight: Nested structure of tensors or of their specs, or None.
        is_drawn: Bool, whether a plan drew the batch. In other batches, weights of dtype `FLAGS`
            are the user's weights.
    """
    dtype = getattr(sample_weight, "dtype", None)
    is_flags = is_drawn and dtype == FLAGS or dtype == tf.bool and len(sample_weight.shape) == 1
    return None if is_flags else sample_weight


def present_rows(sample_weight, count):
    """Returns whether each example has a nonzero sample weight, bool [B]; None without weights.

    Args:
        sample_weight: Nested structure of tensors [B, ...], or None.
        count: Int B, the number of rows.
    """
    weights = [w for w in tf.nest.flatten(sample_weight) if w is not None]
    if not weights:
        return None
    flags = [w if w.dtype == tf.bool else w != 0 for w in weights]
    flags_of_rows = [tf.reduce_any(tf.reshape(flag, [count, -1]), axis=1) for flag in flags]
    return tf.reduce_any(tf.stack(flags_of_rows), axis=0)


def present_of_users(sample_weight):
    """Returns whether each of a person's k examples has a nonzero weight, bool [B, k].

    Args:
        sample_weight: Nested structure of tensors [B, k, ...] for B people.

    Raises:
        ValueError: If a tensor has fewer than two axes, so the batch does not consist of people.
    """
    weights = [w for w in tf.nest.flatten(sample_weight) if w is not None]
    if not weights or any(w.shape.rank < 2 for w in weights):
        raise ValueError(
            'A plan with unit="user" trains on batches [people, examples of each, ...] that it '
            f"drew. Received: sample weights of shapes {[tuple(w.shape) for w in weights]}. Train "
            "with `fit(x, y, user_ids=ids)`, or on `plan.batches(x, y, user_ids=ids)` as it is."
        )
    flags = [tf.reduce_any(w != 0, axis=range(2, w.shape.rank)) for w in weights]
    return tf.reduce_any(tf.stack(flags), axis=0)


def _kind(leaf):
    if isinstance(leaf, (tf.SparseTensor, tf.IndexedSlices)) or scipy.sparse.issparse(leaf):
        return "sparse data"
    if isinstance(leaf, (tf.RaggedTensor, tf.compat.v1.ragged.RaggedTensorValue)):
        return "ragged data"
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OmM":
        return "objects" if not all(isinstance(v, (str, bytes)) for v in leaf.flat) else None
    return None


def _check_needs_no_targets(model):
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if model.loss is not None and not own_loss:
        raise ValueError(
            f"Argument `y` is missing, but the loss of model '{model.name}' compares with it. "
            "Received: y=None. Pass targets (`fit(x, y)`; an autoencoder's are `x`), or "
            "override `compute_loss(x, y, y_pred, sample_weight)` with a loss per example "
            "that needs none."
        )
    own_metrics = type(model).compute_metrics is not keras.Model.compute_metrics
    if not own_metrics and any(metric.name == "compile_metrics" for metric in model.metrics):
        raise ValueError(
            f"Argument `y` is missing, but the metrics of model '{model.name}' compare with it. "
            "Received: y=None. Compile without `metrics`, pass targets, or override "
            "`compute_metrics(x, y, y_pred, sample_weight)`."
        )


def _leaves(nest):
    return [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]
