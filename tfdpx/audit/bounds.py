"""Lower bounds on epsilon from the number of right guesses of an attack.

Many runs. A test distinguishes runs without an example ("negatives") from runs with it
("positives"). If it does better than any (epsilon, delta) allows, the claim is false. The bounds
hold with the stated confidence over the randomness of independent runs; the test must be chosen
before the runs are examined. No bound proves that a mechanism is private: another attack
may do better.

One run. Each of m canaries was in the data or not, by an independent fair coin. An attack guesses r
of the coins, and v guesses are right. Two bounds limit how many can be right for a private
mechanism. Both bound the same probability, so taking the smaller of the two costs no confidence.

- Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846): at (epsilon, delta), hardly more
  than Binomial(r, 1 / (1 + exp(-epsilon))).
- Mahloujifar, Melis and Chaudhuri 2024 (arXiv:2410.22235): for a mechanism with trade-off function
  f, and p_c the probability of c right guesses, every set T of numbers has

      sum_{c in T} c/m p_c <= 1 - f(sum_{c in T} (r - c + 1)/m p_{c-1}),

  from which the least mass of a tail follows number by number.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.special
import scipy.stats

from tfdpx._arguments import is_integer, is_number, require
from tfdpx.accounting.accountants import check_delta
from tfdpx.accounting.gaussian import exact_epsilon


def clopper_pearson_upper_bound(errors, trials, confidence):
    """Returns an upper bound on the probability of an error, exact for any number of trials.

    Guarantee: for independent trials with one probability, the bound is below it with probability
    at most `1 - confidence` (Clopper and Pearson 1934).

    Args:
        errors: Int >= 0.
        trials: Int >= `errors`, at least 1.
        confidence: Float in (0, 1).

    Returns:
        Float in (0, 1].

    Raises:
        ValueError: If an argument is out of range.
    """
    require(is_integer(trials, 1), "trials", trials, "be an int >= 1")
    is_valid = is_integer(errors, 0) and errors <= trials
    require(is_valid, "errors", errors, f"be an int from 0 to the {trials} trials")
    check_confidence(confidence)
    if errors == trials:
        return 1.0
    return float(scipy.stats.beta.ppf(confidence, errors + 1, trials - errors))


def epsilon_lower_bound(
    false_positives: int,
    negatives: int,
    false_negatives: int,
    positives: int,
    delta: float,
    confidence: float = 0.999,
) -> float:
    """Returns a lower bound on the epsilon of the mechanism behind the runs.

    Any test of an (epsilon, delta)-private mechanism has `1 - beta - delta <= exp(epsilon) alpha`
    and the same with its errors exchanged; alpha and beta are its rates of false positives and
    false negatives (Hall et al. 2013; appendix A.2 of De et al. 2022, arXiv:2204.13650). Both rates
    are replaced by Clopper-Pearson bounds.

    Guarantee: with probability at least `confidence` the bound is no higher than the epsilon that
    the mechanism has at `delta` under the neighbouring relation of the two kinds of runs.

    Args:
        false_positives: Int, runs without the example that the test took for runs with it.
        negatives: Int >= 1, runs without it.
        false_negatives: Int, runs with the example that the test took for runs without it.
        positives: Int >= 1, runs with it.
        delta: Float in (0, 1).
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:
    >>> round(epsilon_lower_bound(3, 1000, 100, 1000, delta=1e-5), 2)
    4.13
    """
    check_delta(delta)
    alpha, beta = _rates(false_positives, negatives, false_negatives, positives, confidence)
    ratios = [(1 - beta - delta) / alpha, (1 - alpha - delta) / beta]
    return math.log(max(1.0, *ratios))


def gdp_mu_lower_bound(false_positives, negatives, false_negatives, positives, confidence=0.999):
    """Returns a lower bound on mu, for a mechanism that is mu-GDP for some mu.

    A test of such a mechanism has `mu >= Phi^-1(1 - alpha) - Phi^-1(beta)` (Dong, Roth, Su 2022,
    "Gaussian Differential Privacy", Eq. 6). The bound stays tight even if errors are frequent,
    unlike `epsilon_lower_bound` (Nasr et al. 2023, arXiv:2302.07956).

    Guarantee: with probability at least `confidence`, no mu below the bound describes the
    mechanism. Gaussian noise on full batches is exactly mu-GDP. Runs with sampled batches are not,
    so their bound is only an estimate.

    Args:
        false_positives: Int, as for `epsilon_lower_bound`.
        negatives: Int >= 1.
        false_negatives: Int.
        positives: Int >= 1.
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Raises:
        ValueError: If an argument is out of range.
    """
    alpha, beta = _rates(false_positives, negatives, false_negatives, positives, confidence)
    normal = scipy.stats.norm
    return max(0.0, float(normal.isf(alpha) - normal.ppf(beta)))


def gdp_epsilon_lower_bound(
    false_positives: int,
    negatives: int,
    false_negatives: int,
    positives: int,
    delta: float,
    confidence: float = 0.999,
) -> float:
    """Returns the epsilon of `gdp_mu_lower_bound`, a tighter lower bound that needs GDP.

    Args:
        false_positives: Int, as for `epsilon_lower_bound`.
        negatives: Int >= 1.
        false_negatives: Int.
        positives: Int >= 1.
        delta: Float in (0, 1).
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Raises:
        ValueError: If an argument is out of range.

    Example:
    >>> round(gdp_epsilon_lower_bound(160, 1000, 160, 1000, delta=1e-5), 2)
    8.05
    """
    check_delta(delta)
    counts = false_positives, negatives, false_negatives, positives
    return epsilon_of_mu(gdp_mu_lower_bound(*counts, confidence), delta)


def epsilon_of_mu(mu, delta):
    """Returns the epsilon of a mu-GDP mechanism at `delta`, a float; 0.0 if mu is 0.

    Args:
        mu: Float >= 0.
        delta: Float in (0, 1).
    """
    return exact_epsilon(mu, delta) if mu > 0 else 0.0


def check_confidence(confidence):
    """Raises ValueError unless 0 < `confidence` < 1."""
    is_valid = is_number(confidence) and 0 < confidence < 1
    require(is_valid, "confidence", confidence, "lie strictly between 0 and 1", " 0.999 is common.")


def _rates(false_positives, negatives, false_negatives, positives, confidence):
    """Returns upper bounds on both error rates that hold together."""
    check_confidence(confidence)
    confidence_of_each = 1 - (1 - confidence) / 2
    return (
        clopper_pearson_upper_bound(false_positives, negatives, confidence_of_each),
        clopper_pearson_upper_bound(false_negatives, positives, confidence_of_each),
    )


# Where the search for a bound ends: no realistic number of guesses proves as much.
_MOST = 60.0


def one_run_epsilon_lower_bound(correct, guesses, canaries, delta, confidence=0.95):
    """Returns a lower bound on epsilon from the number of right guesses of one run.

    Guarantee: with probability at least `confidence` over the coins and the run, the bound is no
    higher than the epsilon that the mechanism has at `delta` under adding or removing one example.
    It assumes that the coins were fair, independent and unknown to the attack, and that the number
    of guesses was chosen without them.

    Args:
        correct: Int, right guesses.
        guesses: Int in [1, canaries]; no guess was made for the other canaries.
        canaries: Int >= 1, number of coins.
        delta: Float in (0, 1).
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Example:
    >>> round(one_run_epsilon_lower_bound(95, 100, 1000, delta=1e-5), 2)
    2.17
    """
    error = 1 - confidence

    def refuted(epsilon):
        if _steinke(correct, guesses, canaries, epsilon, delta) <= error:
            return True
        needed = _approximate_needed(epsilon, delta)
        return _least_mass(needed, correct, guesses, canaries, error) > 1

    return _largest(refuted)


def one_run_mu_lower_bound(correct, guesses, canaries, confidence=0.95):
    """Returns a lower bound on mu, for a mechanism that is mu-GDP for some mu.

    Guarantee: as for `one_run_epsilon_lower_bound`: no mu below the bound describes the mechanism.
    Gaussian noise on full batches is exactly mu-GDP. A run with sampled batches is only nearly so,
    after many updates, and there the bound is an estimate.

    Args:
        correct: Int, right guesses.
        guesses: Int in [1, canaries].
        canaries: Int >= 1.
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.
    """

    def refuted(mu):
        needed = _gaussian_needed(mu)
        return _least_mass(needed, correct, guesses, canaries, 1 - confidence) > 1

    return _largest(refuted)


def _steinke(correct, guesses, canaries, epsilon, delta):
    """Returns an upper bound on the probability of at least `correct` right guesses."""
    rate = 1 / (1 + math.exp(-epsilon))
    tail = scipy.stats.binom.sf(correct - 1, guesses, rate)
    # For the numbers just below: the most that delta may add.
    below = scipy.stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate)
    steps = np.arange(1, correct + 1)
    added = np.max(np.cumsum(below) / steps) if correct else 0.0
    return min(1.0, tail + 2 * canaries * delta * added)


def _least_mass(needed, correct, guesses, canaries, tail):
    """Returns the least sum of p_0, ..., p_r with a `tail`; above 1 if it is impossible.

    The tail is the probability of at least `correct` right guesses. With T = {i, ...}, `right` is
    the left-hand side and `wrong` the argument of f. Taking the least p_{i-1} that the inequality
    allows, given those above, leaves the least mass in the end; so does all of the tail at
    `correct`.

    Args:
        needed: Function of a left-hand side to the least argument that allows it.
        correct: Int.
        guesses: Int.
        canaries: Int.
        tail: Float.
    """
    right, wrong = tail * correct / canaries, tail * (guesses - correct) / canaries
    mass = tail
    for i in range(correct, 0, -1):
        # p_{i-1}, with r - i + 1 wrong guesses.
        p = max(0.0, needed(right) - wrong) * canaries / (guesses - i + 1)
        mass += p
        if mass > 1:
            break
        right += p * (i - 1) / canaries
        wrong += p * (guesses - i + 1) / canaries
    return mass


def _gaussian_needed(mu):
    """Returns the solution x of 1 - f(x) = y as a function of y, for mu-GDP's trade-off f."""

    def needed(y):
        return float(scipy.special.ndtr(scipy.special.ndtri(y) - mu)) if y < 1 else math.inf

    return needed


def _approximate_needed(epsilon, delta):
    """Returns the same for f the trade-off function of (epsilon, delta)-privacy."""
    small = math.exp(-epsilon)

    def needed(y):
        # 1 - f(x) is the smaller of exp(epsilon) x + delta and 1 - exp(-epsilon) (1 - delta - x).
        if y > 1:
            return math.inf
        return max(0.0, small * (y - delta), 1 - delta - (1 - y) / small)

    return needed


def _largest(refuted):
    """Returns the largest value up to `_MOST` that is refuted with all below; 0.0 if none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
