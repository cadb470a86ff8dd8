"""Heads on small data, and what a test on replicas runs in a process of its own."""

import math

import numpy as np
import tensorflow as tf

from tfdpx.heads import FeatureCovariance, FirstOrder, LeastSquares, Newton

CLASSES, WIDTH, COUNT = 3, 6, 300
FREE = dict(num_classes=CLASSES, epsilon=math.inf, l2_norm_clip=math.inf)
PRIVATE = dict(num_classes=CLASSES, epsilon=1.0, l2_norm_clip=0.7, seed=2)
HEADS = {
    "ls": lambda **kwargs: LeastSquares(**PRIVATE, **kwargs),
    "fc": lambda **kwargs: FeatureCovariance(**PRIVATE, steps=3, start="least_squares", **kwargs),
    "newton": lambda **kwargs: Newton(**PRIVATE, steps=2, **kwargs),
    "first": lambda: FirstOrder(**PRIVATE, steps=3, optimizer="sgd"),
}


def data():
    """Features [300, 6] of three classes, and labels."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, CLASSES, COUNT)
    x = rng.normal(size=(COUNT, WIDTH)) + 2 * np.eye(CLASSES, WIDTH)[y]
    return x.astype("float32"), y


def heads():
    """Two replicas give what one device does, to rounding."""
    x, y = data()
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    assert len(devices) == 2
    for name in HEADS:
        expected = HEADS[name]().fit(x, y).kernel
        with tf.distribute.MirroredStrategy(devices).scope():
            found = HEADS[name]().fit(x, y).kernel
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
