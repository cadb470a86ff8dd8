"""The epsilon of Poisson-sampled Gaussian steps, computed by the accountants of dp_accounting."""

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

# The share of delta for events that no accountant covers: half for batches that overflow their
# capacity, half for the noise's finite tail. It raised an epsilon of 1.9 by a factor of 1 + 7e-6.
RESERVED_SHARE = 1e-4

_FINEST_GRID, _COARSEST_GRID = 1e-8, 1e-4
# Below it the rounding of "pld" matters: it was up to 3.4% too low at 1e-12, after 1e6 updates.
LEAST_PLD_DELTA = 1e-9
_LEAST_RDP_LOSS = 1e-5
# The size of a model, for the delta that the noise's largest value adds.
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
    """Returns the epsilon of `steps` updates of DP-SGD at `delta`.

    Guarantee: the outputs of all steps together are (epsilon, delta)-differentially private when
    data sets that differ by adding or removing one example are neighbours, each step draws every
    example independently with `sampling_probability` (Poisson sampling), no example changes the sum
    of a step by more than `l2_norm_clip` in L2 norm, and Gaussian noise of standard deviation
    `noise_multiplier * l2_norm_clip` is added to that sum. The arguments are public, because
    neighbours train with the same ones. So the number of examples, from which
    `sampling_probability` follows, is not protected (see `tfdpx.PrivacyPlan`).

    The share `RESERVED_SHARE` of delta is reserved for two events that the accountants do not
    cover: a step that draws more examples than its batch has rows for, and the largest value of the
    noise (`tfdpx.accounting.gaussian`). At noise multipliers below about 0.45, or deltas below
    1e-10, that value may add more. This is then subtracted from delta, for models of up to a
    billion weights.

    The mathematics comes from `dp_accounting`. "pld" composes privacy loss distributions
    (Doroshenko et al. 2022, "Connect the Dots") and is the tighter, except at deltas below 1e-9,
    where "rdp" is used instead because the rounding of "pld" matters there. "rdp" composes Renyi
    divergences (Mironov et al. 2019, "Renyi Differential Privacy of the Sampled Gaussian
    Mechanism") and converts them by Canonne et al. 2020, Proposition 12, like the accountant of De
    et al. 2022. Two are only for full batches (`sampling_probability=1`): "gdp" is exact, and
    "pld" agrees with it there; "zcdp" is the looser conversion of Bun and Steinke 2016.

    Args:
        noise_multiplier: Float >= 0. Standard deviation of the noise divided by the sensitivity.
        sampling_probability: Float in (0, 1].
        steps: Int >= 0. Number of updates.
        delta: Float in (0, 1).
        accountant: "pld", "rdp", "gdp" or "zcdp".

    Returns:
        Float. 0.0 when `steps` is 0, otherwise infinity when `noise_multiplier` is 0 or so small
        that nothing is left of delta.

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
        Float, as returned by `epsilon` for a single run, under the same neighbouring relation.

    Raises:
        ValueError: If an argument is out of range, or the accountant cannot resolve the loss.
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
    """Returns the part of delta reserved for batches that overflow and for the noise's tail.

    This is `RESERVED_SHARE` of it. With little noise or a tiny delta it is more, because the
    noise's largest value then adds more than its half of that share.

    Args:
        runs: Tuples `(noise_multiplier, sampling_probability, steps)`; without noise, all of delta.
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
    """Returns the least delta of runs as a function of epsilon, by privacy loss distributions.

    It is the larger one of adding and removing an example, and exact for full batches.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`, all with noise and
            steps.

    Returns:
        The epsilon at which delta is 1e-9, beyond which rounding matters, and a function from a
        float64 array of epsilons >= 0 to their deltas, which are never too low.
    """
    if all(probability == 1 for _, probability, _ in runs):
        mu = math.sqrt(sum(steps / noise_multiplier**2 for noise_multiplier, _, steps in runs))
        mu = min(max(mu, 1e-12), 1e6)  # At 1e6 delta is 1 in floats.
        return exact_epsilon(mu, LEAST_PLD_DELTA), functools.partial(exact_delta, mu)
    accountant: Any = _composed_once(runs, "pld")
    losses: _Losses = accountant._pld
    sides = [_deltas_of(pmf.to_dense_pmf()) for pmf in (losses._pmf_remove, losses._pmf_add)]

    def deltas(epsilons):
        return np.maximum(*(side(epsilons) for side in sides))

    return float(accountant.get_epsilon(LEAST_PLD_DELTA)), deltas


class _Losses(Protocol):
    """The private attributes of dp_accounting's distributions that are used here."""

    _pmf_remove: Any
    _pmf_add: Any


class _DenseLosses(Protocol):
    size: int
    _discretization: float
    _lower_loss: int
    _infinity_mass: float
    _probs: np.ndarray


def _deltas_of(pmf: _DenseLosses):
    """Returns a function from epsilons >= 0 to deltas; dp_accounting's own takes a second."""
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
    """Returns the accountant of dp_accounting after composing these runs.

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
    """Returns `steps` updates as an event of dp_accounting."""
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if sampling_probability < 1:
        event = dp_accounting.PoissonSampledDpEvent(sampling_probability, event)
    return dp_accounting.SelfComposedDpEvent(event, steps)


def _pld_accountant(runs):
    """Returns a PLD accountant with a grid that suits the runs.

    Any grid gives a valid epsilon, because losses are rounded so that none is underestimated. But a
    grid much coarser than the loss of a typical step overestimates it, by 8% at 10 times and
    threefold at 100 times; a fifth of it overestimates by less than 0.5%. dp_accounting's default
    is the coarsest grid used. Without sampling no grid is needed.
    """
    if all(probability == 1 for _, probability, _ in runs):
        return FullBatchAccountant(exact_epsilon)
    losses = [(steps, typical_loss(*run)) for *run, steps in runs]
    # An epsilon in the hundreds needs no grid so fine, which would take minutes and gigabytes.
    most = [
        (steps, min(loss, run[0] ** -2)) for (steps, loss), run in zip(losses, runs, strict=True)
    ]
    square = sum(steps * loss**2 for steps, loss in most)
    about = square / 2 + math.sqrt(30 * square)
    return _PldAccountant(grid_of(losses, 0.2, max(_COARSEST_GRID, about * 1e-5)))


def grid_of(losses: Iterable[tuple[int, float]], part: float, coarsest: float) -> float:
    """Returns the grid of a PLD accountant: a part of the loss of a typical step.

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
    """Caches the distribution of a step, because making it takes ten times as long as composing."""

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
    """Returns the privacy loss distribution of one step, made like `from_gaussian_mechanism`."""
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
    """The loss of a sampled step, inverted for all values at once; dp_accounting inverts each."""

    def get_delta_for_epsilon(self, epsilon):
        removes = self.adjacency_type == _Adjacency.REMOVE
        sign = 1 if removes else -1
        # No outcome, however far out, has a loss on the other side of this bound.
        inverse = sign * epsilon > math.log1p(-self.sampling_prob)
        deltas = np.where(removes & ~inverse, -np.expm1(np.minimum(epsilon, 0.0)), 0.0)
        losses = epsilon[inverse]
        full = sign * _unsampled_loss(sign * losses, self.sampling_prob)
        outcomes = -sign * 0.5 - full * self.standard_deviation**2
        shifted = np.exp(losses + self.mu_lower_log_cdf(outcomes))
        deltas[inverse] = self.mu_upper_cdf(outcomes) - shifted
        return np.clip(deltas, 0.0, 1.0)


def _unsampled_loss(loss, probability):
    """Returns log(1 + (exp(loss) - 1) / probability), without overflow for large losses."""
    large = np.maximum(loss, 1.0)
    return np.where(
        loss > 1.0,
        large - math.log(probability) + np.log1p((probability - 1.0) * np.exp(-large)),
        np.log1p(np.expm1(np.minimum(loss, 1.0)) / probability),
    )


def _rdp_accountant(runs):
    """Returns an RDP accountant, if it can resolve the runs.

    The divergence of a sampled step is computed as the log of a number near 1. Rounding therefore
    costs 0.5% at a typical loss of 1e-5, and at 1e-7 it turns a positive divergence into zero.
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
    """Returns a new RDP accountant, under adding or removing one example."""
    return _RdpAccountant(neighboring_relation=_ADD_OR_REMOVE_ONE)


class _RdpAccountant(rdp_privacy_accountant.RdpAccountant):
    """Does not log a line for each order that dp_accounting leaves out, from its 0.4.4 on.

    Without these orders epsilon is valid but higher: up to 3.1% where it is below 20 (252 runs
    compared with 0.4.3), 9% at 50, 120% at 900. "pld" does not need them.
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
    """Returns a factory like the others, for an accountant that refuses sampled runs."""

    def accountant(runs):
        sampled = [probability for _, probability, _ in runs if probability < 1]
        if sampled:
            raise ValueError(
                "The accountants 'gdp' and 'zcdp' are for full batches alone. Received: "
                f"sampling_probability={sampled[0]}. Use accountant='pld' or 'rdp'."
            )
        return FullBatchAccountant(conversion)

    return accountant


def typical_loss(noise_multiplier: float, sampling_probability: float) -> float:
    """Returns the root of the chi-squared divergence of one step, roughly its privacy loss."""
    return sampling_probability * math.sqrt(math.expm1(min(noise_multiplier**-2, 50.0)))


# From the name in a plan to a function of the runs, tuples `(noise_multiplier,
# sampling_probability, steps)`, to a new `dp_accounting.PrivacyAccountant` of add-or-remove-one.
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
    """Raises ValueError unless `noise_multiplier` is 0 or a number within safe bounds."""
    # In float64: NumPy 2 would compare a float32 with 0 and infinity.
    noise = float(noise_multiplier) if is_number(noise_multiplier) else math.nan
    is_valid = noise == 0 or 1e-100 <= noise <= 1e100
    hint = " 0 trains without privacy. Other values lie in [1e-100, 1e100]."
    require(is_valid, "noise_multiplier", noise_multiplier, "be a finite number >= 0", hint)


def check_run(noise_multiplier: float, sampling_probability: float, steps: int) -> None:
    """Raises ValueError unless the three numbers describe a run of DP-SGD."""
    check_noise_multiplier(noise_multiplier)
    check_probability(sampling_probability, " It is batch_size / num_examples.")
    is_valid = is_integer(steps, 0) and steps <= _MOST_STEPS
    require(is_valid, "steps", steps, "be an integer >= 0 and at most 2**53")


def check_probability(sampling_probability: float, hint: str = "") -> None:
    """Raises ValueError unless 0 < `sampling_probability` <= 1."""
    is_valid = is_number(sampling_probability) and 0 < sampling_probability <= 1
    require(is_valid, "sampling_probability", sampling_probability, "lie in (0, 1]", hint)
