"""Batches of another kind than the plan's are named; true Poisson samples pass."""

import numpy as np
import pytest

import tfdpx
from tfdpx import audit

N, STEPS = 400, 60


def plan(**arguments):
    arguments = {
        "batch_size": 40,
        "steps": STEPS,
        "noise_multiplier": 1.0,
        "delta": 1e-5,
        **arguments,
    }
    return tfdpx.PrivacyPlan(N, **arguments)


def poisson(rng, q=0.1, steps=STEPS):
    return [(np.flatnonzero(rng.uniform(size=N) < q),) for _ in range(steps)]


def shuffled(rng, size=40, steps=STEPS):
    rows = np.concatenate([rng.permutation(N) for _ in range(1 + size * steps // N)])
    return [(rows[i * size : (i + 1) * size],) for i in range(steps)]


def random_subsets(rng):
    return [(rng.permutation(N)[:40],) for _ in range(STEPS)]


def shuffled_of_poisson_sizes(rng):
    rows = iter(np.concatenate([rng.permutation(N) for _ in range(9)]))
    return [(np.unique([next(rows) for _ in range(rng.binomial(N, 0.1))]),) for _ in range(STEPS)]


def blocks(rng):
    """Draws examples in blocks of ten."""
    return [(np.flatnonzero(np.repeat(rng.uniform(size=N // 10) < 0.1, 10)),) for _ in range(STEPS)]


def each_used_twice(rng):
    return [batch for batch in poisson(rng, steps=STEPS // 2) for _ in range(2)]


PLANTED = {
    "fixed batches of a permutation": (shuffled, "batch size varies too little"),
    "fixed random subsets": (random_subsets, "batch size varies too little"),
    "epochs": (shuffled_of_poisson_sizes, "draws of an example varies too little"),
    "blocks": (blocks, "batch size varies too much"),
    "each batch twice": (each_used_twice, "draws of an example varies too much"),
    "more often": (lambda rng: poisson(rng, 0.12), "with probability 0.1"),
    "an example twice": (
        lambda rng: [(np.append(ids, ids[0]),) for (ids,) in poisson(rng)],
        "repeat an example",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_fail(name):
    make, message = PLANTED[name]
    for seed in range(3):
        report = audit.check_sampling(plan(), make(np.random.default_rng(seed)))
        assert not report.passed and message in str(report), str(report)
        assert "FAILED" in str(report)


def test_batches_of_the_plan_pass_and_padding_does_not_count():
    ids = np.arange(N)
    report = audit.check_sampling(plan(), plan().batches(ids, ids, seed=0))
    assert report.passed and report.steps == STEPS and "PASSED" in str(report)
    unmasked = ((x, y) for x, y, _ in plan().batches(ids, ids, seed=0))
    assert not audit.check_sampling(plan(), unmasked).passed


def test_false_alarms_are_as_rare_as_stated():
    rng, failed = np.random.default_rng(0), 0
    for _ in range(100):
        failed += not audit.check_sampling(plan(), poisson(rng), confidence=0.9).passed
    assert failed < 19  # At most 10%: 19 or more of 100 have a probability of 0.2%.


def test_full_batches():
    whole = plan(batch_size=N)
    assert audit.check_sampling(whole, [(np.arange(N),)] * 3).passed
    assert not audit.check_sampling(whole, [(np.arange(N - 1),)] * 3).passed


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="does not claim Poisson"):
        audit.check_sampling(plan(sampling="shuffle"), shuffled(np.random.default_rng(0)))
    with pytest.raises(ValueError, match="at least one batch"):
        audit.check_sampling(plan(), [])
    for ids in (np.ones([4, 2], int), np.ones([4]), np.array([N])):
        with pytest.raises(ValueError, match="numbers of examples"):
            audit.check_sampling(plan(), [(ids,)])
    for name, value in dict(steps=0, confidence=1.0).items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            audit.check_sampling(plan(), poisson(np.random.default_rng(0)), **{name: value})
