"""AdaMix against its algorithm written out, and refusals."""

import math

import head_cases
import numpy as np
import pytest
import tensorflow as tf
from head_cases import CLASSES, PUBLIC, WIDTH
from scipy.special import softmax

import tfdpx
from tfdpx.heads.adamix import PublicSet
from tfdpx.heads.releases import Releases

PRIVATE = head_cases.data(60)


def fitted(head):
    return head.fit(*PRIVATE, public_data=PUBLIC)


def public_minimum():
    return PublicSet.of(PUBLIC, CLASSES).minimum(0.1, np.zeros([WIDTH, CLASSES]))


def written_out(head):
    """Algorithm 2 without noise, in NumPy and as the paper prints it: sums, not means."""
    (x, y), (px, py) = PRIVATE, PUBLIC
    start = w = public_minimum()
    y, py = np.eye(CLASSES)[y], np.eye(CLASSES)[py]
    for _ in range(head.steps):
        each = [np.outer(a, r) for a, r in zip(px, softmax(px @ w, axis=1) - py, strict=True)]
        public, clip = np.sum(each, axis=0), head.l2_norm_clip
        if clip is None:
            clip = np.quantile([np.linalg.norm(g) for g in each], 0.9)
        left = np.linalg.svd(public)[0][:, : head.projection or WIDTH]
        total = 0.0
        for a, r in zip(x, softmax(x @ w, axis=1) - y, strict=True):
            g = np.outer(a, r)
            total = total + left.T @ (g * min(1, clip / np.linalg.norm(g)))
        rate = head.learning_rate / (len(x) + len(px))
        w = w - rate * (public + left @ total + 0.1 * (w - start))
    return w


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("projection", [None, 2])
def test_the_algorithm_written_out(monkeypatch, clip, projection):
    monkeypatch.setattr(Releases, "_noise", lambda self, shape, deviation: np.zeros(shape))
    head = tfdpx.heads.AdaMix(
        CLASSES, steps=5, learning_rate=3.0, l2_norm_clip=clip, projection=projection
    )
    # The clip leaves 0.01% to rounding.
    np.testing.assert_allclose(fitted(head).kernel, written_out(head), atol=1e-3)
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
    fitted(tfdpx.heads.AdaMix(CLASSES, steps=3, projection=2, seed=1))
    assert deviations == [((2, CLASSES), pytest.approx(20.0 * clip)) for clip in clips]
    assert len(clips) == 3


def test_it_starts_at_the_minimum_over_the_public_examples():
    kernel = public_minimum()
    x, y = PUBLIC[0].astype("float64"), np.eye(CLASSES)[PUBLIC[1]]
    slope = x.T @ (softmax(x @ kernel, axis=1) - y) + 0.1 * kernel
    np.testing.assert_allclose(slope, 0.0, atol=1e-4)
    head = fitted(tfdpx.heads.AdaMix(CLASSES, steps=1, learning_rate=1e-9))
    np.testing.assert_allclose(head.kernel, kernel, atol=1e-5)


def test_without_public_data_it_starts_at_the_initial_weights():
    weights = np.random.default_rng(2).normal(size=(WIDTH, CLASSES))
    arguments = dict(steps=1, learning_rate=1e-9, l2_norm_clip=1.0)
    head = tfdpx.heads.AdaMix(CLASSES, initial_weights=weights, **arguments).fit(*PRIVATE)
    np.testing.assert_allclose(head.kernel, weights, atol=1e-5)
    assert not tfdpx.heads.AdaMix(CLASSES, **arguments).fit(*PRIVATE).kernel.round(5).any()


def test_a_dataset_of_public_data_gives_what_arrays_give():
    arrays = fitted(tfdpx.heads.AdaMix(CLASSES, steps=3, seed=1))
    public = tf.data.Dataset.from_tensor_slices(PUBLIC).batch(3)
    dataset = tfdpx.heads.AdaMix(CLASSES, steps=3, seed=1).fit(*PRIVATE, public_data=public)
    np.testing.assert_array_equal(arrays.kernel, dataset.kernel)


def test_initial_weights_are_in_the_config():
    head = tfdpx.heads.AdaMix(CLASSES, 1.0, projection=2, initial_weights=np.ones([WIDTH, CLASSES]))
    copy = tfdpx.heads.AdaMix.from_config(head.get_config())
    assert copy.get_config() == head.get_config()
    np.testing.assert_array_equal(copy.initial_weights, head.initial_weights)
    assert "initial_weights" not in repr(head)


def test_the_statement_says_whom_it_leaves_out():
    said = tfdpx.heads.AdaMix(CLASSES, 1.0).statement(60, 8)
    assert "(0.9858, 1e-05)-differentially private for the 60 private examples" in said
    assert "The 8 public examples get no guarantee" in said
    private = tfdpx.heads.AdaMix(CLASSES, 1.0, seed=3, l2_norm_clip=1.0).statement(68)
    assert "68 private examples" in private and "public" not in private
    assert "do not release the weights" in private


UNFIT = PUBLIC[0].copy()
UNFIT[3, 2] = np.nan


@pytest.mark.parametrize(
    ("public", "message"),
    [
        (None, "`public_data` is missing.*l2_norm_clip=None, projection=None"),
        ((UNFIT, PUBLIC[1]), "Received: 1 rows that are not finite"),
        ((PUBLIC[0][:0], PUBLIC[1][:0]), "takes 1 to"),
        ((PUBLIC[0], PUBLIC[1], None), "Received: 3 parts"),
        ((PUBLIC[0], None), "`labels` must be given"),
        ((PUBLIC[0], np.zeros([8, CLASSES])), "8 examples with none or several"),
        ((PUBLIC[0][:, :3], PUBLIC[1]), "must have one width. Received: 6 and 3"),
    ],
)
def test_public_data_that_are_refused(public, message):
    head = tfdpx.heads.AdaMix(CLASSES, 1.0)
    with pytest.raises(ValueError, match=message):
        head.fit(*PRIVATE, public_data=public)
    assert head.ledger.steps == 0 and head.kernel is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `epsilon` and `steps`"),
        ({"epsilon": 1.0, "steps": 3}, "Exactly one of `epsilon` and `steps`"),
        ({"epsilon": math.inf}, "`epsilon` must be a positive, finite"),
        ({"epsilon": 1.0, "noise_multiplier": 0.0}, "`noise_multiplier` must be a positive"),
        ({"epsilon": 1e-3}, "No `steps` keeps within the target"),
        ({"epsilon": 1.0, "quantile": 0.0}, "`quantile` must lie in"),
        ({"epsilon": 1.0, "quantile": 90}, "`quantile` must lie in"),
        ({"epsilon": 1.0, "projection": 0}, "`projection`"),
        ({"epsilon": 1.0, "l2_norm_clip": math.inf}, "must be finite"),
        ({"epsilon": 1.0, "initial_weights": np.ones(3)}, "`initial_weights`"),
        ({"epsilon": 1.0, "l2_regularization": 0.0}, "`l2_regularization`"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.heads.AdaMix(CLASSES, **arguments)


def test_a_projection_needs_public_data_and_initial_weights_the_shape_of_the_kernel():
    with pytest.raises(ValueError, match="`public_data` is missing.*projection=2"):
        tfdpx.heads.AdaMix(CLASSES, 1.0, l2_norm_clip=1.0, projection=2).fit(*PRIVATE)
    with pytest.raises(ValueError, match=r"have the shape \[6, 4\]"):
        fitted(tfdpx.heads.AdaMix(CLASSES, 1.0, initial_weights=np.ones([WIDTH, 2])))
