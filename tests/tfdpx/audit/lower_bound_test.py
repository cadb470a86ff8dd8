"""Lower bounds are valid as often as promised, for known mechanisms, and are close to the truth."""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from tfdpx import audit
from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.audit import bounds

CONFIDENCE, RUNS = 0.9, 60


def cells(alpha, beta):
    """Returns each pair of error counts, of RUNS runs of each kind, with its probability."""
    counts = np.arange(RUNS + 1)
    first, second = stats.binom.pmf(counts, RUNS, alpha), stats.binom.pmf(counts, RUNS, beta)
    return [(i, j, first[i] * second[j]) for i in counts for j in counts]


def chance_of_too_high(bound, alpha, beta, epsilon, delta):
    """Returns the probability that the bound exceeds the true epsilon, by an exact sum."""
    return sum(
        chance
        for i, j, chance in cells(alpha, beta)
        if chance > 1e-9
        and bound(i.item(), RUNS, j.item(), RUNS, delta, CONFIDENCE) > epsilon + 1e-9
    )


def randomized_response(epsilon, delta):
    """Returns both error rates of the worst (epsilon, delta)-mechanism."""
    rate = (1 - delta) / (1 + math.exp(epsilon))
    return rate, rate


def gaussian(mu, shift=0.0):
    """Returns the error rates of a threshold at mu / 2 + shift."""
    return stats.norm.sf(mu / 2 + shift), stats.norm.cdf(shift - mu / 2)


@pytest.fixture(autouse=True)
def cached(monkeypatch):
    quick = functools.cache(bounds.clopper_pearson_upper_bound)
    monkeypatch.setattr(bounds, "clopper_pearson_upper_bound", quick)
    monkeypatch.setattr(bounds, "exact_epsilon", functools.cache(exact_epsilon))


@pytest.mark.parametrize("epsilon, delta", [(0.5, 0.01), (2.0, 1e-5)])
def test_the_bound_is_too_high_no_more_often_than_it_says(epsilon, delta):
    rates = randomized_response(epsilon, delta)
    chance = chance_of_too_high(audit.epsilon_lower_bound, *rates, epsilon, delta)
    assert chance <= 1 - CONFIDENCE


@pytest.mark.parametrize("mu, shift", [(1.0, 0.0), (2.0, 0.7)])
def test_the_gaussian_bound_is_too_high_no_more_often_than_it_says(mu, shift):
    rates, epsilon = gaussian(mu, shift), exact_epsilon(mu, 1e-3)
    for bound in (audit.gdp_epsilon_lower_bound, audit.epsilon_lower_bound):
        assert chance_of_too_high(bound, *rates, epsilon, 1e-3) <= 1 - CONFIDENCE


@pytest.mark.planted("a lower bound that is too high")
def test_a_bound_that_is_too_high_is_rejected(monkeypatch):
    rates, epsilon = gaussian(1.0), exact_epsilon(1.0, 1e-3)

    def check(bound):
        assert chance_of_too_high(bound, *rates, epsilon, 1e-3) <= 1 - CONFIDENCE

    def too_high(*arguments):
        return audit.gdp_epsilon_lower_bound(*arguments[:-1], 0.2)

    with pytest.raises(AssertionError):
        check(too_high)
    point = functools.cache(lambda errors, trials, confidence: max(errors, 0.5) / trials)
    monkeypatch.setattr(bounds, "clopper_pearson_upper_bound", point)
    with pytest.raises(AssertionError):
        check(audit.gdp_epsilon_lower_bound)


def test_clopper_pearson_is_the_bound_of_scipy():
    for errors, trials in ((0, 10), (3, 17), (499, 500), (5, 5)):
        high = stats.binomtest(errors, trials).proportion_ci(0.95, "exact").high
        assert bounds.clopper_pearson_upper_bound(errors, trials, 0.975) == pytest.approx(high)


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_many_runs_come_close(epsilon):
    runs, (rate, _) = 10**7, randomized_response(epsilon, 1e-5)
    counts = (round(rate * runs), runs, round(rate * runs), runs)
    assert 0.98 * epsilon < audit.epsilon_lower_bound(*counts, 1e-5) < epsilon
    mu = 2.0
    rate, _ = gaussian(mu)
    counts = (round(rate * runs), runs, round(rate * runs), runs)
    exact = exact_epsilon(mu, 1e-5)
    assert 0.99 * mu < bounds.gdp_mu_lower_bound(*counts) < mu
    assert 0.98 * exact < audit.gdp_epsilon_lower_bound(*counts, 1e-5) < exact
    # The bound gains much when it uses the shape of the noise.
    assert audit.epsilon_lower_bound(*counts, 1e-5) < 0.3 * exact


def test_guesses_prove_nothing():
    counts = (500, 1000, 500, 1000)
    assert audit.epsilon_lower_bound(*counts, 1e-5) == 0.0
    assert audit.gdp_epsilon_lower_bound(*counts, 1e-5) == 0.0
    assert audit.epsilon_lower_bound(1, 1, 1, 1, 1e-5) == 0.0
    assert bounds.gdp_mu_lower_bound(1, 1, 1, 1) == 0.0


@pytest.mark.parametrize(
    "arguments, name",
    [
        ((-1, 10, 0, 10, 1e-5), "errors"),
        ((0, 10, 11, 10, 1e-5), "errors"),
        ((0, 0, 0, 10, 1e-5), "trials"),
        ((0, 10, 0, 10, 0.0), "delta"),
        ((0, 10, 0, 10, 1e-5, 1.0), "confidence"),
    ],
)
def test_arguments_out_of_range_are_named(arguments, name):
    for bound in (audit.epsilon_lower_bound, audit.gdp_epsilon_lower_bound):
        with pytest.raises(ValueError, match=f"`{name}`"):
            bound(*arguments)
