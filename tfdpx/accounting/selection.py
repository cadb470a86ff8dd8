"""What it costs to train a random number of times and release the best alone.

Papernot and Steinke 2021 (arXiv:2110.03620), "Hyperparameter Tuning with Renyi Differential
Privacy"; the mathematics is dp_accounting's. It holds when the number of runs is drawn as said
here, independently of the data; each run draws its hyperparameters from one distribution, whatever
the others found; and each run, its score included, has the privacy of the same Gaussians.
"""

import math
import secrets
from collections.abc import Sequence

import dp_accounting

from tfdpx._arguments import is_number, require
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Entry

_MOST_NOISE, _MOST_RUNS = 1e6, 1000


def draw_runs(mean: float) -> int:
    """The number of runs: geometric with this mean, from the operating system's randomness.

    Args:
        mean: Float > 1 and <= 1000.

    Raises:
        ValueError: If `mean` is out of its range.
    """
    check_mean(mean)
    uniform = 1.0 - secrets.SystemRandom().random()
    return 1 + math.floor(math.log(uniform) / math.log1p(-1 / mean))


def selection_epsilon(entries: Sequence[Entry], delta: float, mean: float) -> float:
    """The epsilon of releasing the best of a geometric number of runs.

    Guarantee: under adding or removing one example, by RDP (Papernot and Steinke 2021, Theorem 2
    at shape 1), as the head of this file says.

    Args:
        entries: Sequence of `tfdpx.accounting.ledger.Entry`: what a run releases, with its score.
        delta: Float in (0, 1).
        mean: Float > 1 and <= 1000, mean number of runs.

    Raises:
        ValueError: If an argument does not fit, or an entry is not exactly sampled.
    """
    check_mean(mean)
    accountants.check_delta(delta)
    _check_exact(entries)
    if not all(entry.noise_multiplier for entry in entries):
        return math.inf
    accountant = accountants.rdp_accountant().compose(_event(entries, 1.0, mean))
    return float(accountant.get_epsilon(_left_of(delta, mean)))


def selection_scale(entries: Sequence[Entry], target: float, delta: float, mean: float) -> float:
    """The least factor of all noise multipliers that keeps `selection_epsilon` within `target`.

    Args:
        entries: As of `selection_epsilon`.
        target: Float > 0.
        delta: Float in (0, 1).
        mean: Float > 1 and <= 1000, mean number of runs.

    Raises:
        ValueError: If an argument does not fit, or an entry is not exactly sampled.
    """
    check_mean(mean)
    _check_exact(entries)
    least = min(entry.noise_multiplier for entry in entries)
    return dp_accounting.calibrate_dp_mechanism(
        accountants.rdp_accountant,
        lambda scale: _event(entries, scale, mean),
        target,
        _left_of(delta, mean),
        dp_accounting.ExplicitBracketInterval(0.1 / least, _MOST_NOISE / least),
        tol=1e-5 / least,
    )


def check_mean(mean: float) -> None:
    """Raises ValueError unless `mean`, the mean number of runs, is above 1 and at most 1,000."""
    fits = is_number(mean) and 1 < mean <= _MOST_RUNS
    must = f"be a number above 1, up to {_MOST_RUNS}"
    require(fits, "mean", mean, must, " It is the mean number of runs.")


def _left_of(delta, mean):
    """What is left of delta once the tail of the noise is paid for in each run."""
    return delta * (1 - mean * accountants.RESERVED_SHARE)


def _check_exact(entries):
    for entry in entries:
        fits = entry.poisson_sampled and entry.sampling_probability is not None
        require(fits, "entries", entry, "hold exact entries of a known sampling probability")


def _event(entries, scale, mean):
    events = [
        accountants.event_of(
            scale * entry.noise_multiplier, entry.sampling_probability, entry.steps
        )
        for entry in entries
    ]
    composed = dp_accounting.ComposedDpEvent(events)
    return dp_accounting.dp_event.RepeatAndSelectDpEvent(composed, mean=mean, shape=1)
