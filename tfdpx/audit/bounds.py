"""Lower bounds on epsilon from the number of right guesses of an attack.

A lower bound can show that a claimed epsilon is too small. It never proves that a mechanism is
private, because another attack may do better. There are bounds for two kinds of experiments.

Many runs. A test tells runs without an example ("negatives") from runs with the example
("positives"). If the test makes fewer errors than (epsilon, delta)-privacy allows, the claimed
epsilon is too small. The runs must be independent, and the test must be chosen before the runs are
examined. The bound then holds with the stated confidence.

One run. For each of m canaries (artificial examples), an independent fair coin decided whether the
canary was in the data. An attack guesses r of the coins. If the mechanism is private, it is
improbable that many guesses are right. Two theorems bound the probability of at least v right
guesses. Both are always true, so the smaller bound may be used without losing confidence:

- Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846): for an (epsilon, delta)-private mechanism,
  the number of right guesses is hardly larger than Binomial(r, 1 / (1 + exp(-epsilon))).
- Mahloujifar, Melis and Chaudhuri 2024 (arXiv:2410.22235): let f be the trade-off function of the
  mechanism, and p_c the probability of c right guesses. Then every set T of numbers satisfies

      sum_{c in T} c/m p_c <= 1 - f(sum_{c in T} (r - c + 1)/m p_{c-1}).

  From this inequality, `_least_mass` computes the smallest possible values of p_c.
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
    """Returns an upper bound on the probability of an error, from the number of errors in trials.

    Guarantee: let the trials be independent, each with the same error probability p. Then, for any
    number of trials, the bound is at least p with a confidence of at least `confidence` (Clopper
    and Pearson 1934).

    Args:
        errors: Int >= 0, the number of trials with an error.
        trials: Int >= 1, the number of all trials.
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
    """Returns a lower bound on epsilon from the errors of a test in many runs.

    Let alpha be the rate of false positives of a test and beta its rate of false negatives. For an
    (epsilon, delta)-private mechanism, `1 - beta - delta <= exp(epsilon) alpha`, and the same holds
    with alpha and beta exchanged (Hall et al. 2013; appendix A.2 of De et al. 2022,
    arXiv:2204.13650). Both rates are replaced by their Clopper-Pearson bounds.

    Guarantee: with probability at least `confidence`, the result is at most the epsilon that the
    mechanism has at `delta`, for neighbouring data sets with and without the example.

    Args:
        false_positives: Int, the number of wrong answers "with" for runs without the example.
        negatives: Int >= 1, the number of all runs without the example.
        false_negatives: Int, the number of wrong answers "without" for runs with the example.
        positives: Int >= 1, the number of all runs with the example.
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
    """Returns a lower bound on mu, for a mechanism with Gaussian differential privacy (mu-GDP).

    A test with error rates alpha and beta shows that `mu >= Phi^-1(1 - alpha) - Phi^-1(beta)`
    (Dong, Roth, Su 2022, "Gaussian Differential Privacy", Eq. 6). This bound is tight even if
    errors are frequent, while `epsilon_lower_bound` is not (Nasr et al. 2023, arXiv:2302.07956).

    Guarantee: if the mechanism is mu-GDP, mu is at least the bound, with probability at least
    `confidence`. Gaussian noise on full batches is exactly mu-GDP. With sampled batches the
    mechanism is not mu-GDP, so the bound is only an estimate.

    Args:
        false_positives: Int, as for `epsilon_lower_bound`.
        negatives: Int >= 1, as for `epsilon_lower_bound`.
        false_negatives: Int, as for `epsilon_lower_bound`.
        positives: Int >= 1, as for `epsilon_lower_bound`.
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
    """Returns a lower bound on epsilon for a mechanism with Gaussian differential privacy (GDP).

    This bound is tighter than `epsilon_lower_bound`. Gaussian noise on full batches satisfies GDP;
    for sampled batches the bound is only an estimate (`gdp_mu_lower_bound`).

    Args:
        false_positives: Int, as for `epsilon_lower_bound`.
        negatives: Int >= 1, as for `epsilon_lower_bound`.
        false_negatives: Int, as for `epsilon_lower_bound`.
        positives: Int >= 1, as for `epsilon_lower_bound`.
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
    """Returns upper bounds on the rates of false positives and of false negatives.

    Both bounds hold at the same time, with probability at least `confidence`.
    """
    check_confidence(confidence)
    confidence_of_each = 1 - (1 - confidence) / 2
    return (
        clopper_pearson_upper_bound(false_positives, negatives, confidence_of_each),
        clopper_pearson_upper_bound(false_negatives, positives, confidence_of_each),
    )


# The largest epsilon in the search. No realistic number of guesses proves so large an epsilon.
_MOST = 60.0


def one_run_epsilon_lower_bound(correct, guesses, canaries, delta, confidence=0.95):
    """Returns a lower bound on epsilon from the number of right guesses about canaries in one run.

    Guarantee: with probability at least `confidence` over the coins and the run, the bound is at
    most the epsilon that the mechanism has at `delta` for adding or removing one example. The coins
    must be fair, independent and unknown to the attack, and the number of guesses must not depend
    on the coins.

    Args:
        correct: Int, the number of right guesses.
        guesses: Int in [1, canaries], the number of guesses. The attack may leave out canaries.
        canaries: Int >= 1, the number of canaries, and of coins.
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
    """Returns a lower bound on mu from the number of right guesses in one run, for mu-GDP.

    Guarantee: if the mechanism is mu-GDP, mu is at least the bound, under the conditions of
    `one_run_epsilon_lower_bound`. Gaussian noise on full batches is exactly mu-GDP. A run with
    sampled batches is only approximately mu-GDP, after many updates, so the bound is an estimate.

    Args:
        correct: Int, the number of right guesses.
        guesses: Int in [1, canaries], the number of guesses.
        canaries: Int >= 1, the number of canaries.
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.
    """

    def refuted(mu):
        needed = _gaussian_needed(mu)
        return _least_mass(needed, correct, guesses, canaries, 1 - confidence) > 1

    return _largest(refuted)


def _steinke(correct, guesses, canaries, epsilon, delta):
    """Returns an upper bound on the probability of at least `correct` right guesses.

    The bound is the theorem of Steinke et al. 2023 for an (epsilon, delta)-private mechanism.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    tail = scipy.stats.binom.sf(correct - 1, guesses, rate)
    # Delta may move probability from the numbers just below `correct` into the tail.
    below = scipy.stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, rate)
    steps = np.arange(1, correct + 1)
    added = np.max(np.cumsum(below) / steps) if correct else 0.0
    return min(1.0, tail + 2 * canaries * delta * added)


def _least_mass(needed, correct, guesses, canaries, tail):
    """Returns the least possible sum of p_0, ..., p_r. If the sum exceeds 1, `tail` is impossible.

    Here p_c is the probability of c right guesses, and `tail` is an assumed probability of at least
    `correct` right guesses. The sum is smallest if more than `correct` right guesses never happen,
    so the loop starts with p_c = `tail` at c = `correct`. For each smaller c, the inequality of
    Mahloujifar et al. with the set T = {c + 1, c + 2, ...} gives the smallest possible p_c from
    p_{c+1}, p_{c+2}, ...

    Args:
        needed: Function from the left-hand side of the inequality to the least argument of f with
            which the inequality holds.
        correct: Int, the number of right guesses.
        guesses: Int, r.
        canaries: Int, m.
        tail: Float in (0, 1).
    """
    # The left-hand side of the inequality, and the argument of f in it.
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
    """Returns the argument `needed` of `_least_mass` for a mechanism with mu-GDP.

    `needed` is the function from y to the solution x of 1 - f(x) = y, with the trade-off function f
    of mu-GDP.
    """

    def needed(y):
        return float(scipy.special.ndtr(scipy.special.ndtri(y) - mu)) if y < 1 else math.inf

    return needed


def _approximate_needed(epsilon, delta):
    """Returns the argument `needed` of `_least_mass` for an (epsilon, delta)-private mechanism."""
    small = math.exp(-epsilon)

    def needed(y):
        # 1 - f(x) is the smaller of exp(epsilon) x + delta and 1 - exp(-epsilon) (1 - delta - x).
        if y > 1:
            return math.inf
        return max(0.0, small * (y - delta), 1 - delta - (1 - y) / small)

    return needed


def _largest(refuted):
    """Returns the largest value up to `_MOST` that is refuted; 0.0 if there is none.

    Args:
        refuted: Function from a float to a bool: True up to some value, and False above it.
    """
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, _MOST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low
