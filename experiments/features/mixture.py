"""Gaussian mixtures that stand for features of a backbone, made from a seed alone."""

import numpy as np


def mixture(count, dimension=768, num_classes=100, seed=0, separation=0.5):
    """Features of norm one, float32 `[count, dimension]`, and labels `[count]`.

    As of a trained network, the variance falls as 1/i over the directions i, and classes differ in
    the first `num_classes - 1` of them: there their means have `separation` times the standard
    deviation within a class. The directions are rotated at random, the same for every seed.

    Args:
        count: Int.
        dimension: Int.
        num_classes: Int.
        seed: Int, of the examples; classes are the same for all.
        separation: Float.
    """
    classes, examples = np.random.default_rng(20_220_428), np.random.default_rng([seed, 1])
    scales = (1.0 + np.arange(dimension)) ** -0.5
    means = separation * scales * classes.normal(size=(num_classes, dimension))
    means[:, num_classes - 1 :] = 0.0
    turn = np.linalg.qr(classes.normal(size=(dimension, dimension)))[0].astype("float32")
    labels = examples.integers(0, num_classes, count)
    features = np.empty([count, dimension], "float32")
    for start in range(0, count, 4096):
        part = slice(start, start + 4096)
        y = labels[part]
        x = means[y] + scales * examples.standard_normal((len(y), dimension))
        features[part] = x.astype("float32") @ turn
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features, labels
