"""Computes the privacy cost of a search for hyperparameters that releases only its best run.

The number of runs is random. The method is from Papernot and Steinke 2021 (arXiv:2110.03620),
"Hyperparameter Tuning with Renyi Differential Privacy". dp_accounting does the mathematics. A
search must meet three conditions:

- `draw_runs` draws the number of runs.
- All runs draw their hyperparameters independently from the same distribution.
- Each run, including its noisy score, has the same entries in the ledger.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dp_accounting

from tfdpx._arguments import is_number, require
from tfdpx.accounting import accountants

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Entry

_MOST_NOISE, _MOST_RUNS = 1e6, 1000


def draw_runs(mean: float) -> int:
    """Draws the number of runs of a search from a geometric distribution.

    The randomness comes from the operating system.

    Args:
        mean: Float > 1 and <= 1000, the mean number of runs.

    Raises:
        ValueError: If `mean` is out of range.
    """
    check_mean(mean)
    uniform = 1.0 - secrets.SystemRandom().random()
    return 1 + math.floor(math.log(uniform) / math.log1p(-1 / mean))


def selection_epsilon(entries: Sequence[Entry], delta: float, mean: float) -> float:
    """Returns the epsilon of a search that releases only the best of its runs.

    Guarantee: the release is (epsilon, delta)-differentially private for adding or removing one
    example, under the three conditions of this module. Epsilon is computed by RDP (Papernot and
    Steinke 2021, Theorem 2 with eta = 1).

    Args:
        entries: Sequence of `tfdpx.accounting.ledger.Entry`: all updates and releases of one run,
            including its noisy score.
        delta: Float in (0, 1).
        mean: Float > 1 and <= 1000, the mean number of runs.

    Raises:
        ValueError: If an argument is invalid, or an entry is not a Poisson sample with a known
            sampling probability.
    """
    accountants.check_delta(delta)
    event = _event(entries, mean)
    if not all(entry.noise_multiplier for entry in entries):
        return math.inf
    accountant = accountants.rdp_accountant().compose(event(1.0))
    return float(accountant.get_epsilon(_left_of(delta, mean)))


def selection_scale(entries: Sequence[Entry], target: float, delta: float, mean: float) -> float:
    """Returns the factor by which the noise must grow for a search to stay within an epsilon.

    If all noise multipliers are multiplied by this factor, `selection_epsilon` is at most `target`.
    No smaller factor is enough.

    Args:
        entries: As for `selection_epsilon`.
        target: Float > 0, the largest epsilon of the search.
        delta: Float in (0, 1).
        mean: Float > 1 and <= 1000, the mean number of runs.

    Raises:
        ValueError: If an argument is invalid, or an entry is not a Poisson sample with a known
            sampling probability.
    """
    least = min(entry.noise_multiplier for entry in entries)
    return dp_accounting.calibrate_dp_mechanism(
        accountants.rdp_accountant,
        _event(entries, mean),
        target,
        _left_of(delta, mean),
        dp_accounting.ExplicitBracketInterval(0.1 / least, _MOST_NOISE / least),
        tol=1e-5 / least,
    )


def check_mean(mean: Any) -> None:
    """Raises ValueError unless the mean number of runs is above 1 and at most 1,000."""
    is_valid = is_number(mean) and 1 < mean <= _MOST_RUNS
    must = f"be a number above 1, up to {_MOST_RUNS}"
    require(is_valid, "mean", mean, must, " It is the mean number of runs.")


def _left_of(delta, mean):
    """Returns delta without the reserved parts (`accountants.RESERVED_SHARE`) of `mean` runs."""
    return delta * (1 - mean * accountants.RESERVED_SHARE)


def _event(entries, mean):
    """Returns a function from a factor to the `DpEvent` of a search.

    All noise multipliers of the entries are multiplied by the factor.
    """
    check_mean(mean)
    for entry in entries:
        is_valid = entry.poisson_sampled and entry.sampling_probability is not None
        require(is_valid, "entries", entry, "hold exact entries of a known sampling probability")

    def event(scale):
        events = [
            accountants.event_of(scale * e.noise_multiplier, e.sampling_probability, e.steps)
            for e in entries
        ]
        composed = dp_accounting.ComposedDpEvent(events)
        return dp_accounting.dp_event.RepeatAndSelectDpEvent(composed, mean=mean, shape=1)

    return event
