"""What it costs to train a random number of times and release the best alone.

Papernot and Steinke 2021 (arXiv:2110.03620), "Hyperparameter Tuning with Renyi Differential
Privacy"; the mathematics is dp_accounting's. It holds when the number of runs is drawn as said
here, independently of the data; each run draws its hyperparameters from one distribution, whatever
the others found; and each run, its score included, has the privacy of `steps` full-batch Gaussians.
"""

import math
import secrets

import dp_accounting
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants

_MOST_NOISE = 1e6


def draw_runs(mean):
    """The number of runs: geometric with this mean, from the operating system's randomness.

    Args:
        mean: Float > 1.
    """
    check_mean(mean)
    uniform = 1.0 - secrets.SystemRandom().random()
    return 1 + math.floor(math.log(uniform) / math.log1p(-1 / mean))


def selection_epsilon(noise_multiplier, steps, delta, mean):
    """The epsilon of releasing the best of a geometric number of runs.

    Guarantee: under adding or removing one example, by RDP (Papernot and Steinke 2021, Theorem 2
    at shape 1), as the head of this file says.

    Args:
        noise_multiplier: Float > 0.
        steps: Int, full-batch Gaussian releases of a run.
        delta: Float in (0, 1).
        mean: Float > 1, mean number of runs.
    """
    check_mean(mean)
    accountants.check_run(noise_multiplier, 1.0, steps)
    accountants.check_delta(delta)
    if not noise_multiplier:
        return math.inf
    judge = _accountant().compose(_event(noise_multiplier, steps, mean))
    return float(judge.get_epsilon(delta * (1 - accountants.RESERVED_SHARE)))


def selection_noise_multiplier(target, steps, delta, mean):
    """The least noise multiplier of the runs whose `selection_epsilon` is at most `target`.

    Args:
        target: Float > 0.
        steps: Int, full-batch Gaussian releases of a run.
        delta: Float in (0, 1).
        mean: Float > 1, mean number of runs.
    """
    check_mean(mean)
    check_positive_integer("steps", steps)
    return dp_accounting.calibrate_dp_mechanism(
        _accountant,
        lambda sigma: _event(sigma, steps, mean),
        target,
        delta * (1 - accountants.RESERVED_SHARE),
        dp_accounting.ExplicitBracketInterval(0.1, _MOST_NOISE),
        tol=1e-5,
    )


def check_mean(mean):
    """Raises ValueError unless `mean`, the mean number of runs, is above 1 and finite."""
    fits = is_number(mean) and 1 < mean < math.inf
    require(fits, "mean", mean, "be a number above 1", " It is the mean number of runs.")


def _accountant():
    return rdp_privacy_accountant.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    )


def _event(noise_multiplier, steps, mean):
    run = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(noise_multiplier), steps)
    return dp_accounting.dp_event.RepeatAndSelectDpEvent(run, mean=mean, shape=1)
