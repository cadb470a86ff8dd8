"""The epsilon of a person who has several rows of the data."""

import functools
import math
from typing import cast

import numpy as np
import scipy.stats
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from tfdpx._arguments import is_integer, require
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan

_COARSEST_GRID = 1e-2
# Standard deviations of the noise: beyond lies a probability of 1e-23, which counts as lost.
_TAIL = 10.0
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
    - "pld": the privacy loss distribution of the mixture, exact as "pld" is for one row;
    - "rdp": an upper bound, the lesser of two. Noise of variance s^2 is a sum of `k` of variance
      s^2 / k, one for each row: so `k` rows spend at most what one spends in `k` times the steps at
      noise s / sqrt(k). And an (e, d) of one row is (k e, d (exp(k e) - 1) / (exp(e) - 1)) of `k`
      (Vadhan 2017, "The Complexity of Differential Privacy", Lemma 2.2), for every e. It is loose
      where noise_multiplier is well below sqrt(k): at noise multiplier 1, delta 1e-6 and 782
      updates that draw each of 10,000 rows with probability 0.0064, 10 rows have 15.5, and the
      bound is 145.

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
    if accountant == "pld":
        return float(_losses(spent.runs, k).get_epsilon_for_delta(target))
    return _bound(spent.runs, k, at, accountant)


def _losses(runs, k):
    """The privacy loss distribution of these runs, for `k` rows together.

    Its grid is a twentieth of the loss of a typical step, at which epsilon is less than 0.1% too
    high.
    """
    typical = [(steps, k * accountants.typical_loss(*run)) for *run, steps in runs]
    grid = accountants.grid_of(typical, 0.05, _COARSEST_GRID)
    losses = [
        _losses_of_step(noise, probability, k, grid).self_compose(steps)
        for noise, probability, steps in runs
    ]
    return functools.reduce(lambda a, b: a.compose(b), losses)


def _losses_of_step(noise, probability, k, grid):
    """The privacy loss distribution of one step, by its divergences at the points of a grid.

    With the rows an outcome x is of sum_j binomial(k, probability)(j) N(j, noise^2), and without
    them of N(0, noise^2). The loss grows with x, so a divergence is of the outcomes beyond one.
    """
    with np.errstate(divide="ignore"):
        weights = scipy.stats.binom.logpmf(np.arange(k + 1), k, probability)
    rows = [(j, weight) for j, weight in enumerate(weights) if weight > -np.inf]

    def loss(x):
        parts = (weight + j * (2 * x - j) / (2 * noise**2) for j, weight in rows)
        return functools.reduce(np.logaddexp, parts)

    least, most = np.array(-_TAIL * noise), np.array(k + _TAIL * noise)

    def outcomes(losses):
        """Those of such losses, by bisection; `least` where no outcome has so small a loss."""
        low, high = np.full(losses.shape, least), np.full(losses.shape, most)
        for _ in range(60):
            middle = (low + high) / 2
            is_below = loss(middle) < losses
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        return low

    def removed(epsilon):
        x = outcomes(epsilon)
        with_rows = sum(np.exp(w) * scipy.stats.norm.sf(x, j, noise) for j, w in rows)
        return with_rows - np.exp(epsilon + scipy.stats.norm.logsf(x, scale=noise))

    def added(epsilon):
        x = outcomes(-epsilon)
        with_rows = sum(np.exp(epsilon + w + scipy.stats.norm.logcdf(x, j, noise)) for j, w in rows)
        return scipy.stats.norm.cdf(x, scale=noise) - with_rows

    masses = []
    for divergence, ends in ((removed, (least, most)), (added, (most, least))):
        sign = 1 if divergence is removed else -1
        first, last = (sign * float(loss(x)) for x in ends)
        lower, upper = math.floor(first / grid), math.ceil(last / grid)
        deltas = np.clip(divergence(np.arange(lower, upper + 1) * grid), 0.0, 1.0)
        make = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap
        masses.append(make(grid, lower, upper, deltas))
    return privacy_loss_distribution.PrivacyLossDistribution(*masses)


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
