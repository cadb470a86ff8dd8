"""What an attack proves: lower bounds on epsilon from how often it was right.

A test distinguishes runs without an example ("negatives") from runs with it ("positives"). If it
does better than any (epsilon, delta) allows, the claim is false. The bounds here hold with the
stated confidence over the randomness of independent runs; the test must be chosen before these runs
are looked at. No bound says that a mechanism is private: another attack may do better.
"""

from __future__ import annotations

import math

import scipy.stats

from tfdpx._arguments import is_integer, is_number, require
from tfdpx.accounting.accountants import check_delta
from tfdpx.accounting.gaussian import exact_epsilon


def clopper_pearson_upper_bound(errors, trials, confidence):
    """An upper bound on the probability of an error, exact for any number of trials.

    Guarantee: for independent trials of one probability, the bound is below it with probability
    at most `1 - confidence` (Clopper and Pearson 1934).

    Args:
        errors: Int >= 0.
        trials: Int >= `errors`, at least 1.
        confidence: Float in (0, 1).

    Returns:
        Float in (0, 1].

    Raises:
        ValueError: If an argument is out of its range.
    """
    require(is_integer(trials, 1), "trials", trials, "be an int >= 1")
    fits = is_integer(errors, 0) and errors <= trials
    require(fits, "errors", errors, f"be an int from 0 to the {trials} trials")
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
    """A lower bound on epsilon for whatever mechanism the runs are of.

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
        ValueError: If an argument is out of its range.

    Example:
    >>> round(epsilon_lower_bound(3, 1000, 100, 1000, delta=1e-5), 2)
    4.13
    """
    check_delta(delta)
    alpha, beta = _rates(false_positives, negatives, false_negatives, positives, confidence)
    ratios = [(1 - beta - delta) / alpha, (1 - alpha - delta) / beta]
    return math.log(max(1.0, *ratios))


def gdp_mu_lower_bound(false_positives, negatives, false_negatives, positives, confidence=0.999):
    """A lower bound on mu, of a mechanism that is known to be mu-GDP for some mu.

    A test of such a mechanism has `mu >= Phi^-1(1 - alpha) - Phi^-1(beta)` (Dong, Roth, Su 2022,
    "Gaussian Differential Privacy", Eq. 6). Errors may be frequent and the bound still tight, which
    is not so for `epsilon_lower_bound` (Nasr et al. 2023, arXiv:2302.07956).

    Guarantee: with probability at least `confidence`, no mu below the bound describes the
    mechanism. Gaussian noise on full batches is exactly mu-GDP. Runs of sampled batches are not:
    give their bound only as an estimate.

    Args:
        false_positives: Int, as `epsilon_lower_bound`.
        negatives: Int >= 1.
        false_negatives: Int.
        positives: Int >= 1.
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Raises:
        ValueError: If an argument is out of its range.
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
    """The lower bound on epsilon that `gdp_mu_lower_bound` gives; tighter, and for GDP alone.

    Args:
        false_positives: Int, as `epsilon_lower_bound`.
        negatives: Int >= 1.
        false_negatives: Int.
        positives: Int >= 1.
        delta: Float in (0, 1).
        confidence: Float in (0, 1).

    Returns:
        Float >= 0.

    Raises:
        ValueError: If an argument is out of its range.

    Example:
    >>> round(gdp_epsilon_lower_bound(160, 1000, 160, 1000, delta=1e-5), 2)
    8.05
    """
    check_delta(delta)
    counts = false_positives, negatives, false_negatives, positives
    return epsilon_of_mu(gdp_mu_lower_bound(*counts, confidence), delta)


def epsilon_of_mu(mu, delta):
    """The epsilon of a mu-GDP mechanism at `delta`, a float; 0.0 where mu is 0.

    Args:
        mu: Float >= 0.
        delta: Float in (0, 1).
    """
    return exact_epsilon(mu, delta) if mu > 0 else 0.0


def check_confidence(confidence):
    """Raises ValueError unless 0 < `confidence` < 1."""
    fits = is_number(confidence) and 0 < confidence < 1
    require(fits, "confidence", confidence, "lie strictly between 0 and 1", " 0.999 is common.")


def _rates(false_positives, negatives, false_negatives, positives, confidence):
    """Upper bounds on both rates of error that hold together."""
    check_confidence(confidence)
    confidence_of_each = 1 - (1 - confidence) / 2
    return (
        clopper_pearson_upper_bound(false_positives, negatives, confidence_of_each),
        clopper_pearson_upper_bound(false_negatives, positives, confidence_of_each),
    )
