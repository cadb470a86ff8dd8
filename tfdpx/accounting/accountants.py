"""Epsilon of Poisson-sampled Gaussian steps, by the accountants of dp_accounting."""

import functools
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

# Of delta, kept back for what no accountant sees: half for batches that overflow their capacity,
# half for the noise's finite tail. It raised epsilon by 7e-6 of itself in a run of epsilon 1.9.
RESERVED_SHARE = 1e-4

_FINEST_GRID, _COARSEST_GRID = 1e-8, 1e-4
# Below it the rounding of "pld" counts: it was up to 3.4% too low at 1e-12, after 1e6 updates.
LEAST_PLD_DELTA = 1e-9
_LEAST_RDP_LOSS = 1e-5
# Of a model, for what the noise's largest value adds to delta.
_MOST_PARAMETERS = 10**9
_MOST_STEPS = 2**53

# Noise multiplier, sampling probability and steps.
Run = tuple[float, float, int]


def epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
) -> float:
    """The epsilon of `steps` updates of DP-SGD at `delta`.

    Guarantee: the outputs of all steps together are (epsilon, delta)-differentially private when
    data sets that differ by adding or removing one example are neighbours, each step draws every
    example independently with `sampling_probability` (Poisson sampling), no example changes the sum
    of a step by more than `l2_norm_clip` in L2 norm, and Gaussian noise of standard deviation
    `noise_multiplier * l2_norm_clip` is added to that sum. The arguments are public: neighbours
    train with the same ones, so the number of examples, on which `sampling_probability` rests, is
    not protected (see `tfdpx.PrivacyPlan`).

    The share `RESERVED_SHARE` of delta is left to what the accountants do not see: a step that
    draws more examples than its batch has rows for, and the largest value of the noise
    (`tfdpx.accounting.gaussian`). At noise multipliers below some 0.45, or deltas below 1e-10,
    that value may add more: then it is taken off delta, for models of up to a billion weights.

    The mathematics is `dp_accounting`'s. "pld" composes privacy loss distributions (Doroshenko et
    al. 2022, "Connect the Dots") and is the tighter but at deltas below 1e-9, where its rounding
    counts, so that "rdp" is taken. "rdp" composes Renyi divergences (Mironov et
    al. 2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism") and converts them by
    Canonne et al. 2020, Proposition 12: the accountant of De et al. 2022. Two know full batches
    alone (`sampling_probability=1`): "gdp" is exact, and "pld" agrees with it there; "zcdp" is the
    looser conversion of Bun and Steinke 2016.

    Args:
        noise_multiplier: Float >= 0. Standard deviation of the noise over the sensitivity.
        sampling_probability: Float in (0, 1].
        steps: Int >= 0. Number of updates.
        delta: Float in (0, 1).
        accountant: "pld", "rdp", "gdp" or "zcdp".

    Returns:
        Float. 0.0 when `steps` is 0, else infinity when `noise_multiplier` is 0, or so small that
        nothing is left of delta.

    Raises:
        ValueError: If an argument is out of its range.
    """
    return composed_epsilon(((noise_multiplier, sampling_probability, steps),), delta, accountant)


@functools.lru_cache(maxsize=4096)
def composed_epsilon(runs: tuple[Run, ...], delta: float, accountant: str = "pld") -> float:
    """The epsilon at `delta` of several runs of DP-SGD on the same data, one after another.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`.
        delta: Float in (0, 1).
        accountant: "pld", "rdp", "gdp" or "zcdp".

    Returns:
        Float, as `epsilon` returns for a single run and under the same neighbouring relation.

    Raises:
        ValueError: If an argument is out of its range, or the accountant cannot resolve the loss.
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
            f"Argument `noise_multiplier` is so small that accountant={accountant!r} does not fit "
            f"into memory. Received: noise_multiplier={least}. Give more noise, or "
            "accountant='rdp'."
        ) from None


def kept_back(runs: Sequence[Run], delta: float) -> float:
    """The part of delta that no accountant spends: for batches that overflow and the noise's tail.

    It is `RESERVED_SHARE` of it, and more where there is little noise or delta is tiny: then the
    noise's largest value adds more than its half of that.

    Args:
        runs: Tuples `(noise_multiplier, sampling_probability, steps)`; without noise it is all.
        delta: Float in (0, 1).
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
    """The least delta of runs as a function of epsilon, by privacy loss distributions.

    It is the larger of those of adding and of removing one example; exact for full batches.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`, all with noise and
            steps.

    Returns:
        The epsilon at which delta is 1e-9, below which rounding counts, and a function from a
        float64 array of epsilons >= 0 to their deltas, not too low.
    """
    if all(probability == 1 for _, probability, _ in runs):
        mu = math.sqrt(sum(steps / noise_multiplier**2 for noise_multiplier, _, steps in runs))
        mu = min(max(mu, 1e-12), 1e6)  # At the latter delta is 1 in floats.
        return exact_epsilon(mu, LEAST_PLD_DELTA), functools.partial(exact_delta, mu)
    accountant: Any = _composed_once(runs, "pld")
    losses: _Losses = accountant._pld
    sides = [_deltas_of(pmf.to_dense_pmf()) for pmf in (losses._pmf_remove, losses._pmf_add)]

    def deltas(epsilons):
        return np.maximum(*(side(epsilons) for side in sides))

    return float(accountant.get_epsilon(LEAST_PLD_DELTA)), deltas


class _Losses(Protocol):
    """The private attributes of dp_accounting's distributions that are read here."""

    _pmf_remove: Any
    _pmf_add: Any


class _DenseLosses(Protocol):
    size: int
    _discretization: float
    _lower_loss: int
    _infinity_mass: float
    _probs: np.ndarray


def _deltas_of(pmf: _DenseLosses):
    """A function from epsilons >= 0 to deltas, for which dp_accounting's takes a second."""
    losses = ((np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization)[::-1]
    losses = losses[losses > 0]
    masses = pmf._probs[::-1][: len(losses)]
    with_example = pmf._infinity_mass + np.append(0.0, np.cumsum(masses))
    without = np.append(0.0, np.cumsum(masses * np.exp(-losses)))

    def deltas(epsilons):
        larger = np.searchsorted(-losses, -epsilons)  # Losses above epsilon.
        return with_example[larger] - np.exp(epsilons) * without[larger]

    return deltas


def composed(runs: Sequence[Run], accountant: str) -> dp_accounting.PrivacyAccountant:
    """The accountant of dp_accounting that has seen these runs.

    Args:
        runs: Tuples `(noise_multiplier, sampling_probability, steps)`, all with noise and steps.
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
    """What `steps` updates did, in the terms of dp_accounting."""
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    return dp_accounting.SelfComposedDpEvent(event, steps)


def _pld_accountant(runs):
    """A PLD accountant whose grid suits the runs.

    Any grid gives a valid epsilon: losses are rounded such that none is underestimated. But one
    much coarser than the loss of a typical step overestimates it, by 8% at 10 times and threefold
    at 100 times; a fifth of it overestimates by less than 0.5%. dp_accounting's default is the
    coarsest used. Without sampling no grid is needed.
    """
    if all(probability == 1 for _, probability, _ in runs):
        return FullBatchAccountant(exact_epsilon)
    losses = [(steps, typical_loss(*run)) for *run, steps in runs]
    # Of hundreds epsilon needs no grid so fine, which would take minutes and gigabytes.
    most = [
        (steps, min(loss, run[0] ** -2)) for (steps, loss), run in zip(losses, runs, strict=True)
    ]
    square = sum(steps * loss**2 for steps, loss in most)
    about = square / 2 + math.sqrt(30 * square)
    return _PldAccountant(grid_of(losses, 0.2, max(_COARSEST_GRID, about * 1e-5)))


def grid_of(losses: Iterable[tuple[int, float]], part: float, coarsest: float) -> float:
    """The grid of a PLD accountant: a part of the loss of a typical step.

    Args:
        losses: Pairs of a number of steps and the typical loss of each.
        part: Float in (0, 1).
        coarsest: Float, the coarsest grid.
    """
    losses = list(losses)
    square = sum(steps * loss**2 for steps, loss in losses)
    grid = part * square / sum(steps * loss for steps, loss in losses)
    return min(max(grid, _FINEST_GRID), coarsest)


class _PldAccountant(pld_privacy_accountant.PLDAccountant):
    """Keeps the distribution of a step: making it takes ten times as long as composing it."""

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
    """The privacy loss distribution of one step, as `from_gaussian_mechanism` makes it."""
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
    """The loss of a sampled step: dp_accounting inverts it value by value, this one all at once."""

    def get_delta_for_epsilon(self, epsilon):
        removes = self.adjacency_type == _Adjacency.REMOVE
        sign = 1 if removes else -1
        # Losses on the other side of this bound are reached by no outcome, however far out.
        inverse = sign * epsilon > math.log1p(-self.sampling_prob)
        deltas = np.where(removes & ~inverse, -np.expm1(np.minimum(epsilon, 0.0)), 0.0)
        losses = epsilon[inverse]
        full = sign * _unsampled_loss(sign * losses, self.sampling_prob)
        outcomes = -sign * 0.5 - full * self.standard_deviation**2
        shifted = np.exp(losses + self.mu_lower_log_cdf(outcomes))
        deltas[inverse] = self.mu_upper_cdf(outcomes) - shifted
        return np.clip(deltas, 0.0, 1.0)


def _unsampled_loss(loss, probability):
    """log(1 + (exp(loss) - 1) / probability), without overflow where the loss is large."""
    large = np.maximum(loss, 1.0)
    return np.where(
        loss > 1.0,
        large - math.log(probability) + np.log1p((probability - 1.0) * np.exp(-large)),
        np.log1p(np.expm1(np.minimum(loss, 1.0)) / probability),
    )


def _rdp_accountant(runs):
    """An RDP accountant, if it can resolve the runs.

    The divergence of a sampled step is computed as the log of a number near 1: rounding costs 0.5%
    at a typical loss of 1e-5, and at 1e-7 makes a divergence zero that is not.
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
    """A fresh RDP accountant, under adding or removing one example."""
    return rdp_privacy_accountant.RdpAccountant(neighboring_relation=_ADD_OR_REMOVE_ONE)


def _full_batch_accountant(conversion):
    """A factory like the others, of an accountant that refuses sampled runs."""

    def accountant(runs):
        sampled = [probability for _, probability, _ in runs if probability < 1]
        if sampled:
            raise ValueError(
                "The accountants 'gdp' and 'zcdp' know full batches alone. Received: "
                f"sampling_probability={sampled[0]}. Use accountant='pld' or 'rdp'."
            )
        return FullBatchAccountant(conversion)

    return accountant


def typical_loss(noise_multiplier: float, sampling_probability: float) -> float:
    """The root of the chi-squared divergence of one step: about its privacy loss."""
    return sampling_probability * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))


# By the name that a plan gives: functions of the runs, tuples `(noise_multiplier,
# sampling_probability, steps)`, to a fresh `dp_accounting.PrivacyAccountant` of add-or-remove-one.
ACCOUNTANTS = {
    "pld": _pld_accountant,
    "rdp": _rdp_accountant,
    "gdp": _full_batch_accountant(exact_epsilon),
    "zcdp": _full_batch_accountant(zcdp_epsilon),
}


def check_accountant(accountant: str) -> None:
    """Raises ValueError unless `accountant` names an accountant."""
    check_choice("accountant", accountant, ACCOUNTANTS)


def check_delta(delta: Any) -> None:
    """Raises ValueError unless 0 < `delta` < 1."""
    hint = " Use something well below 1/num_examples, e.g. 1e-5."
    fits = is_number(delta) and 0 < delta < 1
    require(fits, "delta", delta, "lie strictly between 0 and 1", hint)


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Raises ValueError unless `noise_multiplier` is 0 or a number whose square is a float."""
    fits = is_number(noise_multiplier) and (not noise_multiplier or 1e-100 <= noise_multiplier)
    fits = fits and noise_multiplier <= 1e100
    hint = " 0 trains without privacy. Others lie in [1e-100, 1e100]."
    require(fits, "noise_multiplier", noise_multiplier, "be a finite number >= 0", hint)


def check_run(noise_multiplier: float, sampling_probability: float, steps: int) -> None:
    """Raises ValueError unless the three numbers describe a run of DP-SGD."""
    check_noise_multiplier(noise_multiplier)
    check_probability(sampling_probability, " It is batch_size / num_examples.")
    fits = is_integer(steps, 0) and steps <= _MOST_STEPS
    require(fits, "steps", steps, "be an integer >= 0 and at most 2**53")


def check_probability(sampling_probability: float, hint: str = "") -> None:
    """Raises ValueError unless 0 < `sampling_probability` <= 1."""
    fits = is_number(sampling_probability) and 0 < sampling_probability <= 1
    require(fits, "sampling_probability", sampling_probability, "lie in (0, 1]", hint)
