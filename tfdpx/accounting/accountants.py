"""Computes the epsilon of DP-SGD with Poisson sampling by the accountants of dp_accounting."""

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import dp_accounting
import numpy as np
from dp_accounting.pld import (
    pld_pmf,
    pld_privacy_accountant,
    privacy_loss_distribution,
    privacy_loss_mechanism,
)
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpx._arguments import check_choice, is_integer, is_number, require
from tfdpx.accounting.gaussian import (
    LARGEST_RADIUS,
    FullBatchAccountant,
    added_delta,
    exact_delta,
    exact_epsilon,
    zcdp_epsilon,
)

_ADD_OR_REMOVE_ONE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
_Adjacency = privacy_loss_mechanism.AdjacencyType

# The share of delta that is reserved for two events that no accountant covers. One half is for a
# step that draws more examples than its batch has rows. The other half is needed because the noise
# of tfdpx never exceeds a largest value. The reserve raised an epsilon of 1.9 by a factor of 1 +
# 7e-6.
RESERVED_SHARE = 1e-4

_FINEST_GRID, _COARSEST_GRID = 1e-8, 1e-4
# At a smaller delta, the rounding errors of "pld" matter. At delta 1e-12, its epsilon was up to
# 3.4% too low after 1e6 updates.
LEAST_PLD_DELTA = 1e-9
_LEAST_RDP_LOSS = 1e-5
# An upper bound on the weights of a model, needed for `added_delta`.
_MOST_PARAMETERS = 10**9
_MOST_STEPS = 2**53

# A run of DP-SGD is a tuple: noise multiplier, sampling probability, and number of steps.
Run = tuple[float, float, int]


def epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
) -> float:
    """Returns the epsilon of `steps` updates of DP-SGD at `delta`.

    Guarantee: the outputs of all steps together are (epsilon, delta)-differentially private for
    data sets that differ by adding or removing one example. The guarantee has three conditions:

    - each step draws every example independently with `sampling_probability` (Poisson sampling);
    - no example changes the sum of a step by more than `l2_norm_clip` in l2 norm;
    - Gaussian noise of standard deviation `noise_multiplier * l2_norm_clip` is added to that sum.

    The arguments are the same for both data sets, so they count as public. The number of examples,
    from which `sampling_probability` follows, is therefore public, too (see `tfdpx.PrivacyPlan`).

    The share `RESERVED_SHARE` of delta is reserved for two events that the accountants do not
    cover: a step may draw more examples than its batch has rows, and the noise of tfdpx never
    exceeds a largest value (`tfdpx.accounting.gaussian`). At noise multipliers below about 0.45, or
    deltas below 1e-10, the second event may need more than this share. The missing part is then
    subtracted from delta as well. This part is large enough for models of up to a billion weights.

    `dp_accounting` does the mathematics. The accountants are:

    - "pld" composes privacy loss distributions (Doroshenko et al. 2022, "Connect the Dots"). It is
      tighter than "rdp". At deltas below 1e-9 it has rounding errors, so "rdp" is used instead.
    - "rdp" composes Renyi divergences (Mironov et al. 2019, "Renyi Differential Privacy of the
      Sampled Gaussian Mechanism") and converts them to epsilon by Canonne et al. 2020, Proposition
      12, like the accountant of De et al. 2022.
    - "gdp" is exact. It is only for full batches (`sampling_probability=1`), where "pld" gives the
      same epsilon.
    - "zcdp" is the looser conversion of Bun and Steinke 2016, also only for full batches.

    Args:
        noise_multiplier: Float >= 0. Standard deviation of the noise divided by the sensitivity.
        sampling_probability: Float in (0, 1]. Probability that a step draws an example.
        steps: Int >= 0. Number of updates.
        delta: Float in (0, 1).
        accountant: "pld", "rdp", "gdp" or "zcdp".

    Returns:
        Float. It is 0.0 if `steps` is 0. Otherwise it is infinite if `noise_multiplier` is 0, or so
        small that the reserved part takes all of delta.

    Raises:
        ValueError: If an argument is out of range.
    """
    return composed_epsilon(((noise_multiplier, sampling_probability, steps),), delta, accountant)


@functools.lru_cache(maxsize=4096)
def composed_epsilon(runs: tuple[Run, ...], delta: float, accountant: str = "pld") -> float:
    """Returns the epsilon at `delta` of several runs of DP-SGD on the same data, one after another.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`.
        delta: Float in (0, 1).
        accountant: "pld", "rdp", "gdp" or "zcdp".

    Returns:
        Float, the epsilon of all runs together. The guarantee is the same as for `epsilon`.

    Raises:
        ValueError: If an argument is out of range, or the privacy loss is too small for the
            accountant's numerical precision.
    """
    check_delta(delta)
    check_accountant(accountant)
    for run in runs:
        check_run(*run)
    runs = tuple(run for run in runs if run[2] > 0)
    if not runs:
        return 0.0
    if any(noise_multiplier == 0 for noise_multiplier, _, _ in runs):
        return math.inf
    losses = [typical_loss(*run) for *run, _ in runs if run[1] < 1]
    if accountant == "pld" and delta < LEAST_PLD_DELTA and min(losses, default=0) > _LEAST_RDP_LOSS:
        accountant = "rdp"
    target = delta - kept_back(runs, delta)
    if target <= 0:
        return math.inf
    try:
        return float(_composed_once(runs, accountant).get_epsilon(target))
    except MemoryError:
        least = min(noise_multiplier for noise_multiplier, _, _ in runs)
        raise ValueError(
            f"Argument `noise_multiplier` is so small that accountant={accountant!r} needs more "
            f"memory than there is. Received: noise_multiplier={least}. Use more noise, or "
            "accountant='rdp'."
        ) from None


def kept_back(runs: Sequence[Run], delta: float) -> float:
    """Returns the part of delta that is reserved for events that the accountants do not cover.

    The reserved part is `delta * RESERVED_SHARE`, half of it for each of the two events that
    `epsilon` describes. With little noise or a tiny delta, half of the share is not enough for the
    second event (bounded noise). The reserved part is then larger.

    Args:
        runs: Sequence of tuples `(noise_multiplier, sampling_probability, steps)`.
        delta: Float in (0, 1).

    Returns:
        Float >= 0, which may exceed `delta`. If a run has no noise, the result is `delta`.
    """
    if not all(noise for noise, *_ in runs):
        return delta
    added = sum(
        added_delta(noise, probability, _MOST_PARAMETERS, steps, LARGEST_RADIUS)
        for noise, probability, steps in runs
    )
    return delta * RESERVED_SHARE + max(0.0, added - RESERVED_SHARE / 2 * delta)


@functools.lru_cache(maxsize=4)
def privacy_profile(runs: tuple[Run, ...]) -> tuple[float, Callable[[Any], Any]]:
    """Returns the privacy profile of runs: the least delta as a function of epsilon.

    The profile is the larger of two deltas, for adding and for removing an example. It is computed
    from privacy loss distributions, or by an exact formula if all batches are full.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`. The noise
            multipliers and the steps are > 0.

    Returns:
        A pair. First, a float: the epsilon at which delta is 1e-9. At larger epsilons, delta has
        rounding errors. Second, the profile: a function from a float64 array of epsilons >= 0 to
        an array of deltas, which are never too low.
    """
    if all(probability == 1 for _, probability, _ in runs):
        mu = math.sqrt(sum(steps / noise_multiplier**2 for noise_multiplier, _, steps in runs))
        mu = min(max(mu, 1e-12), 1e6)  # If mu is 1e6, delta is already rounded to 1.
        return exact_epsilon(mu, LEAST_PLD_DELTA), functools.partial(exact_delta, mu)
    accountant: Any = _composed_once(runs, "pld")
    losses: _Losses = accountant._pld
    sides = [_deltas_of(pmf.to_dense_pmf()) for pmf in (losses._pmf_remove, losses._pmf_add)]

    def deltas(epsilons):
        return np.maximum(*(side(epsilons) for side in sides))

    return float(accountant.get_epsilon(LEAST_PLD_DELTA)), deltas


class _Losses(Protocol):
    """The private attributes of dp_accounting's `PrivacyLossDistribution` that tfdpx reads."""

    _pmf_remove: Any
    _pmf_add: Any


class _DenseLosses(Protocol):
    size: int
    _discretization: float
    _lower_loss: int
    _infinity_mass: float
    _probs: np.ndarray


def _deltas_of(pmf: _DenseLosses):
    """Returns a function from a float array of epsilons >= 0 to an array of deltas.

    The corresponding function of dp_accounting is slower: it takes a second.

    Args:
        pmf: The probabilities of the privacy losses, a distribution of dp_accounting.
    """
    losses = ((np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization)[::-1]
    losses = losses[losses > 0]
    masses = pmf._probs[::-1][: len(losses)]
    with_example = pmf._infinity_mass + np.append(0.0, np.cumsum(masses))
    without = np.append(0.0, np.cumsum(masses * np.exp(-losses)))

    def deltas(epsilons):
        larger = np.searchsorted(-losses, -epsilons)  # The number of losses above each epsilon.
        return with_example[larger] - np.exp(epsilons) * without[larger]

    return deltas


def composed(runs: Sequence[Run], accountant: str) -> dp_accounting.PrivacyAccountant:
    """Returns an accountant of dp_accounting for all runs together.

    Args:
        runs: Sequence of tuples `(noise_multiplier, sampling_probability, steps)`. The noise
            multipliers and the steps are > 0.
        accountant: "pld", "rdp", "gdp" or "zcdp".
    """
    privacy_accountant = ACCOUNTANTS[accountant](runs)
    for run in runs:
        privacy_accountant.compose(event_of(*run))
    return privacy_accountant


_composed_once = functools.lru_cache(maxsize=4)(composed)


def event_of(
    noise_multiplier: float, sampling_probability: float, steps: int
) -> dp_accounting.DpEvent:
    """Returns the `DpEvent` of dp_accounting for `steps` updates of DP-SGD."""
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    return dp_accounting.SelfComposedDpEvent(event, steps)


def _pld_accountant(runs):
    """Returns a PLD accountant. It rounds privacy losses to a grid that suits the runs.

    Losses are rounded up, so epsilon is valid with any grid. But epsilon becomes too high if the
    spacing of the grid exceeds the loss of a typical step. A spacing of 10 times this loss makes
    epsilon 8% too high, and a spacing of 100 times this loss makes it three times as high. With
    the spacing that this function chooses, a fifth of this loss, epsilon is less than 0.5% too
    high. The grid is never coarser than the default of dp_accounting, except if epsilon is above
    about 10. Full batches need no grid.
    """
    if all(probability == 1 for _, probability, _ in runs):
        return FullBatchAccountant(exact_epsilon)
    losses = [(steps, typical_loss(*run)) for *run, steps in runs]
    # If epsilon is in the hundreds, a coarser grid is enough. A fine grid would take minutes and
    # gigabytes.
    most = [
        (steps, min(loss, run[0] ** -2)) for (steps, loss), run in zip(losses, runs, strict=True)
    ]
    square = sum(steps * loss**2 for steps, loss in most)
    about = square / 2 + math.sqrt(30 * square)
    return _PldAccountant(grid_of(losses, 0.2, max(_COARSEST_GRID, about * 1e-5)))


def grid_of(losses: Iterable[tuple[int, float]], part: float, coarsest: float) -> float:
    """Returns the spacing of a PLD accountant's grid: `part` times the loss of a typical step.

    Args:
        losses: Iterable of pairs, one for each run: its number of steps, and the typical privacy
            loss of a step.
        part: Float in (0, 1), the spacing divided by the loss of a typical step.
        coarsest: Float, the largest spacing that is returned.
    """
    losses = list(losses)
    square = sum(steps * loss**2 for steps, loss in losses)
    grid = part * square / sum(steps * loss for steps, loss in losses)
    return min(max(grid, _FINEST_GRID), coarsest)


class _PldAccountant(pld_privacy_accountant.PLDAccountant):
    """A PLD accountant that caches the privacy loss distribution of a step.

    Computing this distribution takes ten times as long as composing it.
    """

    _pld: privacy_loss_distribution.PrivacyLossDistribution

    def __init__(self, grid):
        super().__init__(_ADD_OR_REMOVE_ONE, value_discretization_interval=grid)
        self._grid = grid

    def _maybe_compose(self, event, count, do_compose):
        inner = getattr(event, "event", None)
        is_sampled = isinstance(event, dp_accounting.PoissonSampledDpEvent)
        if not (do_compose and is_sampled and isinstance(inner, dp_accounting.GaussianDpEvent)):
            return super()._maybe_compose(event, count, do_compose)
        step = _step(inner.noise_multiplier, event.sampling_probability, self._grid)
        self._pld = self._pld.compose(step.self_compose(count))
        return None


@functools.lru_cache(maxsize=2)
def _step(noise_multiplier, sampling_probability, grid):
    """Returns the privacy loss distribution of one step.

    The distribution is computed like dp_accounting's `from_gaussian_mechanism`, but with vectorized
    deltas.
    """
    masses = []
    for adjacency in (_Adjacency.REMOVE, _Adjacency.ADD):
        loss = _GaussianLoss(
            noise_multiplier, sampling_prob=sampling_probability, adjacency_type=adjacency
        )
        bounds = loss.connect_dots_bounds()
        lower = math.floor(bounds.epsilon_lower / grid)
        upper = math.ceil(bounds.epsilon_upper / grid)
        deltas = loss.get_delta_for_epsilon(np.arange(lower, upper + 1) * grid)
        masses.append(
            pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(grid, lower, upper, deltas)
        )
    return privacy_loss_distribution.PrivacyLossDistribution(*masses)


class _GaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):
    """The privacy loss of a sampled step, with vectorized deltas.

    dp_accounting inverts the loss for one epsilon at a time; this class inverts it for an array of
    epsilons.
    """

    def get_delta_for_epsilon(self, epsilon):
        removes = self.adjacency_type == _Adjacency.REMOVE
        sign = 1 if removes else -1
        # All losses lie on one side of a bound. At epsilons on the other side, no outcome has this
        # loss.
        inverse = sign * epsilon > math.log1p(-self.sampling_prob)
        deltas = np.where(removes & ~inverse, -np.expm1(np.minimum(epsilon, 0.0)), 0.0)
        losses = epsilon[inverse]
        full = sign * _unsampled_loss(sign * losses, self.sampling_prob)
        outcomes = -sign * 0.5 - full * self.standard_deviation**2
        shifted = np.exp(losses + self.mu_lower_log_cdf(outcomes))
        deltas[inverse] = self.mu_upper_cdf(outcomes) - shifted
        return np.clip(deltas, 0.0, 1.0)


def _unsampled_loss(loss, probability):
    """Converts the privacy loss of a sampled step to the loss of the same step without sampling.

    The result is `log(1 + (exp(loss) - 1) / probability)`, computed without overflow.
    """
    large = np.maximum(loss, 1.0)
    return np.where(
        loss > 1.0,
        large - math.log(probability) + np.log1p((probability - 1.0) * np.exp(-large)),
        np.log1p(np.expm1(np.minimum(loss, 1.0)) / probability),
    )


def _rdp_accountant(runs):
    """Returns an RDP accountant for runs; raises ValueError if rounding errors would be too large.

    dp_accounting computes the divergence of a sampled step as the log of a number near 1. If the
    typical loss of a step is 1e-5, the rounding error is 0.5%. If the typical loss is 1e-7, the
    divergence is rounded to zero.
    """
    for noise_multiplier, probability, _ in runs:
        if probability < 1 and typical_loss(noise_multiplier, probability) < _LEAST_RDP_LOSS:
            raise ValueError(
                "The accountant 'rdp' cannot resolve so small a privacy loss. Received: "
                f"noise_multiplier={noise_multiplier}, sampling_probability={probability}. "
                "Use accountant='pld', or less noise."
            )
    return rdp_accountant()


def rdp_accountant() -> rdp_privacy_accountant.RdpAccountant:
    """Returns a new RDP accountant for data sets that differ by adding or removing one example."""
    return _RdpAccountant(neighboring_relation=_ADD_OR_REMOVE_ONE)


class _RdpAccountant(rdp_privacy_accountant.RdpAccountant):
    """An RDP accountant that does not log which orders dp_accounting leaves out.

    Since its version 0.4.4, dp_accounting leaves out fractional orders that do not converge, and
    logs a line for each. Epsilon is then valid but higher. In a comparison of 252 runs with version
    0.4.3, epsilon was up to 3.1% higher if it was below 20, 9% higher at 50, and 120% higher at
    900. The accountant "pld" is not affected, because it uses no orders.
    """

    def compose(self, event, count=1):
        def is_shown(entry):
            return "Excluding this order" not in str(entry.msg)

        logger = logging.getLogger("absl")
        logger.addFilter(is_shown)
        try:
            return super().compose(event, count)
        finally:
            logger.removeFilter(is_shown)


def _full_batch_accountant(conversion):
    """Returns a function that makes an accountant for runs with full batches.

    The function raises ValueError for sampled runs.

    Args:
        conversion: Function from mu and delta to epsilon, as for `FullBatchAccountant`.
    """

    def accountant(runs):
        sampled = [probability for _, probability, _ in runs if probability < 1]
        if sampled:
            raise ValueError(
                "The accountants 'gdp' and 'zcdp' are only for full batches. Received: "
                f"sampling_probability={sampled[0]}. Use accountant='pld' or 'rdp'."
            )
        return FullBatchAccountant(conversion)

    return accountant


def typical_loss(noise_multiplier: float, sampling_probability: float) -> float:
    """Returns the typical privacy loss of a step: the square root of its chi-squared divergence."""
    return sampling_probability * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))


# From the name of an accountant to a function that returns a new `dp_accounting.PrivacyAccountant`.
# The function takes the runs that will be composed, tuples `(noise_multiplier,
# sampling_probability, steps)`. Neighbouring data sets differ by adding or removing one example.
ACCOUNTANTS = {
    "pld": _pld_accountant,
    "rdp": _rdp_accountant,
    "gdp": _full_batch_accountant(exact_epsilon),
    "zcdp": _full_batch_accountant(zcdp_epsilon),
}


def check_accountant(accountant: str) -> None:
    """Raises ValueError unless `accountant` is the name of an accountant."""
    check_choice("accountant", accountant, ACCOUNTANTS)


def check_delta(delta: Any) -> None:
    """Raises ValueError unless 0 < `delta` < 1."""
    hint = " Use a value well below 1/num_examples, e.g. 1e-5."
    is_valid = is_number(delta) and 0 < delta < 1
    require(is_valid, "delta", delta, "lie strictly between 0 and 1", hint)


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises ValueError unless `noise_multiplier` is 0 or a number in [1e-100, 1e100]."""
    # Converted to float64, because NumPy 2 would round these bounds to 0 and infinity in float32.
    noise = float(noise_multiplier) if is_number(noise_multiplier) else math.nan
    is_valid = noise == 0 or 1e-100 <= noise <= 1e100
    hint = " 0 trains without privacy. Other values lie in [1e-100, 1e100]."
    require(is_valid, "noise_multiplier", noise_multiplier, "be a finite number >= 0", hint)


def check_run(noise_multiplier: float, sampling_probability: float, steps: int) -> None:
    """Raises ValueError unless all three numbers are in range for a run of DP-SGD."""
    check_noise_multiplier(noise_multiplier)
    check_probability(sampling_probability, " It is batch_size / num_examples.")
    is_valid = is_integer(steps, 0) and steps <= _MOST_STEPS
    require(is_valid, "steps", steps, "be an integer >= 0 and at most 2**53")


def check_probability(sampling_probability: float, hint: str = "") -> None:
    """Raises ValueError unless 0 < `sampling_probability` <= 1."""
    is_valid = is_number(sampling_probability) and 0 < sampling_probability <= 1
    require(is_valid, "sampling_probability", sampling_probability, "lie in (0, 1]", hint)
