"""One example more or less moves no release by more than its noise is scaled for."""

import math

import hypothesis
import numpy as np
import pytest
import transcripts
from hypothesis import strategies as st

from tfdpx.heads import FeatureCovariance, FirstOrder, LeastSquares, Newton, _class_moments, _moments
from tfdpx.heads._feature_source import Examples
from tfdpx.heads._gradients import Gradients

EPSILON, DELTA, CLASSES, WIDTH = 1.0, 1e-5, 4, 5
CLIP = 0.5


def make(kind, **kwargs):
    arguments = dict(l2_norm_clip=CLIP, seed=1, **kwargs)
    return lambda: kind(CLASSES, EPSILON, DELTA, **arguments)


HEADS = {
    "least squares": make(LeastSquares),
    "several positives": make(LeastSquares, max_positives=3),
    "covariance": make(FeatureCovariance, steps=3),
    "share": make(FeatureCovariance, steps=3, covariance_share=0.5, feature_norm_clip=2.0),
    "start": make(FeatureCovariance, steps=2, start="least_squares"),
    "newton": make(Newton, steps=2),
    "sgd": make(FirstOrder, steps=3, optimizer="sgd"),
    "adam": make(FirstOrder, steps=3),
}


def examples(seed=0, count=40):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, WIDTH)).astype("float32")
    return x, np.eye(CLASSES)[rng.integers(0, CLASSES, count)]


def with_one_more(data, row, labels):
    x, y = data
    return np.vstack([x, np.float32(row)[None]]), np.vstack([y, labels[None]])


def large(name):
    """An example that uses what the budget allows: long, and with all positives that count."""
    positives = 3 if name == "several positives" else 1
    return np.full(WIDTH, 1e3), np.arange(CLASSES) < positives


@pytest.mark.parametrize("name", HEADS)
def test_a_large_example_spends_no_more_than_epsilon(monkeypatch, name):
    row, labels = large(name)
    without, extended = (with_one_more(examples(), r, labels) for r in (0 * row, row))
    mus, epsilon = transcripts.spent(monkeypatch, HEADS[name], without, extended)
    assert epsilon <= EPSILON
    planned = HEADS[name]()._planned()
    for (release, _), mu in mus.items():
        assert mu <= 1 / planned[release][0]
    if name in ("least squares", "several positives"):  # Gradients may be small at some weights.
        assert epsilon > 0.99 * EPSILON


ODD = [0.0, 1e-30, 1e20, 3e38, np.inf, -np.inf, np.nan]
rows = st.lists(
    st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from(ODD)), min_size=WIDTH, max_size=WIDTH
)


@hypothesis.given(row=rows)
def test_no_row_is_longer_than_the_clip(row):
    row = np.array([row], "float32")
    clipped = _moments.ClippedRows(CLIP)(row)
    assert np.linalg.norm(clipped) <= CLIP
    with np.errstate(over="ignore"):
        square = np.sum(np.square(row))
    if not np.isfinite(square):
        assert not clipped.any()
    elif square < 0.9 * CLIP**2:
        np.testing.assert_array_equal(clipped, row)


def test_no_gradient_is_longer_than_the_clip():
    x, y = np.ones([3, WIDTH], "float32"), np.eye(CLASSES)[:3]
    kinds = {clip: Gradients(Examples(x, y, CLASSES), CLASSES, CLIP, clip=clip, use_bias=bias)
             for clip, bias in (("gradients", True), ("features", False))}  # fmt: skip

    @hypothesis.given(row=rows, scale=st.sampled_from([0.0, 1.0, 1e4, 1e38]))
    def moves(row, scale):
        weights = (
            scale * np.random.default_rng(0).normal(size=(WIDTH, CLASSES)),
            np.full(CLASSES, -9),
        )
        for clip, gradients in kinds.items():
            x[2] = 0.0
            before = gradients.sums(*weights)
            x[2] = row
            after = gradients.sums(*weights)
            change = math.sqrt(
                sum(np.sum((a - b) ** 2) for a, b in zip(after, before, strict=True))
            )
            assert change <= CLIP * (1.0 if clip == "gradients" else math.sqrt(CLASSES))

    moves()


@pytest.mark.parametrize("name", HEADS)
def test_a_row_that_is_not_finite_changes_nothing(monkeypatch, name):
    data, label = examples(count=10), np.eye(CLASSES)[0]
    # The number of examples is public: its neighbour has a row of zeros.
    without, unfit = (with_one_more(data, np.full(WIDTH, v), label) for v in (0.0, np.nan))
    mus, _ = transcripts.spent(monkeypatch, HEADS[name], without, unfit)
    assert max(mus.values()) < 1e-9


def planted(monkeypatch, name):
    """What the head really spends with a bug in place."""
    data, (row, labels) = examples(), large(name)
    without, extended = (with_one_more(data, r, labels) for r in (0 * row, row))
    return transcripts.spent(monkeypatch, HEADS[name], without, extended)[1]


@pytest.mark.parametrize("name", ["least squares", "covariance", "start", "newton"])
def test_features_that_are_not_clipped_are_noticed(monkeypatch, name):
    monkeypatch.setattr(_moments.ClippedRows, "__call__", lambda self, x: x.astype("float64"))
    assert planted(monkeypatch, name) > 2 * EPSILON


@pytest.mark.parametrize("name", ["covariance", "newton", "sgd", "adam"])
def test_gradients_that_are_not_clipped_are_noticed(monkeypatch, name):
    monkeypatch.setattr(Gradients, "_factors", lambda self, squares: 0 * squares + 1.0)
    assert planted(monkeypatch, name) > 2 * EPSILON


def test_class_moments_without_the_root_of_k_are_noticed(monkeypatch):
    class NoRoot:
        @staticmethod
        def sqrt(_):
            return 1.0

    monkeypatch.setattr(_class_moments, "math", NoRoot)
    assert planted(monkeypatch, "several positives") > 1.2 * EPSILON


def test_a_covariance_released_twice_is_refused_or_noticed(monkeypatch):
    class Twice(FeatureCovariance):
        def _fit(self, examples, released):
            for _ in range(2):
                covariance = _moments.second_moment(examples, self.feature_norm_clip)
                released.symmetric("covariance", covariance, self.feature_norm_clip**2)
            return super()._fit(examples, released)

    with pytest.raises(RuntimeError, match="'covariance' was released 1 times"):
        make(Twice, steps=3)().fit(*examples())

    class Planned(Twice):
        def _planned(self):
            planned = super()._planned()
            return {**planned, "covariance": (planned["covariance"][0], 3)}

    monkeypatch.setitem(HEADS, "twice", make(Planned, steps=3))
    assert planted(monkeypatch, "twice") > 1.15 * EPSILON
    head = make(Planned, steps=3)().fit(*examples())
    assert head.epsilon_spent() > 1.15 * EPSILON  # The ledger tells of it.
