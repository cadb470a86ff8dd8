"""Made-up batches, for what is learnt of a model by running it; no data are read."""

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example.rows import Rows


def probe_batch(model, specs, rows, seed=0):
    """Inputs of a model, a nest of tensors [rows, ...], in the ranges that its own will have.

    Floats are uniform in [0, 1]. Integers are pixels, 0 to 255, where a layer rescales or they have
    the axes of an image, else tokens 0 and 1. Where a layer looks tokens or texts up, they are of
    its vocabulary; other texts are "0" and "1". Axes of unknown length get 32.

    Args:
        model: A built `keras.Model`; None to know nothing of it.
        specs: Nest of which shapes and dtypes are read.
        rows: Int.
        seed: Int.
    """
    generator = np.random.default_rng(seed)
    layers = [] if model is None else layer_internals.flatten_layers(model)
    rescales = any(isinstance(layer, keras.layers.Rescaling) for layer in layers)
    words = _known(layers, keras.layers.StringLookup)
    tokens = _known(layers, keras.layers.IntegerLookup)

    def make(leaf):
        shape = [rows, *(32 if size is None else size for size in leaf.shape[1:])]
        if leaf.dtype == tf.string:
            return tf.constant(generator.choice(words or ["0", "1"], shape))
        if leaf.dtype.is_floating:
            return tf.constant(generator.uniform(size=shape), leaf.dtype)
        if tokens:
            return tf.cast(tf.constant(generator.choice(tokens, shape)), leaf.dtype)
        pixels = leaf.dtype in (tf.uint8, tf.int32, tf.int64) and (rescales or len(shape) == 4)
        highest = 256 if pixels or leaf.dtype == tf.uint8 and len(shape) > 2 else 2
        return tf.cast(tf.constant(generator.integers(0, highest, shape)), leaf.dtype)

    return Rows(specs).map(make)


def probe_targets(specs, rows):
    """As `probe_batch`, of targets and weights: valid classes, 0 and 1, and numbers in [0, 1]."""
    generator = np.random.default_rng(1)

    def make(leaf):
        shape = [rows, *(32 if size is None else size for size in leaf.shape[1:])]
        if leaf.dtype.is_floating:
            return tf.constant(generator.uniform(0.1, 1.0, size=shape), leaf.dtype)
        return tf.cast(tf.constant(generator.integers(0, 2, shape)), leaf.dtype)

    return Rows(specs).map(make)


def _known(layers, kind):
    """The vocabulary of the first of `layers` that is of a class, a list; empty if none is."""
    matching = [layer for layer in layers if isinstance(layer, kind)]
    return list(matching[0].get_vocabulary(include_special_tokens=False)) if matching else []
