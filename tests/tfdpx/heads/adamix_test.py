"""AdaMix against its algorithm written out, and refusals."""

import head_cases
import numpy as np
import pytest
import tensorflow as tf
from head_cases import CLASSES, PUBLIC, WIDTH
from scipy.special import softmax

from tfdpx.heads import AdaMix
from tfdpx.heads.adamix import PublicSet
from tfdpx.heads.releases import Releases

PRIVATE = head_cases.data(60)


def fitted(**arguments):
    return AdaMix(CLASSES, **arguments).fit(*PRIVATE, public_data=PUBLIC)


def public_minimum():
    return PublicSet.of(PUBLIC, CLASSES).minimum(0.1, np.zeros([WIDTH, CLASSES]))


def written_out(head, y):
    """Computes Algorithm 2 without noise, in NumPy and as the paper prints it: sums, not means."""
    x, (px, py) = PRIVATE[0], PUBLIC
    start = w = public_minimum()
    py = np.eye(CLASSES)[py]
    for _ in range(head.steps):
        gradients = [np.outer(a, r) for a, r in zip(px, softmax(px @ w, axis=1) - py, strict=True)]
        public, clip = np.sum(gradients, axis=0), head.l2_norm_clip
        if clip is None:
            clip = np.quantile([np.linalg.norm(g) for g in gradients], 0.9)
        left = np.linalg.svd(public)[0][:, : head.projection or WIDTH]
        total = 0.0
        for a, r in zip(x, softmax(x @ w, axis=1) - y, strict=True):
            g = np.outer(a, r)
            total = total + left.T @ (g * min(1, clip / np.linalg.norm(g)))
        rate = head.learning_rate / (len(x) + len(px))
        decay = 0.1 * (w - start if head.decay_to == "start" else w)
        w = w - rate * (public + left @ total + decay)
    return w


@pytest.mark.parametrize(
    ("clip", "projection", "decay_to", "smoothing"),
    [
        (None, None, "start", 0.0),
        (0.3, None, "zero", 0.0),
        (None, 2, "zero", 0.4),
        (0.3, 2, "start", 0.4),
    ],
)
def test_the_algorithm_written_out(monkeypatch, clip, projection, decay_to, smoothing):
    y = np.float32((1 - smoothing) * np.eye(CLASSES)[PRIVATE[1]] + smoothing / CLASSES)
    monkeypatch.setattr(Releases, "_noise", lambda self, shape, deviation: np.zeros(shape))
    arguments = dict(l2_norm_clip=clip, projection=projection, decay_to=decay_to)
    head = AdaMix(CLASSES, steps=5, learning_rate=3.0, **arguments)
    head.fit(PRIVATE[0], y, public_data=tf.data.Dataset.from_tensor_slices(PUBLIC).batch(3))
    # The clip leaves 0.01% for rounding.
    np.testing.assert_allclose(head.kernel, written_out(head, y), atol=1e-3)
    assert not head.bias.any()


def test_noise_is_that_of_the_clip_and_lies_in_the_subspace(monkeypatch):
    deviations, clips = [], []
    draw, quantile = Releases._noise, PublicSet.quantile_clip

    def noise(self, shape, deviation):
        deviations.append((shape, deviation))
        return draw(self, shape, deviation)

    monkeypatch.setattr(Releases, "_noise", noise)
    monkeypatch.setattr(
        PublicSet, "quantile_clip", lambda *args: clips.append(quantile(*args)) or clips[-1]
    )
    # The gradient of a softmax has the rank of one class less.
    for projection, rows in ((2, 2), (CLASSES, CLASSES - 1), (None, WIDTH)):
        deviations.clear(), clips.clear()
        head = fitted(steps=3, projection=projection, seed=1)
        assert deviations == [((rows, CLASSES), pytest.approx(20.0 * clip)) for clip in clips]
        assert len(clips) == 3 and head._sizes(WIDTH) == {"gradient": rows * CLASSES}


def test_where_it_starts():
    kernel = public_minimum()
    x, y = PUBLIC[0].astype("float64"), np.eye(CLASSES)[PUBLIC[1]]
    slope = x.T @ (softmax(x @ kernel, axis=1) - y) + 0.1 * kernel
    np.testing.assert_allclose(slope, 0.0, atol=1e-4)
    arguments = dict(steps=1, learning_rate=1e-9)
    np.testing.assert_allclose(fitted(**arguments).kernel, kernel, atol=1e-5)
    weights = np.random.default_rng(2).normal(size=(WIDTH, CLASSES))
    for start in (weights, None):
        head = AdaMix(CLASSES, initial_weights=start, l2_norm_clip=1.0, **arguments).fit(*PRIVATE)
        np.testing.assert_allclose(head.kernel, 0.0 if start is None else start, atol=1e-5)


UNFIT = PUBLIC[0].copy()
UNFIT[3, 2] = np.nan


@pytest.mark.parametrize(
    ("public", "arguments", "message"),
    [
        (None, {}, "`public_data` is missing.*l2_norm_clip=None, projection=None"),
        (None, dict(l2_norm_clip=1.0, projection=2), "`public_data` is missing.*projection=2"),
        ((UNFIT, PUBLIC[1]), {}, "Received: 1 rows that are not finite"),
        ((PUBLIC[0][:0], PUBLIC[1][:0]), {}, "takes 1 to"),
        ((PUBLIC[0], PUBLIC[1], None), {}, "Received: 3 parts"),
        ((PUBLIC[0], None), {}, "`labels` is required"),
        ((PUBLIC[0], np.zeros([8, CLASSES])), {}, "`public_data` must.*8 examples with other sums"),
        ((PUBLIC[0][:, :3], PUBLIC[1]), {}, "must have the same width. Received: 6 and 3"),
        (PUBLIC, dict(initial_weights=np.ones([WIDTH, 2])), r"have the shape \[6, 4\]"),
    ],
)
def test_public_data_that_are_refused(public, arguments, message):
    head = AdaMix(CLASSES, 1.0, **arguments)
    with pytest.raises(ValueError, match=message):
        head.fit(*PRIVATE, public_data=public)
    assert head.ledger.steps == 0 and head.kernel is None
