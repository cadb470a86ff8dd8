"""Every head on small data, for tests that hold for each of `tfdpx.heads.__all__`."""

import math

import numpy as np

from tfdpx import heads

CLASSES, WIDTH, EPSILON, DELTA, CLIP = 4, 6, 1.0, 1e-5, 0.7
FREE = dict(num_classes=CLASSES, epsilon=math.inf, l2_norm_clip=math.inf)


def data(count=40, seed=0):
    """Draws features [count, WIDTH] around one corner for each class, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    x = rng.normal(size=(count, WIDTH)) + 2 * np.eye(CLASSES, WIDTH)[labels]
    return x.astype("float32"), labels


PUBLIC = data(8, 1)


class WithPublic(heads.AdaMix):
    """AdaMix with the same `fit` as the other heads."""

    def fit(self, features, labels=None, **arguments):
        """Calls `AdaMix.fit` with public data."""
        return super().fit(features, labels, **{"public_data": PUBLIC, **arguments})


# Head -> cases with different releases -> arguments. A head without cases fails the tests.
CASES = {
    "AdaMix": {
        "adamix": dict(noise_multiplier=8.0),
        "projected": dict(noise_multiplier=8.0, projection=2),
        "fixed clip": dict(noise_multiplier=8.0, l2_norm_clip=CLIP, learning_rate=4.0),
    },
    "FeatureCovariance": {
        "covariance": dict(steps=3),
        "share": dict(steps=3, covariance_share=0.5, feature_norm_clip=2.0),
        "start": dict(steps=2, start="least_squares"),
    },
    "FirstOrder": {
        "adam": dict(steps=4),
        "sgd": dict(steps=3, optimizer="sgd"),
        "momentum": dict(steps=3, optimizer="momentum"),
    },
    "LeastSquares": {"least squares": {}, "several positives": dict(max_positives=3)},
    "Newton": {"newton": dict(steps=2)},
}
NAMES = {name: head for head, cases in CASES.items() for name in cases}
FIRST = [next(iter(cases)) for cases in CASES.values()]


def make(name, **arguments):
    """Returns the head of a case, not fitted."""
    head = NAMES[name]
    kind = WithPublic if head == "AdaMix" else getattr(heads, head)
    clip = {} if head == "AdaMix" else {"l2_norm_clip": CLIP}
    return kind(CLASSES, EPSILON, DELTA, **{**clip, **CASES[head][name], **arguments})
