"""Functions of one batch, traced for any number of rows or for some, and walked."""

import numpy as np
import tensorflow as tf

from tfdpx.independence.lengths import ROWS, Length
from tfdpx.independence.verdict import reasons_of_graph


def trace(function, shape, rows=None, dtype=tf.float32):
    """The concrete function of `function` for [rows, *shape]."""
    spec = tf.TensorSpec([rows, *shape], dtype)
    return tf.function(function, autograph=False).get_concrete_function(spec)


def reasons(function, shape=(4,), rows=None, dtype=tf.float32):
    """Why `function` is not proved to be independent by row; an empty list if it is."""
    graph = trace(function, shape, rows, dtype).graph
    length = ROWS if rows is None else Length(rows)
    return reasons_of_graph(graph, graph.inputs[:1], graph.outputs, length)


def mixes(concrete, shape, sizes=(2, 3, 5), alone=True):
    """How a function shows on data that it mixes rows, a text; None if it does not.

    A row must not change with other rows, with its place or, if `alone`, with the number of rows.
    """
    rng = np.random.default_rng(0)
    for size in sizes:
        x = rng.normal(size=(size, *shape)).astype("float32")
        y = concrete(tf.constant(x)).numpy()
        if len(y) != size:
            return "another number of rows"
        for row in range(size):
            other = x.copy()
            other[row] = 10 * rng.normal(size=shape)
            kept = np.arange(size) != row
            if not _close(concrete(tf.constant(other)).numpy()[kept], y[kept]):
                return "other rows"
        order = rng.permutation(size)
        if not _close(concrete(tf.constant(x[order])).numpy(), y[order]):
            return "place"
        if not alone:
            continue
        each = np.concatenate([concrete(tf.constant(x[i : i + 1])).numpy() for i in range(size)])
        if not _close(each, y):
            return "number of rows"
    return None


def _close(a, b):
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
