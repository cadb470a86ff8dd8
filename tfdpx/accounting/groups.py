"""Accounting for groups of rows, and for batches that are not Poisson samples.

`group_epsilon` returns the epsilon that protects a person with several rows of the data. `Sampling`
covers other ways to draw batches and other neighbouring relations; it refuses combinations that no
accountant covers. The noise multiplier is always the standard deviation of the noise divided by the
clip. If neighbouring data sets differ by replacing an example, the sum changes by up to twice the
clip. Epsilon is then computed with half of the noise multiplier.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, cast

import dp_accounting
import numpy as np
import scipy.stats
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpx._arguments import check_choice, is_integer, require
from tfdpx.accounting import accountants

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Ledger
    from tfdpx.accounting.plan import PrivacyPlan

_COARSEST_GRID = 1e-2
# Outcomes of the noise are computed up to this number of standard deviations. The rest has a
# probability of 1e-23, and counts as a loss of all privacy.
_TAIL = 10.0
# The most rows for which "pld" is feasible in `_bound`, divided by the squared noise multiplier.
_MOST_ROWS = 10


def group_epsilon(
    spent: PrivacyPlan | Ledger,
    k: int,
    *,
    delta: float | None = None,
    accountant: str | None = None,
) -> float:
    """Returns the epsilon that protects `k` rows together, for example all images of one person.

    This epsilon is more than `k` times the epsilon of one row at the same delta. For example, with
    full batches, noise multiplier 1, one update and delta 1e-5, one row has epsilon 4.377, and two
    rows together have 9.997.

    Guarantee: as for `tfdpx.accounting.epsilon`, but for data sets that differ by adding or
    removing `k` rows with any content, at the same sampling probability. Each update draws each row
    independently. So the number of these `k` rows in a batch has a binomial distribution, and the
    sum changes by at most this number of clips. Such an update is a mixture of Gaussian mechanisms
    (Choquette-Choo et al. 2023, "Privacy Amplification for Matrix Mechanisms", Corollary 4.7;
    Ganesh 2024, "Tight Group-Level DP Guarantees for DP-SGD with Sampling via Mixture of Gaussians
    Mechanisms").

    For full batches epsilon is exact: the mechanism is Gaussian with a sensitivity of `k` clips.
    For other batches, the result depends on the accountant:

    - "pld" computes the privacy loss distribution of the mixture, as precisely as for one row.
    - "rdp" returns the smaller of two upper bounds. First, noise of variance s^2 is a sum of `k`
      independent noises of variance s^2 / k, one for each row. So `k` rows spend at most as much as
      one row in `k` times the steps at noise s / sqrt(k). Second, if one row has the guarantee
      (e, d), then `k` rows have (k e, d (exp(k e) - 1) / (exp(e) - 1)), for every e (Vadhan 2017,
      "The Complexity of Differential Privacy", Lemma 2.2). Both bounds are loose if the noise
      multiplier is well below sqrt(k). For example, take noise multiplier 1, delta 1e-6, and 782
      updates that draw each of 10,000 rows with probability 0.0064. For 10 rows "pld" then gives
      15.5, and "rdp" gives 145.

    As for one row, `RESERVED_SHARE` of delta is reserved for two events that accountants do not
    cover; for `k > 1`, these events may need a larger part of delta. The first event is an update
    that draws more rows than its batch holds. The probability that this happens in any update is at
    most `delta * 5e-5`, both with and without the `k` rows. The training may then differ from the
    training that the accountant assumes. The second event is Gaussian noise above 9.49 standard
    deviations, which tfdpx never draws. If `k` is more than twice `noise_multiplier`, delta is
    therefore larger, by at most `tfdpx.accounting.gaussian.added_delta` at `noise_multiplier / k`.

    Args:
        spent: A `tfdpx.PrivacyPlan`, for the epsilon after all steps of the plan, or a
            `tfdpx.accounting.Ledger`. As for one row, the result is an approximation if batches are
            not Poisson samples, and only a lower bound if the ledger is not complete.
        k: Int >= 0, the number of rows of one person; at most the plan's `num_examples`.
        delta: Float in (0, 1). Defaults to the plan's delta; required for a ledger.
        accountant: "pld" or "rdp"; for full batches also "gdp" or "zcdp". Defaults to the plan's
            accountant; for a ledger, to "pld".

    Returns:
        Float. It is 0.0 if `k` or the number of updates is 0. Otherwise it is infinite if an update
        had no noise. For `k=1` it is the epsilon of the plan or ledger. The computation takes
        seconds; for hundreds of rows, minutes.

    Raises:
        TypeError: If `spent` is neither a plan nor a ledger.
        ValueError: If an argument is out of range, or a sampling probability is unknown.

    Example:
    >>> plan = tfdpx.PrivacyPlan(1000, batch_size=1000, steps=1, noise_multiplier=1.0, delta=1e-5)
    >>> round(group_epsilon(plan, 1), 3), round(group_epsilon(plan, 2), 3)
    (4.377, 9.997)
    """
    require(is_integer(k, 0), "k", k, "be an integer >= 0", " It counts the rows of one person.")
    plan: Any = spent if hasattr(spent, "ledger_at") else None
    ledger: Any = spent if plan is None else plan.ledger_at(plan.steps)
    if plan is not None:
        hint = f" The plan has num_examples={plan.num_examples}."
        require(k <= plan.num_examples, "k", k, "not exceed the plan's num_examples", hint)
        delta = plan.delta if delta is None else delta
        accountant = accountant or plan.accountant
    elif not hasattr(ledger, "runs"):
        raise TypeError(
            "Argument `spent` must be a tfdpx.PrivacyPlan or a tfdpx.accounting.Ledger. Received: "
            f"spent={spent!r}. The ledger of a trained model is `model.optimizer.ledger`."
        )
    accountants.check_delta(delta)
    accountant, k, at = accountant or "pld", int(k), float(cast(float, delta))
    alone = ledger.epsilon(at, accountant)
    if k == 0 or not ledger.runs:
        return 0.0
    if k == 1 or alone == math.inf:
        return alone
    if not all(noise for noise, *_ in ledger.runs):  # Searches and mechanisms have no bound here.
        return math.inf
    if all(probability == 1 for _, probability, _ in ledger.runs):
        return _split(ledger.runs, k, at, accountant)
    target = at * (1 - accountants.RESERVED_SHARE)
    if accountant == "pld":
        return float(_losses(ledger.runs, k).get_epsilon_for_delta(target))
    return _bound(ledger.runs, k, at, accountant)


def _losses(runs, k):
    """Returns the privacy loss distribution of all runs together, for `k` rows.

    Losses are rounded up to a grid with a spacing of a twentieth of the loss of a typical step, so
    epsilon is less than 0.1% too high.

    Args:
        runs: Tuple of tuples `(noise_multiplier, sampling_probability, steps)`.
        k: Int >= 1, the number of rows.
    """
    typical = [(steps, k * accountants.typical_loss(*run)) for *run, steps in runs]
    grid = accountants.grid_of(typical, 0.05, _COARSEST_GRID)
    losses = [
        _losses_of_step(noise, probability, k, grid).self_compose(steps)
        for noise, probability, steps in runs
    ]
    return functools.reduce(lambda a, b: a.compose(b), losses)


def _losses_of_step(noise, probability, k, grid):
    """Returns the privacy loss distribution of one step, for `k` rows.

    With the rows, the outcome x of a step has the distribution sum_j binomial(k, probability)(j)
    N(j, noise^2). Without the rows, x has the distribution N(0, noise^2). The privacy loss grows
    with x. So the delta at an epsilon is an integral over all x above a bound.

    Args:
        noise: Float, the noise multiplier.
        probability: Float in (0, 1], the sampling probability.
        k: Int >= 1, the number of rows.
        grid: Float, the spacing of the grid of losses.
    """
    with np.errstate(divide="ignore"):
        weights = scipy.stats.binom.logpmf(np.arange(k + 1), k, probability)
    rows = [(j, weight) for j, weight in enumerate(weights) if weight > -np.inf]

    def loss(x):
        parts = (weight + j * (2 * x - j) / (2 * noise**2) for j, weight in rows)
        return functools.reduce(np.logaddexp, parts)

    least, most = np.array(-_TAIL * noise), np.array(k + _TAIL * noise)

    def outcomes(losses):
        """Returns the outcomes x in [least, most] that have these privacy losses, by bisection."""
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
    """Returns the smaller of two upper bounds on epsilon; see "rdp" in `group_epsilon`."""
    target = delta * (1 - accountants.RESERVED_SHARE)
    of_one_row = accountants.composed(runs, accountant)

    def is_enough(epsilon):
        grown = (k - 1) * epsilon + math.log(-math.expm1(-k * epsilon) / -math.expm1(-epsilon))
        return of_one_row.get_delta(epsilon) <= target * math.exp(-grown)

    # With little noise "pld" would need too much memory, and epsilon is in the hundreds anyway.
    is_feasible = all(k <= _MOST_ROWS * noise**2 for noise, _, _ in runs)
    split = _split(runs, k, delta, accountant if is_feasible else "rdp")
    low, high = of_one_row.get_epsilon(target), split / k
    if not (low < high < math.inf and is_enough(high)):
        return split
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return k * high  # `is_enough` is true for `high`, but not for `low`.


def _split(runs, k, delta, accountant):
    """Returns an upper bound on epsilon for `k` rows. For full batches, the bound is exact.

    The noise of each step is split into `k` independent parts, one for each row.
    """
    parts = tuple((noise / math.sqrt(k), *drawn, k * steps) for noise, *drawn, steps in runs)
    return accountants.composed_epsilon(parts, delta, accountant)


SAMPLINGS = ("poisson", "shuffle", "without_replacement", "with_replacement")
NEIGHBOURS = ("add_or_remove_one", "zero_out", "replace_one")

# The default neighbouring relation of each sampling.
USUAL_NEIGHBOURS = {
    "poisson": "add_or_remove_one",
    "shuffle": "zero_out",
    "without_replacement": "replace_one",
    "with_replacement": "replace_one",
}

_REFUSED = {
    ("poisson", "replace_one"): (
        "No accountant here covers Poisson sampling with a replaced example. Use "
        "neighbours='add_or_remove_one': replacing is removing and adding, so an (epsilon, delta) "
        "of it implies (2 epsilon, (1 + e^epsilon) delta)."
    ),
    ("shuffle", "add_or_remove_one"): (
        "If batches are cut from a permutation, removing an example moves all later ones into "
        "other batches, and no accountant covers that. Use neighbours='zero_out', because the "
        "example's place then stays, and is empty."
    ),
    ("without_replacement", "add_or_remove_one"): (
        "The accountant of batches of a fixed size needs neighbours of equal size. Use "
        "neighbours='replace_one'."
    ),
    ("without_replacement", "zero_out"): (
        "The accountant of batches of a fixed size is proven for replaced examples alone. Use "
        "neighbours='replace_one'."
    ),
}
_WITH_REPLACEMENT = (
    "dp_accounting has an event for sampling with replacement but no accountant for it, because an "
    "example may be drawn several times into one batch. Draw with sampling='without_replacement' "
    "or 'poisson'."
)

_ABOUT = {
    "poisson": "exact if batches are really Poisson sampled",
    "shuffle": (
        "an upper bound without amplification: each example is in one batch per epoch, and no "
        "accountant covers the effect of shuffling. It is not the epsilon of Poisson sampling, "
        "which can be too low for shuffled batches (Chua et al. 2024, 'How Private are DP-SGD "
        "Implementations?')"
    ),
    "without_replacement": (
        "an upper bound (Wang, Balle and Kasiviswanathan 2019, Theorem 27, by RDP), because no "
        "tight accountant exists"
    ),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A way to draw batches, and a neighbouring relation (which data sets epsilon compares).

    Args:
        name: "poisson", "shuffle" or "without_replacement". "poisson" draws each example
            independently. "shuffle" permutes the data in every epoch, cuts the permutation into
            batches, and leaves out the remainder. "without_replacement" draws each batch as a
            random subset of fixed size.
        neighbours: One of `NEIGHBOURS`, or None for the default of the sampling. With "zero_out",
            an example is replaced by an example without a gradient.

    Raises:
        ValueError: If an argument is invalid, or no accountant covers the combination.
    """

    name: str = "poisson"
    neighbours: str | None = None

    def __post_init__(self):
        check_choice("sampling", self.name, SAMPLINGS)
        if self.neighbours is None:
            object.__setattr__(self, "neighbours", USUAL_NEIGHBOURS[self.name])
        check_choice("neighbours", self.neighbours, NEIGHBOURS)
        refused = _REFUSED.get((self.name, str(self.neighbours)))
        if self.name == "with_replacement":
            refused = _WITH_REPLACEMENT
        if refused:
            raise ValueError(
                f"{refused} Received: sampling={self.name!r}, neighbours={self.neighbours!r}."
            )

    @property
    def accountants(self) -> tuple[str, ...]:
        """Tuple of strings, the accountants that cover this sampling."""
        return ("rdp",) if self.name == "without_replacement" else ("pld", "rdp")

    @property
    def about(self) -> str:
        """String that tells whether epsilon is exact or an upper bound, and why."""
        return _ABOUT[self.name]

    def run(
        self, noise_multiplier: float, sampling_probability: float, steps: int
    ) -> tuple[float, float, int]:
        """Returns the run with Poisson sampling that has the same epsilon as this sampling.

        Do not use this method for "without_replacement", because there is no such run.

        Args:
            noise_multiplier: Float >= 0, in units of the clip.
            sampling_probability: Float in (0, 1]: batch size divided by number of examples.
            steps: Int >= 0.

        Returns:
            Tuple of noise multiplier, sampling probability and number of steps.
        """
        if self.neighbours == "replace_one":
            noise_multiplier = noise_multiplier / 2
        if self.name == "shuffle":
            steps_an_epoch = max(1, math.floor(1 / sampling_probability * (1 + 1e-12)))
            # Sampling gives no privacy here, because the order may reveal the step that used an
            # example.
            return noise_multiplier, 1.0, math.ceil(steps / steps_an_epoch)
        return noise_multiplier, sampling_probability, steps

    def epsilon(
        self,
        noise_multiplier: float,
        sampling_probability: float,
        steps: int,
        delta: float,
        accountant: str,
    ) -> float:
        """Returns the epsilon of `steps` updates at `delta`, or a bound on it (see `about`).

        Args:
            noise_multiplier: Float >= 0. Standard deviation of the noise divided by `l2_norm_clip`,
                the same under every neighbouring relation.
            sampling_probability: Float in (0, 1]: batch size divided by number of examples.
            steps: Int >= 0.
            delta: Float in (0, 1).
            accountant: One of `accountants`.

        Returns:
            Float.

        Raises:
            ValueError: If an argument is out of range, or if the accountant does not cover this
                sampling.
        """
        self.check_accountant(accountant)
        if self.name != "without_replacement":
            run = self.run(noise_multiplier, sampling_probability, steps)
            return accountants.epsilon(*run, delta, accountant)
        accountants.check_delta(delta)
        run = noise_multiplier, sampling_probability, steps
        if not self._is_spent(*run):
            return 0.0 if steps == 0 else math.inf
        return float(self._composed(*run).get_epsilon(delta * (1 - accountants.RESERVED_SHARE)))

    def delta(
        self,
        noise_multiplier: float,
        sampling_probability: float,
        steps: int,
        epsilon: float,
        accountant: str,
    ) -> float:
        """Returns the least delta of `steps` updates at `epsilon`.

        Args:
            noise_multiplier: As for `epsilon`.
            sampling_probability: As for `epsilon`.
            steps: As for `epsilon`.
            epsilon: Float > 0.
            accountant: As for `epsilon`.

        Returns:
            Float in [0, 1].

        Raises:
            ValueError: As for `epsilon`.
        """
        self.check_accountant(accountant)
        run = noise_multiplier, sampling_probability, steps
        if not self._is_spent(*run):
            return 0.0 if steps == 0 else 1.0
        if self.name == "without_replacement":
            least_delta = self._composed(*run).get_delta(epsilon)
        else:
            least_delta = accountants.composed((self.run(*run),), accountant).get_delta(epsilon)
        return min(1.0, float(least_delta) / (1 - accountants.RESERVED_SHARE))

    def check_accountant(self, accountant: str) -> None:
        """Raises ValueError unless `accountant` covers this sampling."""
        must = f"be one of {list(self.accountants)} for sampling={self.name!r}"
        require(accountant in self.accountants, "accountant", accountant, must)

    def _is_spent(self, noise_multiplier, sampling_probability, steps):
        accountants.check_run(noise_multiplier, sampling_probability, steps)
        return noise_multiplier > 0 and steps > 0

    def _composed(self, noise_multiplier, sampling_probability, steps):
        accountant = rdp_privacy_accountant.RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        gaussian = dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        # The accountant uses only the ratio of the two sizes.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            source_dataset_size=1, sample_size=sampling_probability, event=gaussian
        )
        return accountant.compose(event, steps)
