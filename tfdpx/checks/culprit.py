"""Finds which operation of a model lets one example influence another."""

import tensorflow as tf

from tfdpx import keras_internals
from tfdpx.checks.closeness import close, same_rows
from tfdpx.per_example.layout import restored
from tfdpx.per_example.rows import Rows

# Batches of other sizes and orders are rounded otherwise.
_TOLERANCE = 1e-4


def find_mixing_operation(model, first, second, rows):
    """Names the innermost operation that gives other results for rows that two batches share.

    Args:
        model: A built `keras.Model` whose examples mix.
        first: Nest of eager tensors [n, ...].
        second: Nest of eager tensors [m, ...].
        rows: Pair of int [shared], where the shared rows stand in `first` and in `second`.

    Returns:
        A phrase such as "Layer 'batch_mean' (of type BatchMean)". The model itself, if the mixing
        happens in its `call` and in no operation that Keras sees.
    """
    traces = []
    for x in (first, second):
        with (
            keras_internals.recording(_Trace()) as trace,
            restored(keras_internals.seed_states(model)),
        ):
            keras_internals.call_model(model, x)
        traces.append(trace.finished)
    counts = [Rows(x).count for x in (first, second)]
    for (operation, *a), (other, *b) in zip(*traces, strict=False):
        if operation is not other:
            break
        before, after = (_agree(u, v, counts, rows) for u, v in zip(a, b, strict=True))
        if before and not after:
            return f"Layer '{operation.name}' (of type {type(operation).__name__})"
    return f"Model '{model.name}' (of type {type(model).__name__})"


class _Trace:
    """A recorder that keeps every call, innermost first."""

    def __init__(self):
        self.finished = []

    def observe(self, operation, args, kwargs):
        outputs = keras_internals.call_operation(operation, args, kwargs)
        self.finished.append((operation, (args, kwargs), outputs))
        return outputs


def _agree(first, second, counts, rows):
    """Whether two nests agree in the shared rows, and wherever there is no batch axis."""
    leaves = [[t for t in tf.nest.flatten(n) if _is_eager(t)] for n in (first, second)]
    if len(leaves[0]) != len(leaves[1]):
        return False
    for a, b in zip(*leaves, strict=True):
        if a.shape[:1] == [counts[0]] and b.shape[:1] == [counts[1]]:
            if not same_rows(a, b, rows, _TOLERANCE):
                return False
        elif a.shape != b.shape or not close(a, b):
            return False
    return True


def _is_eager(leaf):
    return tf.is_tensor(leaf) and hasattr(leaf, "numpy")
