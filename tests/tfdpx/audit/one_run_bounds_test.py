"""Bounds from one run are valid as often as promised, for guesses of a known distribution."""

import math

import numpy as np
import pytest
from scipy import stats

from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.audit import bounds

CONFIDENCE = 0.9


def chance_of_too_high(bound, truth, probabilities):
    """Returns the probability that a bound from right guesses exceeds the truth, by an exact sum.

    Args:
        bound: Function from the number of right guesses to a float.
        truth: Float.
        probabilities: Array of the probabilities of 0, 1, ... right guesses.
    """
    return sum(p for c, p in enumerate(probabilities) if p > 1e-12 and bound(c) > truth + 1e-9)


def binomial(guesses, rate):
    return stats.binom.pmf(np.arange(guesses + 1), guesses, rate)


def of_epsilon(guesses, canaries, delta):
    return lambda c: bounds.one_run_epsilon_lower_bound(c, guesses, canaries, delta, CONFIDENCE)


@pytest.mark.parametrize("epsilon, delta", [(0.0, 1e-5), (2.0, 0.01)])
@pytest.mark.parametrize("guesses, canaries", [(40, 40), (30, 200)])
def test_randomised_response_is_exceeded_no_more_often_than_stated(
    epsilon, delta, guesses, canaries
):
    # Each coin is revealed with probability delta, and else by randomised response.
    rate = delta + (1 - delta) / (1 + math.exp(-epsilon))
    alone = binomial(guesses, rate)
    # Or all coins are revealed at once, with probability delta.
    at_once = (1 - delta) * binomial(guesses, 1 / (1 + math.exp(-epsilon)))
    at_once[-1] += delta
    for probabilities in (alone, at_once):
        bound = of_epsilon(guesses, canaries, delta)
        assert chance_of_too_high(bound, epsilon, probabilities) <= 1 - CONFIDENCE


def gaussian_guesses(mu, canaries, guesses):
    """Simulates coins with noise of deviation 1 / mu; returns probabilities of right guesses."""
    rng = np.random.default_rng(0)
    coins = rng.integers(0, 2, [20_000, canaries])
    order = np.argsort(mu * coins + rng.normal(size=coins.shape), axis=1)
    ordered = np.take_along_axis(coins, order, 1)
    half = guesses // 2
    correct = ordered[:, canaries - half :].sum(1) + (1 - ordered[:, : guesses - half]).sum(1)
    return np.bincount(correct, minlength=guesses + 1) / len(coins)


@pytest.mark.parametrize("mu", [0.5, 2.0])
@pytest.mark.parametrize("guesses, canaries", [(30, 30), (10, 60)])
def test_gaussian_noise_is_exceeded_no_more_often_than_stated(mu, guesses, canaries):
    probabilities = gaussian_guesses(mu, canaries, guesses)

    def bound(c):
        return bounds.one_run_mu_lower_bound(c, guesses, canaries, CONFIDENCE)

    assert chance_of_too_high(bound, mu, probabilities) <= 1 - CONFIDENCE
    epsilon = exact_epsilon(mu, 1e-3)
    general = of_epsilon(guesses, canaries, 1e-3)
    assert chance_of_too_high(general, epsilon, probabilities) <= 1 - CONFIDENCE


@pytest.mark.planted("a lower bound of one run that is too high")
def test_a_bound_that_is_too_high_is_rejected():
    rate = 1 / (1 + math.exp(-2.0))

    def point_estimate(correct):
        rate = min(max(correct / 40, 0.5), 0.999)
        return math.log(rate / (1 - rate))

    assert chance_of_too_high(point_estimate, 2.0, binomial(40, rate)) > 1 - CONFIDENCE

    # A bound without the number of coins fails: all may be revealed at once.
    def forgets_canaries(correct):
        return bounds.one_run_epsilon_lower_bound(correct, 40, 40, 1e-12, CONFIDENCE)

    delta = 0.12
    probabilities = (1 - delta) * binomial(40, rate)
    probabilities[-1] += delta
    assert chance_of_too_high(forgets_canaries, 2.0, probabilities) > 1 - CONFIDENCE
    assert chance_of_too_high(of_epsilon(40, 40, delta), 2.0, probabilities) <= 1 - CONFIDENCE


def test_without_delta_the_bound_is_that_of_binomial_tails():
    for correct, guesses in ((30, 40), (40, 40), (390, 400)):
        bound = bounds.one_run_epsilon_lower_bound(correct, guesses, 500, 1e-15, 0.95)
        rate = stats.binomtest(correct, guesses).proportion_ci(0.9, "exact").low
        assert bound == pytest.approx(math.log(rate / (1 - rate)), abs=2e-4)


def test_no_privacy_gives_a_large_bound_and_guesses_give_none():
    assert bounds.one_run_epsilon_lower_bound(1000, 1000, 1000, 1e-5) > 5.7
    assert bounds.one_run_mu_lower_bound(1000, 1000, 1000) > 2.3
    for correct in (0, 480, 505):
        assert bounds.one_run_epsilon_lower_bound(correct, 1000, 1000, 1e-5) < 0.01
        assert bounds.one_run_mu_lower_bound(correct, 1000, 1000) < 0.01
