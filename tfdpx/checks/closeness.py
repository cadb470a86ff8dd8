"""When two tensors count as equal."""

import numpy as np
import tensorflow as tf

from tfdpx import keras_internals

_HALVES = (tf.float16, tf.bfloat16)


def close(a, b, full_precision=True):
    """Whether `a` and `b` agree to what batches of different sizes round differently.

    Args:
        a: Eager tensor.
        b: Eager tensor.
        full_precision: Bool, whether no layer before them computes in 16 bits.
    """
    if not a.dtype.is_floating:
        return np.array_equal(a, b)
    tolerance = 1e-3 if full_precision and a.dtype not in _HALVES else 2e-2
    a, b = np.asarray(tf.cast(a, "float64")), np.asarray(tf.cast(b, "float64"))
    if a.shape != b.shape:
        return False
    scale = np.abs(b).max(initial=0.0, where=np.isfinite(b))
    return np.allclose(a, b, rtol=tolerance, atol=tolerance * (scale + 1e-6), equal_nan=True)


def same_rows(a, b, places, tolerance):
    """Whether rows of `a` and `b` agree one by one, as one kernel gives them on equal shapes.

    Args:
        a: Eager tensor [n, ...].
        b: Eager tensor [m, ...].
        places: Pair of int [shared], where the rows stand in `a` and in `b`.
        tolerance: Float, of single precision, relative to the largest entry of a row.
    """
    if a.shape[1:] != b.shape[1:]:
        return False
    # NumPy, since fingerprints are many and small.
    dtype, (a, b) = a.dtype, (t.numpy()[rows] for t, rows in zip((a, b), places, strict=True))
    if not dtype.is_floating:
        return np.array_equal(a, b)
    if dtype in _HALVES:
        tolerance = max(tolerance, 2e-2)
    a, b = (array.astype("float32").reshape([len(array), -1]) for array in (a, b))
    finite = np.isfinite(a)
    scale = np.abs(a).max(axis=1, keepdims=True, initial=0.0, where=finite)
    with np.errstate(invalid="ignore", over="ignore"):
        near = np.abs(a - b) <= tolerance * scale
    return bool(np.where(finite, near, ~np.isfinite(b)).all())


def is_full_precision(model):
    """Whether no layer of `model` computes in 16 bits."""
    return all(
        layer.compute_dtype not in ("float16", "bfloat16")
        for layer in keras_internals.flatten_layers(model)
    )
