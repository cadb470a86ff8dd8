"""The epsilon of a person who has several rows of the data."""

import math
from collections.abc import Sequence
from typing import Any, cast

import dp_accounting
import numpy as np
import scipy.stats
from dp_accounting.pld import pld_privacy_accountant

from tfdpx._arguments import is_integer, require
from tfdpx._warnings import warn
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan

# From dp_accounting 0.5 on.
_MIXTURE: Any = getattr(dp_accounting.dp_event, "MixtureOfGaussiansDpEvent", None)
_COARSEST_GRID = 1e-2
# Over the squared noise multiplier.
_MOST_ROWS = 10


def group_epsilon(
    spent: PrivacyPlan | Ledger,
    k: int,
    *,
    delta: float | None = None,
    accountant: str | None = None,
) -> float:
    """The epsilon under adding or removing `k` rows together, such as all images of one person.

    It is more than `k` times the epsilon of one row at the same delta: with full batches, noise
    multiplier 1, one update and delta 1e-5 one row has 4.377 and two have 9.997.

    Guarantee: as of `tfdpx.accounting.epsilon`, for data sets that differ in `k` rows, whatever
    they hold, at the same sampling probabilities. Each update draws each row for itself, so their
    number in a draw is binomial, and the sum moves by at most that many clips: a mixture of
    Gaussians (Choquette-Choo et al. 2023, "Privacy Amplification for Matrix Mechanisms", Corollary
    4.7; Ganesh 2024, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of
    Gaussians Mechanisms"). How it is computed:

    - full batches: exact, the Gaussian mechanism with a sensitivity of `k`;
    - "pld" and dp_accounting 0.5 or later: the mixture, exact as "pld" is for one row;
    - else (dp_accounting 0.4.3, or "rdp") an upper bound, the lesser of two. Noise of variance s^2
      is a sum of `k` of variance s^2 / k, one for each row: so `k` rows spend at most what one
      spends in `k` times the steps at noise s / sqrt(k). And an (e, d) of one row is
      (k e, d (exp(k e) - 1) / (exp(e) - 1)) of `k` (Vadhan 2017, "The Complexity of Differential
      Privacy", Lemma 2.2), for every e. At noise multiplier 1, delta 1e-6 and 782 updates that draw
      each of 10,000 rows with probability 0.0064, 3 rows have 3.94, and the bound is 4.48. It is
      loose where noise_multiplier is well below sqrt(k): 10 rows have 15.5, the bound is 145.

    `RESERVED_SHARE` of delta is kept back, as for one row. For `k > 1` it does not cover all that
    no accountant sees. That an update draws more than its batch has rows for has a probability of
    at most `delta * 5e-5`, with the rows and without: so far the training may be from the one that
    is judged. And tfdpx's noise ends at 9.49 standard deviations: where `k` is more
    than twice `noise_multiplier`, delta is larger by at most what
    `tfdpx.accounting.noise_tail.added_delta` gives at `noise_multiplier / k`.

    Args:
        spent: A `tfdpx.PrivacyPlan`, all of whose steps count, or a `tfdpx.accounting.Ledger`. As
            for one row it is an approximation where batches are not Poisson samples, and a lower
            bound unless `ledger.is_complete`.
        k: Int >= 0, rows of one person; at most the plan's `num_examples`.
        delta: Float in (0, 1). The plan's if left out; a ledger has none.
        accountant: "pld" or "rdp"; for full batches also "gdp" or "zcdp". The plan's if left out;
            "pld" for a ledger.

    Returns:
        Float. 0.0 if `k` or the number of updates is 0, else infinity if an update had no noise. At
        `k=1` what the plan or ledger says. It takes seconds, minutes for hundreds of rows.

    Raises:
        TypeError: If `spent` is neither a plan nor a ledger.
        ValueError: If an argument is out of its range, or a sampling probability is unknown.

    Warns:
        UserWarning: If "pld" gives an upper bound because dp_accounting is older than 0.5.

    Example:
    >>> plan = PrivacyPlan(1000, batch_size=1000, steps=1, noise_multiplier=1.0, delta=1e-5)
    >>> round(group_epsilon(plan, 1), 3), round(group_epsilon(plan, 2), 3)
    (4.377, 9.997)
    """
    require(is_integer(k, 0), "k", k, "be an integer >= 0", " It counts the rows of one person.")
    if isinstance(spent, PrivacyPlan):
        hint = f" The plan has num_examples={spent.num_examples}."
        require(k <= spent.num_examples, "k", k, "not exceed the plan's num_examples", hint)
        delta = spent.delta if delta is None else delta
        accountant = accountant or spent.accountant
        spent = spent.ledger_at(spent.steps)
    elif not isinstance(spent, Ledger):
        raise TypeError(
            "Argument `spent` must be a tfdpx.PrivacyPlan or a tfdpx.accounting.Ledger. Received: "
            f"spent={spent!r}. The ledger of a trained model is `model.optimizer.ledger`."
        )
    accountants.check_delta(delta)
    accountant, k, at = accountant or "pld", int(k), float(cast(float, delta))
    alone = spent.epsilon(at, accountant)
    if k == 0 or not spent.runs:
        return 0.0
    if k == 1 or alone == math.inf:
        return alone
    if all(probability == 1 for _, probability, _ in spent.runs):
        return _split(spent.runs, k, at, accountant)
    target = at * (1 - accountants.RESERVED_SHARE)
    if accountant == "pld" and _MIXTURE:
        return float(mixture_accountant(spent.runs, k).get_epsilon(target))
    if accountant == "pld":
        warn(
            f"The epsilon of k={k} rows is an upper bound, since dp_accounting is older than 0.5. "
            "Python 3.13 or later has one that computes it exactly."
        )
    return _bound(spent.runs, k, at, accountant)


def mixture_accountant(
    runs: Sequence[accountants.Run], k: int
) -> pld_privacy_accountant.PLDAccountant:
    """The PLD accountant that has seen these runs, as `k` rows together.

    Needs dp_accounting 0.5 or later. Its grid is a twentieth of the loss of a typical step, at
    which epsilon is less than 0.1% too high.

    Args:
        runs: Tuples `(noise_multiplier, sampling_probability, steps)`, all with noise and steps.
        k: Int >= 1.
    """
    losses = [(steps, k * accountants.typical_loss(*run)) for *run, steps in runs]
    accountant = pld_privacy_accountant.PLDAccountant(
        value_discretization_interval=accountants.grid_of(losses, 0.05, _COARSEST_GRID)
    )
    for noise_multiplier, probability, steps in runs:
        drawn = np.arange(k + 1)
        weights = scipy.stats.binom.pmf(drawn, k, probability)
        event = _MIXTURE(noise_multiplier, drawn.astype(float).tolist(), weights.tolist())
        accountant.compose(event, steps)
    return accountant


def _bound(runs, k, delta, accountant):
    """An upper bound by accountants of one row: the lesser of the two of `group_epsilon`."""
    target = delta * (1 - accountants.RESERVED_SHARE)
    of_one_row = accountants.composed(runs, accountant)

    def is_enough(each):
        grown = (k - 1) * each + math.log(-math.expm1(-k * each) / -math.expm1(-each))
        return of_one_row.get_delta(each) <= target * math.exp(-grown)

    # At so little noise "pld" needs too much memory, and epsilon is in the hundreds anyway.
    is_feasible = all(k <= _MOST_ROWS * noise**2 for noise, _, _ in runs)
    split = _split(runs, k, delta, accountant if is_feasible else "rdp")
    low, high = of_one_row.get_epsilon(target), split / k
    if not (low < high < math.inf and is_enough(high)):
        return split
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return k * high  # Not `low`: here it was found to hold.


def _split(runs, k, delta, accountant):
    """Epsilon by noise that is split among the rows; exact for full batches."""
    parts = tuple((noise / math.sqrt(k), *drawn, k * steps) for noise, *drawn, steps in runs)
    return accountants.composed_epsilon(parts, delta, accountant)
