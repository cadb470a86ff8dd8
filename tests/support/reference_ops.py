"""The operations of the residual networks, written again from the papers in float64."""

import numpy as np
import tensorflow as tf


def randomized_weights(model, seed=0):
    """Randomizes all weights of `model`: none is neutral; returns {path: float64 array}."""
    rng = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        shape = tuple(weight.shape)
        if weight.name in ("gamma", "gain"):
            value = rng.uniform(0.5, 1.5, size=shape)
        else:
            fan_in = max(np.prod(shape[:-1]), 1.0) if len(shape) > 1 else 10.0
            value = rng.normal(size=shape) / np.sqrt(fan_in)
        weight.assign(value)
    return {weight.path: np.asarray(weight, "float64") for weight in model.weights}


def standardized(kernel):
    """Returns `(w - mean) / (std * sqrt(fan_in))` for each filter (De et al. 2022, C.1)."""
    fan_in = np.prod(kernel.shape[:-1])
    filters = kernel.reshape(fan_in, -1)
    filters = (filters - filters.mean(axis=0)) / (filters.std(axis=0) * np.sqrt(fan_in))
    return filters.reshape(kernel.shape)


def convolve(x, kernel, strides=1):
    """Convolves with zero padding that keeps the size, less the strides."""
    return tf.nn.conv2d(x, kernel, strides, "SAME").numpy()


def group_norm(x, groups, gamma, beta, epsilon=1e-3):
    """Normalizes each example and group of neighbouring channels separately (Wu & He, 2018)."""
    batch, height, width, channels = x.shape
    split = x.reshape(batch, height * width, groups, channels // groups)
    split = split - split.mean(axis=(1, 3), keepdims=True)
    split = split / np.sqrt(np.square(split).mean(axis=(1, 3), keepdims=True) + epsilon)
    return split.reshape(x.shape) * gamma + beta


def relu(x):
    """Returns `max(x, 0)`."""
    return np.maximum(x, 0.0)


def assert_close(actual, wanted, tolerance=1e-4):
    """Fails unless float32 results equal float64 ones, relative to the largest of these."""
    np.testing.assert_allclose(actual, wanted, atol=tolerance * np.abs(wanted).max(), rtol=0)
