"""One private example moves no release by more than its clip, and decides no clip or subspace."""

import hypothesis
import numpy as np
import pytest
import transcripts
from hypothesis import strategies as st

import tfdpx
from tfdpx.accounting.full_batch import exact_epsilon
from tfdpx.heads import adamix_training
from tfdpx.heads._feature_source import Examples
from tfdpx.heads.public_set import PublicSet
from tfdpx.heads.softmax_gradients import SoftmaxGradients
from tfdpx.sampling import overlap

CLASSES, WIDTH, EPSILON, DELTA = 4, 6, 0.5, 1e-5
LARGE = np.full(WIDTH, 1e3, "float32"), 1


def data(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    x = 0.5 * rng.normal(size=(count, WIDTH)) + np.eye(WIDTH)[labels]
    return x.astype("float32"), labels


PUBLIC = data(8, 1)


class Mixed:
    """A head with its public data, as `transcripts` wants one."""

    made = []

    def __init__(self, kind=tfdpx.AdaMix, public=PUBLIC, **kwargs):
        self.head, self.public, self.delta = kind(CLASSES, EPSILON, seed=1, **kwargs), public, DELTA
        self.made.append(self.head)

    def fit(self, *private):
        return self.head.fit(*private, public_data=self.public)


KINDS = {
    "adamix": {},
    "projected": {"projection": 2},
    "zero": {"start": "initial", "projection": 3, "decay_to": "zero", "average": True},
    "ngd": {"kind": tfdpx.AdaMix.ngd},
    "ppgd": {"kind": tfdpx.AdaMix.ppgd},
    "fully_private": {"kind": tfdpx.AdaMix.fully_private},
}


def neighbours(row, label):
    """The number of examples is public: a neighbour has a row of zeros."""
    x, y = data(30, 0)
    with_row = lambda r: (np.vstack([x, np.float32(r)[None]]), np.append(y, label))  # noqa: E731
    return with_row(np.zeros(WIDTH)), with_row(row)


def spent(monkeypatch, row, label, **kwargs):
    """`(mus, epsilon)` of two neighbours; an error if clips or subspaces tell them apart."""
    Mixed.made.clear()
    found = transcripts.spent(
        monkeypatch, lambda: Mixed(keep_steps=True, **kwargs), *neighbours(row, label)
    )
    first, second = (head._kept for head in Mixed.made[:2])
    for one, other in zip(first, second, strict=True):
        assert one.l2_norm_clip == other.l2_norm_clip, "The clip follows the private data."
        same = np.array_equal(one.subspace, other.subspace)
        assert one.subspace is None or same, "The subspace follows the private data."
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_large_example_spends_no_more_than_epsilon(monkeypatch, name):
    mus, epsilon = spent(monkeypatch, *LARGE, **KINDS[name])
    assert epsilon <= EPSILON
    assert 0.2 / 20 < max(mus.values()) <= 1 / 20


def test_an_added_public_example_is_protected_where_all_are_private(monkeypatch):
    made = iter([PUBLIC, (np.vstack([PUBLIC[0][:-1], 1e3 * PUBLIC[0][-1:]]), PUBLIC[1])])
    private = data(30, 0)
    mus, epsilon = transcripts.spent(
        monkeypatch,
        lambda: Mixed(tfdpx.AdaMix.fully_private, next(made, PUBLIC)),
        private,
        private,
    )
    # Its row changed, which is one removed and one added.
    assert max(mus.values()) <= 2 / 20


@hypothesis.given(
    row=st.lists(
        st.one_of(
            st.floats(-1e3, 1e3, width=32),
            st.sampled_from([0.0, 1e-30, 1e20, 3e38, np.inf, np.nan]),
        ),
        min_size=WIDTH,
        max_size=WIDTH,
    ),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
    clip=st.sampled_from([1e-6, 1e-3, 0.5, 7.0]),
)
def test_no_projected_sum_moves_by_more_than_its_clip(row, scale, clip):
    kernel = scale * np.random.default_rng(0).normal(size=(WIDTH, CLASSES)).astype("float32")
    EXAMPLE[:] = 0.0
    before = GRADIENTS.sum(kernel, clip)
    EXAMPLE[:] = row
    after = GRADIENTS.sum(kernel, clip)
    assert np.linalg.norm(after - before) <= clip
    subspace = PublicSet(PUBLIC, CLASSES).subspace(kernel, 2)
    assert np.linalg.norm(subspace, 2) <= 1.0
    assert np.linalg.norm(subspace.T @ after - subspace.T @ before) <= clip


X = data(3, 0)[0]
EXAMPLE = X[2]
GRADIENTS = SoftmaxGradients(Examples(X, data(3, 0)[1], CLASSES), CLASSES)


def test_gradients_that_are_not_clipped_are_noticed(monkeypatch):
    monkeypatch.setattr(SoftmaxGradients, "_factors", lambda self, squares: 0 * squares + 1.0)
    assert spent(monkeypatch, *LARGE)[1] > 2


def test_a_subspace_that_lengthens_is_noticed(monkeypatch):
    given = PublicSet.subspace
    monkeypatch.setattr(PublicSet, "subspace", lambda *args: 2.5 * given(*args))
    assert spent(monkeypatch, *LARGE, projection=2)[1] > EPSILON


def leaking(monkeypatch, part):
    """Plants a bug: this method of the public set answers for the private examples."""

    class Leaking(tfdpx.AdaMix):
        def fit(self, features, labels, public_data):
            self.leak = PublicSet((features, labels), CLASSES)
            return super().fit(features, labels, public_data=public_data)

    given, step = getattr(PublicSet, part), adamix_training.public_step
    leaks = []

    def public_step(head, public, kernel):
        leaks[:] = [head.leak]
        return step(head, public, kernel)

    monkeypatch.setattr(adamix_training, "public_step", public_step)
    monkeypatch.setattr(
        PublicSet, part, lambda self, *args: given(leaks[0] if leaks else self, *args)
    )
    return Leaking


@pytest.mark.parametrize(
    ("part", "clip", "said"),
    [
        ("quantile_clip", "public_quantile", "scale of the noise follows"),
        ("subspace", "fixed", "subspace follows the private"),
    ],
)
def test_a_clip_or_subspace_of_private_data_is_noticed(monkeypatch, part, clip, said):
    # Of unlike length and direction, but below the clip: it is the choice that tells.
    kind = leaking(monkeypatch, part)
    with pytest.raises(AssertionError, match=said):
        spent(monkeypatch, np.eye(WIDTH)[5] * 30, 2, kind=kind, projection=2, clip=clip)


@pytest.mark.parametrize("kwargs", [{}, {"projection": 2}, {"kind": tfdpx.AdaMix.ngd}])
def test_individual_epsilons_are_what_removing_an_example_shows(monkeypatch, kwargs):
    row, label = np.float32([0.2, 0.1, -0.3, 0.0, 0.1, 0.05]), 1
    mus, _ = spent(monkeypatch, row, label, **kwargs)
    _, (x, y) = neighbours(row, label)
    head = Mixed.made[0]
    epsilons = head.individual_epsilons(x, y)
    removed = exact_epsilon(np.sqrt(sum(mu**2 for mu in mus.values())), DELTA)
    # The clip leaves 0.2% to rounding, and the grid rounds up.
    assert epsilons[-1] == pytest.approx(removed, rel=0.01)
    assert epsilons[-1] < 0.9 * epsilons.max() <= head.epsilon_spent()
    assert head.individual_epsilons(np.zeros([1, WIDTH]), [0]) == 0.0


def test_individual_epsilons_need_the_steps():
    head = Mixed().fit(*data(30, 0))
    with pytest.raises(ValueError, match="`keep_steps` must be True"):
        head.individual_epsilons(*data(3, 0))


def test_overlap_is_found_whatever_the_last_bits():
    rng = np.random.default_rng(0)
    public, private = rng.normal(size=(40, 300)), rng.normal(size=(200, 300)).astype("float32")
    known = overlap.Fingerprints(public)
    assert known.count_in(private) == 0
    private[10:50] = public * (1 + 1e-7 * rng.normal(size=public.shape))
    assert known.count_in(private) >= 39
    assert known.count_in(np.zeros([3, 300])) == 0
    images = rng.integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    assert overlap.Fingerprints(images).count_in(images[1:3]) == 2
