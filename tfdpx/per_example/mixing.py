"""Finds which operation of a model lets one example influence another."""

import numpy as np
import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.per_example.rows import Rows


def find_mixing_operation(model, x):
    """Names the innermost operation whose output for a row changes when the row comes alone.

    Args:
        model: A built `keras.Model` whose examples mix.
        x: Nest of eager tensors [rows, ...].

    Returns:
        A phrase such as "Layer 'batch_mean' (of type BatchMean)". The model itself, if the mixing
        happens in its `call` and in no operation that Keras sees.
    """
    trace = _Trace()
    with keras_hook.recording(trace):
        keras_hook.call_model(model, x)
    count = Rows(x).count
    for operation, args, kwargs, outputs in trace.finished:
        if _mixes(operation, args, kwargs, outputs, count):
            return f"Layer '{operation.name}' (of type {type(operation).__name__})"
    return f"Model '{model.name}' (of type {type(model).__name__})"


class _Trace:
    """A recorder that keeps every call, innermost first."""

    def __init__(self):
        self.finished = []

    def observe(self, operation, args, kwargs):
        outputs = keras_hook.call_operation(operation, args, kwargs)
        self.finished.append((operation, args, kwargs, outputs))
        return outputs


def _mixes(operation, args, kwargs, outputs, count):
    leaves = tf.nest.flatten((args, kwargs))
    batched = [tf.is_tensor(t) and t.shape[:1] == [count] for t in leaves]
    rows = Rows((args, kwargs), batched)
    whole = [t for t in tf.nest.flatten(outputs) if tf.is_tensor(t) and t.shape[:1] == [count]]
    if not rows.tensors:
        return False
    row_args, row_kwargs = rows.map(lambda t: t[:1])
    with keras_hook.recording(None):
        alone = tf.nest.flatten(keras_hook.call_operation(operation, row_args, row_kwargs))
    alone = [t for t in alone if tf.is_tensor(t) and t.shape[:1] == [1]]
    if len(alone) != len(whole):
        # A batch axis that went away was summed over.
        return True
    return not all(
        np.allclose(tf.cast(w[:1], "float64"), tf.cast(a, "float64"), rtol=1e-3, atol=1e-5)
        for w, a in zip(whole, alone, strict=True)
    )
