"""Other neighbours than one example of a Poisson sample: groups of rows, other samplings.

`group_epsilon` is of a person who has several rows. A `Sampling` says, in the events of
dp_accounting, which accountants know which sampling under which neighbours, and refuses the others.
Noise is always in units of the clip, so where an example is replaced, which moves the sum by up to
twice the clip, the Gaussian mechanism has half the noise multiplier.
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
    `tfdpx.accounting.gaussian.added_delta` gives at `noise_multiplier / k`.

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
    if all(probability == 1 for _, probability, _ in ledger.runs):
        return _split(ledger.runs, k, at, accountant)
    target = at * (1 - accountants.RESERVED_SHARE)
    if accountant == "pld":
        return float(_losses(ledger.runs, k).get_epsilon_for_delta(target))
    return _bound(ledger.runs, k, at, accountant)


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


SAMPLINGS = ("poisson", "shuffle", "without_replacement", "with_replacement")
NEIGHBOURS = ("add_or_remove_one", "zero_out", "replace_one")

# What each sampling is judged under, if nothing else is asked for.
USUAL_NEIGHBOURS = {
    "poisson": "add_or_remove_one",
    "shuffle": "zero_out",
    "without_replacement": "replace_one",
    "with_replacement": "replace_one",
}

_REFUSED = {
    ("poisson", "replace_one"): (
        "No accountant here judges Poisson sampling where an example is replaced. Use "
        "neighbours='add_or_remove_one': replacing is removing and adding, so an (epsilon, delta) "
        "of it implies (2 epsilon, (1 + e^epsilon) delta)."
    ),
    ("shuffle", "add_or_remove_one"): (
        "Where batches are cut from a permutation, an example that is removed moves all behind it "
        "into other batches, and no accountant judges that. Use neighbours='zero_out': the "
        "example's place stays, and is empty."
    ),
    ("without_replacement", "add_or_remove_one"): (
        "The accountant of batches of a fixed size knows neighbours of one size alone. Use "
        "neighbours='replace_one'."
    ),
    ("without_replacement", "zero_out"): (
        "The accountant of batches of a fixed size was proven for replaced examples. Use "
        "neighbours='replace_one'."
    ),
}
_WITH_REPLACEMENT = (
    "dp_accounting has an event for sampling with replacement and no accountant that judges it: an "
    "example may be drawn several times into one batch. Use sampling='without_replacement' or "
    "'poisson', and draw so."
)

_ABOUT = {
    "poisson": "exact for batches that are really Poisson sampled",
    "shuffle": (
        "an upper bound without amplification: each example is in one batch an epoch, and no "
        "accountant says what shuffling takes off. It is not the epsilon of Poisson sampling, "
        "which can be too low for shuffled batches (Chua et al. 2024, 'How Private are DP-SGD "
        "Implementations?')"
    ),
    "without_replacement": (
        "an upper bound (Wang, Balle and Kasiviswanathan 2019, Theorem 27, by RDP): no tight "
        "accountant exists"
    ),
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How batches are drawn, and which data sets are neighbours.

    Args:
        name: One of `SAMPLINGS`. "shuffle" cuts batches from a permutation of the data, a new one
            every epoch, and drops what is left over; "without_replacement" draws each batch anew, a
            subset of fixed size.
        neighbours: One of `NEIGHBOURS`, or None for the usual ones of the sampling. "zero_out"
            puts an example without content in the place of one.

    Raises:
        ValueError: If an argument is none of these, or no accountant judges the two together.
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
        """Tuple of the names of the accountants that know it."""
        return ("rdp",) if self.name == "without_replacement" else ("pld", "rdp")

    @property
    def about(self) -> str:
        """String: what their epsilon is."""
        return _ABOUT[self.name]

    def run(
        self, noise_multiplier: float, sampling_probability: float, steps: int
    ) -> tuple[float, float, int]:
        """What an accountant of Poisson sampling is to be asked: `(noise, probability, steps)`.

        Not for "without_replacement", which is no such run.

        Args:
            noise_multiplier: Float >= 0, in units of the clip.
            sampling_probability: Float in (0, 1]: batch size over number of examples.
            steps: Int >= 0.
        """
        if self.neighbours == "replace_one":
            noise_multiplier = noise_multiplier / 2
        if self.name == "shuffle":
            steps_an_epoch = max(1, math.floor(1 / sampling_probability * (1 + 1e-12)))
            # Without sampling: whoever knows the order knows which step an example was in.
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
        """The epsilon of `steps` updates at `delta`, or a bound on it, as `about` says.

        Args:
            noise_multiplier: Float >= 0. Standard deviation of the noise over `l2_norm_clip`,
                whatever the neighbours are.
            sampling_probability: Float in (0, 1]: batch size over number of examples.
            steps: Int >= 0.
            delta: Float in (0, 1).
            accountant: One of `accountants`.

        Returns:
            Float.

        Raises:
            ValueError: If an argument is out of its range, or the accountant does not know this.
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
        """The least delta at which `steps` updates keep within `epsilon`, as `epsilon` finds it.

        Args:
            noise_multiplier: As for `epsilon`.
            sampling_probability: As for `epsilon`.
            steps: As for `epsilon`.
            epsilon: Float > 0.
            accountant: As for `epsilon`.

        Returns:
            Float in [0, 1].

        Raises:
            ValueError: As `epsilon`.
        """
        self.check_accountant(accountant)
        run = noise_multiplier, sampling_probability, steps
        if not self._is_spent(*run):
            return 0.0 if steps == 0 else 1.0
        if self.name == "without_replacement":
            found = self._composed(*run).get_delta(epsilon)
        else:
            found = accountants.composed((self.run(*run),), accountant).get_delta(epsilon)
        return min(1.0, float(found) / (1 - accountants.RESERVED_SHARE))

    def check_accountant(self, accountant: str) -> None:
        """Raises ValueError unless `accountant` judges this sampling."""
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
        # Of the two sizes the accountant reads their quotient alone.
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            source_dataset_size=1, sample_size=sampling_probability, event=gaussian
        )
        return accountant.compose(event, steps)
