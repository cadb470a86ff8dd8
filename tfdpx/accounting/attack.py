"""Bounds on attacks: how well anyone can find out whether an example was in the data.

An attacker decides between two hypotheses: the example was in the data, or it was not. The attacker
knows all other examples, the settings and every update. Let delta(epsilon) be the privacy profile
of the training, the least delta at each epsilon. Then at a false positive rate a, the true positive
rate of every attack is at most

    min over epsilon >= 0 of  exp(epsilon) a + delta(epsilon)
                         and  1 - exp(-epsilon) (1 - a - delta(epsilon))

(Dong, Roth, Su 2022, "Gaussian Differential Privacy", Proposition 6.1). The bound holds both for
adding and for removing the example. The profile comes from privacy loss distributions; for full
batches it has a closed form.
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

# The false positive rates in tables of results. A false positive rate is the share of people
# outside of the data whom an attack wrongly takes for present.
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
_POINTS = 4000
_LARGEST_EPSILON = 700.0  # The exponential of a larger epsilon would overflow.


@dataclasses.dataclass(frozen=True, eq=False)
class AttackBounds:
    """Upper bounds on the success of every attack on one example, or one person, of a training.

    Guarantee: no attack exceeds any of these bounds, even if it sees every update and knows
    everything except whether the example was in the data. The conditions are the same as for
    `tfdpx.accounting.epsilon`, for adding or removing one `unit`. The bounds are tight, except for
    `kept_back` and the rounding of the privacy loss distribution. With `unit="example"`, an attack
    that uses several examples of one person may exceed them.

    Args:
        epsilons: float64 array [n], ascending from 0.
        deltas: float64 array [n], the least delta of the training at each of `epsilons`.
        delta: Float in (0, 1), the delta of the training.
        unit: "example" or "user", the unit that is added or removed.
        kept_back: Float, the part of delta that is reserved for events that the accountants do not
            cover (`accountants.kept_back`). It is added to every true positive rate.
    """

    epsilons: np.ndarray = dataclasses.field(repr=False)
    deltas: np.ndarray = dataclasses.field(repr=False)
    delta: float
    unit: str
    kept_back: float

    def true_positive_rate(self, false_positive_rate: ArrayLike) -> Any:
        """Returns the largest share of present examples that an attack can recognise as present.

        Args:
            false_positive_rate: Float in [0, 1], or an array of floats: the share of absent
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
        lowest = np.searchsorted(crossings, rates)  # Each line is a bound; this one is the lowest.
        bound = np.minimum(rates * slopes[lowest] + intercepts[lowest] + self.kept_back, 1.0)
        return bound if bound.ndim else float(bound)

    @functools.cached_property
    def _lines(self):
        """Returns the lines that bound the ROC curve of every attack, the steepest first.

        Returns:
            Three float64 arrays: slopes and intercepts of the lines, and the false positive rates
            at which each line crosses the next one.
        """
        flat = np.append(np.exp(-self.epsilons[1:]), 0.0)  # The last line is constant: 1.
        slopes = np.append(np.exp(self.epsilons[::-1]), flat)
        intercepts = np.append(self.deltas[::-1], 1 - flat * (1 - np.append(self.deltas[1:], 0.0)))
        crossings = np.diff(intercepts) / -np.diff(slopes)
        return slopes, intercepts, np.clip(np.maximum.accumulate(crossings), 0.0, 1.0)

    @functools.cached_property
    def advantage(self) -> float:
        """Float in [0, 1]: the largest difference of the true and the false positive rate."""
        return min(1.0, float(self.deltas[0]) + self.kept_back)

    @property
    def right_guesses(self) -> float:
        """Float in [0.5, 1]: the largest share of right guesses.

        A fair coin decides whether the example is in the data, and the attacker guesses the result
        of the coin.
        """
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
        """Float: the least mu for which the training is at least as private as mu-GDP.

        This holds only for deltas of at least `mu_from_delta`: at each epsilon with such a delta,
        the Gaussian mechanism with this mu has the same delta or a larger one. With sampled
        batches, no mu would hold for all deltas.
        """
        deltas = np.minimum(self.deltas + self.kept_back, 1.0)
        # Includes one point with a smaller delta, because the curve crosses `mu_from_delta` just
        # before this point.
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
        """Float: the smallest delta at which `mu` is valid, the larger of `delta` and 1e-9."""
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
    """Returns the epsilon at which full-batch training limits right guesses to `right_guesses`.

    Args:
        right_guesses: Float in (0.5, 1], the largest share of right guesses of an attack.
        delta: Float in (0, 1).
    """
    share = right_guesses - delta * accountants.RESERVED_SHARE / 2  # `AttackBounds` adds it.
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
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`, with Poisson
            sampling.
        delta: Float in (0, 1).
        unit: "example" or "user".
        selections: Tuple of pairs (epsilon, delta), one for each search for hyperparameters
            (`Ledger.selected`) and for each release by another mechanism (`Ledger.with_release`).
            All epsilons and all deltas are added up. The bounds hold for every mechanism with these
            two sums.

    Raises:
        ValueError: If an argument is out of range.
    """
    runs = tuple(run for run in runs if run[2] > 0)
    kept_back = accountants.kept_back(runs, delta)
    extra = math.fsum(epsilon for epsilon, _ in selections)
    # If the reserve takes all of delta, epsilon is infinite, and no profile is needed.
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
    """Composes a training with the worst mechanism that is (epsilon, failure)-private.

    This mechanism reveals everything with probability `failure`. Otherwise its privacy loss is plus
    or minus `epsilon`. Returns the privacy profile of both together.

    Args:
        deltas: Function from an array of epsilons >= 0 to an array of deltas, the privacy profile
            of the training.
        epsilon: Float >= 0.
        failure: Float in [0, 1].
    """
    share = 1 / (1 + math.exp(-epsilon))

    def composed(at):
        below, above = at - epsilon, np.minimum(at + epsilon, _LARGEST_EPSILON)
        fallen = deltas(np.abs(below))
        # The profile at a negative epsilon follows from its value at -epsilon by symmetry.
        mirrored = np.minimum(-np.expm1(below) + np.exp(below) * fallen, 1.0)
        gained = np.where(below < 0, mirrored, fallen)
        return failure + (1 - failure) * (share * gained + (1 - share) * deltas(above))

    return composed
