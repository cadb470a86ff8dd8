"""Bounds on attacks: how well anyone can find out whether an example was in the data.

An attack tests two hypotheses, with the example and without it, and knows all other examples, the
settings and every update. The privacy profile of a run, delta as a function of epsilon, bounds the
true positive rate of every test at every false positive rate a by

    min over epsilon >= 0 of  exp(epsilon) a + delta(epsilon)
                         and  1 - exp(-epsilon) (1 - a - delta(epsilon))

(Dong, Roth, Su 2022, "Gaussian Differential Privacy", Proposition 6.1: the convex hull of the
trade-off curves of adding and of removing the example). The profile is computed by privacy loss
distributions, and in closed form for full batches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from tfdpx._arguments import require
from tfdpx.accounting import accountants, gaussian

# The false positive rates of tables: how often an accusation hits a person who was not in the data.
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
_POINTS = 4000
_LARGEST_EPSILON = 700.0  # Its exponential is a float.


@dataclasses.dataclass(frozen=True, eq=False)
class AttackBounds:
    """Upper bounds on every attack on one example, or on one person, of a training.

    Guarantee: an attack that knows everything except whether the example was in the data, and that
    sees every update, does not exceed any of these bounds. They hold for adding and for removing
    one `unit` under the assumptions of `epsilon`. They are tight, except for `kept_back` and the
    rounding of the privacy loss distribution. An attack on several examples of one person may
    exceed them.

    Args:
        epsilons: float64 array [n], ascending from 0.
        deltas: float64 array [n], the least delta of the training at each of `epsilons`.
        delta: Float in (0, 1), the delta of the training.
        unit: "example" or "user".
        kept_back: Float, added to every true positive rate: the part of delta that is reserved for
            batches that overflow and for the noise's finite tail.
    """

    epsilons: np.ndarray = dataclasses.field(repr=False)
    deltas: np.ndarray = dataclasses.field(repr=False)
    delta: float
    unit: str
    kept_back: float

    def true_positive_rate(self, false_positive_rate: ArrayLike) -> Any:
        """Returns the largest share of present examples that an attack can recognise.

        Args:
            false_positive_rate: Float in [0, 1], or an array of such floats: the share of absent
                examples that the attack wrongly takes for present.

        Returns:
            Float, or a float64 array of the same shape.

        Raises:
            ValueError: If a rate is not in [0, 1].
        """
        rates = np.asarray(false_positive_rate, "float64")
        is_valid = bool(np.all((rates >= 0) & (rates <= 1)))
        require(is_valid, "false_positive_rate", false_positive_rate, "lie in [0, 1]")
        slopes, intercepts, crossings = self._lines
        lowest = np.searchsorted(crossings, rates)  # Every other line is a bound too.
        bound = np.minimum(rates * slopes[lowest] + intercepts[lowest] + self.kept_back, 1.0)
        return bound if bound.ndim else float(bound)

    @functools.cached_property
    def _lines(self):
        """Returns slopes, intercepts and crossings of the curve's tangents, steepest first."""
        flat = np.append(np.exp(-self.epsilons[1:]), 0.0)  # The last line is at 1.
        slopes = np.append(np.exp(self.epsilons[::-1]), flat)
        intercepts = np.append(self.deltas[::-1], 1 - flat * (1 - np.append(self.deltas[1:], 0.0)))
        crossings = np.diff(intercepts) / -np.diff(slopes)
        return slopes, intercepts, np.clip(np.maximum.accumulate(crossings), 0.0, 1.0)

    @functools.cached_property
    def advantage(self) -> float:
        """Float in [0, 1]: the largest difference of true and false positive rate."""
        return min(1.0, float(self.deltas[0]) + self.kept_back)

    @property
    def right_guesses(self) -> float:
        """Float in [0.5, 1]: the largest share of right guesses if a coin decides on presence."""
        return (1 + self.advantage) / 2

    @functools.cached_property
    def auc(self) -> float:
        """Float in [0.5, 1]: the largest area under the ROC curve of an attack."""
        slopes, intercepts, crossings = self._lines
        corners = np.concatenate([[0.0], crossings, [1.0]])
        heights = slopes * (corners[:-1] + corners[1:]) / 2 + intercepts
        return min(1.0, float(np.diff(corners) @ heights) + self.kept_back)

    @functools.cached_property
    def mu(self) -> float:
        """Float: the least mu of a Gaussian mechanism that is no more private than the training.

        It holds at every delta from `mu_from_delta` on, because no mu bounds a sampled run at all
        deltas.
        """
        deltas = np.minimum(self.deltas + self.kept_back, 1.0)
        # One more point: it holds up to the point at which the curve crosses that delta.
        is_covered = np.append(True, deltas[:-1] >= self.mu_from_delta)
        epsilons, deltas = self.epsilons[is_covered], deltas[is_covered]
        if np.any(deltas >= 1):
            return math.inf
        low, high = np.zeros(len(deltas)), np.full(len(deltas), 1e3)
        for _ in range(60):
            middle = (low + high) / 2
            is_enough = gaussian.exact_delta(middle, epsilons) >= deltas
            low, high = np.where(is_enough, low, middle), np.where(is_enough, middle, high)
        return float(np.max(high))

    @property
    def mu_from_delta(self) -> float:
        """Float: `delta`, or 1e-9 if that is larger."""
        return max(self.delta, accountants.LEAST_PLD_DELTA)

    def to_dict(self) -> dict[str, Any]:
        """Returns the bounds as a dict of JSON values."""
        return {
            "right_guesses": self.right_guesses,
            "advantage": self.advantage,
            "auc": self.auc,
            "true_positive_rate": {
                f"{rate:g}": self.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES
            },
            "mu": self.mu,
            "mu_from_delta": self.mu_from_delta,
        }


def full_batch_epsilon(right_guesses: float, delta: float) -> float:
    """Returns the epsilon of full batches with this largest share of right guesses.

    Args:
        right_guesses: Float in (0.5, 1].
        delta: Float in (0, 1).
    """
    share = right_guesses - delta * accountants.RESERVED_SHARE / 2  # As `AttackBounds` adds it.
    mu = 2 * float(scipy.special.ndtri(min(max(share, 0.5), 1.0)))
    run = (1 / mu if mu > 1e-12 else 1e12, 1.0, 1)
    return accountants.composed_epsilon((run,), delta, "gdp")


@functools.lru_cache(maxsize=8)
def attack_bounds(
    runs: tuple[accountants.Run, ...],
    delta: float,
    unit: str,
    selections: tuple[tuple[float, float], ...] = (),
) -> AttackBounds:
    """Returns the `AttackBounds` of runs of DP-SGD on the same data, one after another.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`, Poisson sampled.
        delta: Float in (0, 1).
        unit: "example" or "user".
        selections: Tuple of pairs of an epsilon and a delta, one for each mechanism with no other
            known profile. They count as the worst mechanism with the sums of these.

    Raises:
        ValueError: If an argument is out of range.
    """
    runs = tuple(run for run in runs if run[2] > 0)
    kept_back = accountants.kept_back(runs, delta)
    extra = math.fsum(epsilon for epsilon, _ in selections)
    # If nothing is left of delta, epsilon is infinite and there is no profile.
    none: Any = (math.inf, None)
    largest, deltas = accountants.privacy_profile(runs) if kept_back < delta else none
    if largest + extra > _LARGEST_EPSILON:
        return AttackBounds(np.zeros(1), np.ones(1), delta, unit, 1.0)
    epsilons = np.unique(np.linspace(0.0, largest + extra, _POINTS))
    if selections:
        failure = min(1.0, math.fsum(failure for _, failure in selections))
        deltas = _with_selections(deltas, extra, failure)
    return AttackBounds(epsilons, np.clip(deltas(epsilons), 0.0, 1.0), delta, unit, kept_back)


def _with_selections(deltas, epsilon, failure):
    """Returns the profile of a mechanism composed with the worst (epsilon, failure)-private one.

    It fails with probability `failure`, and otherwise has a loss of plus or minus `epsilon`.
    """
    share = 1 / (1 + math.exp(-epsilon))

    def composed(at):
        below, above = at - epsilon, np.minimum(at + epsilon, _LARGEST_EPSILON)
        fallen = deltas(np.abs(below))
        # The profile is symmetric, which gives the values below 0.
        mirrored = np.minimum(-np.expm1(below) + np.exp(below) * fallen, 1.0)
        gained = np.where(below < 0, mirrored, fallen)
        return failure + (1 - failure) * (share * gained + (1 - share) * deltas(above))

    return composed
