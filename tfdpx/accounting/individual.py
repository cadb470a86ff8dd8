"""Computes an epsilon for each example (Yu et al. 2022, "Per-Instance Privacy Accounting").

If the gradient of an example is never longer than a fraction f of the clip, the example changes
each sum by at most f times the clip. So the example spends as much privacy as in DP-SGD with noise
multiplier sigma / f.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdpx._arguments import check_choice, is_integer, is_number, require
from tfdpx.accounting import accountants, individual_statistics
from tfdpx.accounting.gaussian import CONVERSIONS, divergences, epsilons, exact_epsilons
from tfdpx.accounting.ledger import MECHANISM
from tfdpx.accounting.plan import PrivacyPlan

# Replicas send the indices of examples as float32. Integers up to 2^24 are exact in float32.
_MOST_EXAMPLES = 2**24
_FINEST_ROUNDING = 1e-4
# If there are more different norms, `individual_epsilon` interpolates their privacy losses.
_MANY = 500


def individual_epsilon(norms, plan, delta=None, conversion="improved"):
    """Returns the epsilon of each example, computed from the norms to which it was clipped.

    Guarantee: suppose that step t clips an example to `norms[t]` times the clip, and that these
    norms depend neither on noise nor on batches. Then the run is (epsilon, delta)-differentially
    private for adding or removing this example, while all other examples stay the same (Yu et al.
    2022, Definition 1). There is no guarantee for norms that were measured but not used as a clip.

    Args:
        norms: Float array of norms divided by the clip, in [0, 1]. The shape is `[n]` if each
            example has the same norm at all steps of the plan. If norms differ between steps, the
            shape is `[steps, n]`, for any number of steps.
        plan: A `PrivacyPlan` with Poisson sampling. It supplies the noise multiplier, the sampling
            probability and, if `norms` has the shape `[n]`, the number of steps.
        delta: Float in (0, 1). Defaults to the plan's delta.
        conversion: "improved" converts RDP to epsilon by Canonne et al. 2020, and is exact for full
            batches. "mironov" is the looser conversion of Mironov 2017, which Yu et al. used.

    Returns:
        float64 array `[n]` of epsilons, computed by RDP at integer orders (up to 256 for
        "mironov"). If the norm of an example is 1, its epsilon may exceed `plan.epsilon`, because
        the plan may use a tighter accountant. With more than 500 different norms, epsilons are
        interpolated: they are never too low, and for tiny privacy losses up to 2% too high.

    Raises:
        ValueError: If an argument is out of range.

    Example:
    >>> plan = PrivacyPlan(1000, batch_size=80, steps=2600, noise_multiplier=3.2, delta=1e-5)
    >>> individual_epsilon([0.5, 1.0], plan, conversion="mironov").round(3)
    array([3.308, 7.247])
    """
    check_plan(plan)
    check_choice("conversion", conversion, CONVERSIONS)
    delta = plan.delta if delta is None else delta
    accountants.check_delta(delta)
    norms = np.asarray(norms, float)
    require(norms.ndim in (1, 2), "norms", norms.shape, "have shape [n] or [steps, n]")
    is_valid = bool(((norms >= 0) & (norms <= 1)).all())
    hint = " They are fractions of the clip; clip them: `np.minimum(norms / l2_norm_clip, 1)`."
    require(is_valid, "norms", _range(norms), "lie in [0, 1]", hint)
    times = plan.steps if norms.ndim == 1 else 1
    losses = Losses(conversion, full_batch=plan.sampling_probability == 1)
    of_step = losses.interpolated if np.unique(norms).size > _MANY else losses.of_step
    spent = 0.0
    for row in np.atleast_2d(norms):
        spent += times * of_step(row, plan.noise_multiplier, plan.sampling_probability)
    return losses.epsilons(spent, delta)


class IndividualAccountant:
    """Tracks how much privacy a training spends for each example.

    Pass the accountant to a DP optimizer as `individual=`. It stores a fraction for each example:
    the norm of the example's gradient when the example was last drawn, divided by the clip C and
    rounded up to a multiple of `rounding`. When a step draws the example, the optimizer clips its
    gradient to C times this fraction (to C at the first draw). The accountant counts exactly this
    fraction as spent, and then stores the new norm (Yu et al. 2022, Algorithm 1). So the count is
    right even if norms change. If a norm grows, the gradient is still clipped to the old norm once.

    Guarantee. Take two data sets that are equal, except that only one of them has the example i.
    The clip of i at a step depends on i, on the steps that drew i, and on earlier weights, which
    are noisy. Other examples affect this clip only through the weights. (The clip may depend on the
    steps that drew i. Without i in the data, such steps could be simulated: they are drawn at
    random from their distribution for the same weights, which costs no privacy. Each step is then a
    sampled Gaussian mechanism with the sensitivity that is counted.) By Feldman and Zrnic 2021
    (Theorem 3.1) the privacy losses of all steps add up:

    - Before the training: if the sum of the RDP of i is at most R(a) in every possible run, then
      the training is (a, R(a))-RDP for adding or removing i. The plan's epsilon is such a
      guarantee: it is valid in all runs, and for every example.
    - For a finished run: `epsilon` is computed from the sum R(a) of i in this run. For an order a
      that is chosen in advance, the privacy loss of the run is at most R(a) + log(1 / delta) / (a -
      1), with probability 1 - delta over the noise and the batches. (The privacy loss is the log of
      the likelihood ratio of the weights and of the steps that drew i.) As in Yu et al., `epsilon`
      uses the best order. It describes the finished run, and is not a promise made before the
      training. The bound on the privacy loss is only valid for the conversion "mironov". With the
      improved or the exact conversion, the probability that the privacy loss of a run exceeds
      epsilon is several times delta, and larger for smaller norms (`docs/individual.md`). The
      plan's epsilon is not a bound on the privacy loss of a single run, either. `epsilon` never
      exceeds the plan's epsilon.

    Limits. The individual epsilons depend on private data: tell an epsilon only to the person whom
    the example is about, and publish statistics only by `release`. The float32 sum of a batch has a
    rounding error of about 2**-24 C per example, which does not shrink with the clip of an example.
    The guarantee is for one row. The epsilon of a person with two rows is larger than the sum of
    the epsilons of both rows, and at most `group_epsilon(plan, 2)`. For example, with full batches,
    noise multiplier 1 and delta 1e-5, each row has epsilon 4.377, and the person 9.997.

    Memory: `4 * (ceil(1 / rounding) + 4)` bytes for each example on every device. For example,
    50,000 examples need 21 MB with the default `rounding`. Time: a step also gathers and scatters
    one value for each example of the batch.

    Args:
        plan: The `PrivacyPlan` of the optimizer, with Poisson sampling and noise.
        rounding: Float in [1e-4, 1]. Fractions are rounded up to multiples of it, so there are
            `ceil(1 / rounding)` different fractions.
        refreshes_per_epoch: Int >= 0. How often the norms of all examples are measured during
            `num_examples / batch_size` steps. Each refresh takes about as long as an epoch. If
            `steps_per_execution` is above 1, a refresh happens at the end of an execution.
        conversion: "improved" or "mironov", as for `individual_epsilon`.

    Raises:
        ValueError: If an argument is out of range, or the plan has no noise or no Poisson
            sampling.

    Example:
    >>> plan = PrivacyPlan(60, batch_size=20, steps=10, noise_multiplier=2.0, delta=1e-3)
    >>> accountant = IndividualAccountant(plan)
    >>> len(accountant.fractions)
    100
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        rounding: float = 0.01,
        refreshes_per_epoch: int = 0,
        conversion: str = "improved",
    ) -> None:
        check_plan(plan)
        is_valid = is_number(rounding) and _FINEST_ROUNDING <= rounding <= 1
        require(is_valid, "rounding", rounding, f"lie in [{_FINEST_ROUNDING}, 1]")
        is_valid = is_integer(refreshes_per_epoch, 0)
        require(is_valid, "refreshes_per_epoch", refreshes_per_epoch, "be an int >= 0")
        check_choice("conversion", conversion, CONVERSIONS)
        if plan.num_examples >= _MOST_EXAMPLES:
            raise ValueError(
                f"IndividualAccountant tracks at most {_MOST_EXAMPLES - 1} examples. Received: "
                f"plan.num_examples={plan.num_examples}."
            )
        self._plan, self._rounding = plan, float(rounding)
        self._refreshes, self._conversion = int(refreshes_per_epoch), conversion
        self._record: Any = None
        self._tables = {}  # From `Losses` to an array: the privacy loss of a step at each fraction.

    # The arguments are read-only, because a training may already use them.
    @property
    def plan(self) -> PrivacyPlan:
        """The argument `plan`."""
        return self._plan

    @property
    def rounding(self) -> float:
        """The argument `rounding`."""
        return self._rounding

    @property
    def refreshes_per_epoch(self) -> int:
        """The argument `refreshes_per_epoch`."""
        return self._refreshes

    @property
    def conversion(self) -> str:
        """The argument `conversion`."""
        return self._conversion

    @property
    def fractions(self) -> np.ndarray:
        """float64 array [levels]: all fractions of the clip to which norms can be rounded up."""
        # The factor avoids rounding errors. For example, 1 / 0.01 must give 100 levels, not 101.
        count = math.ceil(1 / self.rounding * (1 - 1e-12))
        return np.minimum(self.rounding * np.arange(1, count + 1), 1.0)

    def _table(self, losses):
        plan = self.plan
        if losses not in self._tables:
            self._tables[losses] = losses.of_step(
                self.fractions, plan.noise_multiplier, plan.sampling_probability
            )
        return self._tables[losses]

    def attach(self, record: Any) -> None:
        """Connects the accountant to an optimizer, which calls this method once.

        Args:
            record: Object of the optimizer with four methods. `counts()` returns an int64 array
                [num_examples, levels], the number of steps that clipped each example at each of
                `self.fractions`. `fractions()` returns a float64 array [num_examples], the current
                fractions. `ledger()` returns the ledger of the weights, and `spend(ledger)` adds
                to it.

        Raises:
            ValueError: If the accountant belongs to another optimizer.
        """
        if self._record is not None:
            raise ValueError(
                "Argument `individual` is the accountant of another optimizer. It tracks one "
                "training: make a new `IndividualAccountant(plan)` for each optimizer."
            )
        self._record = record

    def epsilon(self, delta: float | None = None) -> np.ndarray:
        """Returns the epsilon that each example has spent so far. The result is private data.

        The ledger may have updates or releases that this accountant did not track, for example from
        an earlier optimizer. For these, the gradient of each example counts as being as long as the
        clip.

        Args:
            delta: Float in (0, 1). Defaults to the plan's.

        Returns:
            float64 array [num_examples], in the order of the arrays passed to `plan.batches`. No
            value exceeds the ledger's epsilon by the plan's accountant.

        Raises:
            ValueError: If the accountant was passed to no optimizer.
        """
        delta = self.plan.delta if delta is None else delta
        accountants.check_delta(delta)
        counts, ledger = self._read().counts(), self._ledger()
        full = all(entry.sampling_probability == 1 for entry in ledger.entries)
        losses = Losses(self.conversion, full_batch=full)
        table = self._table(losses)
        of_plan = ledger.of(self.plan)
        spent = counts @ table + max(of_plan.steps - int(counts[0].sum()), 0) * table[-1]
        earlier = [entry for entry in ledger.entries if entry not in of_plan.entries]
        for entry in (entry for entry in earlier if entry.kind != MECHANISM):
            worst = losses.of_step([1.0], entry.noise_multiplier, entry.sampling_probability)
            spent += entry.steps * worst[0]
        mechanisms = [entry for entry in earlier if entry.kind == MECHANISM]
        epsilons = losses.epsilons(spent, delta) + sum(e.steps * e.epsilon for e in mechanisms)
        return np.minimum(epsilons, ledger.composed_epsilon(delta, self.plan.accountant))

    def norms(self) -> np.ndarray:
        """Returns each example's latest gradient norm divided by the clip, float64 [num_examples].

        The norms are rounded up, and at most 1. Before the first draw of an example, its norm is 1.
        The next step that draws an example clips its gradient to the example's norm.
        """
        return self._read().fractions()

    def release(
        self, delta: float | None = None, noise_multiplier: float = 10.0, **arguments: Any
    ) -> individual_statistics.Statistics:
        """Releases the mean and quantiles of the individual epsilons with noise.

        The result may be published. `release_statistics` in
        `tfdpx.accounting.individual_statistics` describes the guarantee. As the public upper limit
        of the individual epsilons, this method uses the ledger's epsilon. The cost of the release
        is added to the ledger of the weights, so a `PrivacyBudget` of a later training includes
        this cost.

        Args:
            delta: Float in (0, 1), for the individual epsilons and for the release. Defaults to the
                plan's.
            noise_multiplier: Float > 0, the noise multiplier of each Gaussian release.
            **arguments: `quantiles`, `steps` and `seed`, as for `release_statistics`.

        Returns:
            `tfdpx.accounting.individual_statistics.Statistics`. Its `total_epsilon` is for the
            training and the release together, at `delta`.
        """
        delta = self.plan.delta if delta is None else delta
        values, before = self.epsilon(delta), self._ledger()
        bound = before.epsilon(delta, self.plan.accountant)
        published = individual_statistics.release_statistics(
            values, bound, delta, noise_multiplier, before=before,
            accountant=self.plan.accountant, **arguments,
        )  # fmt: skip
        self._record.spend(published.ledger)
        return published

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as a dict of JSON values, without any norms."""
        return {
            "plan": self.plan.get_config(),
            "rounding": self.rounding,
            "refreshes_per_epoch": self.refreshes_per_epoch,
            "conversion": self.conversion,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> IndividualAccountant:
        """Returns a new accountant with the same arguments."""
        return cls(**{**config, "plan": PrivacyPlan.from_config(config["plan"])})

    def _read(self):
        if self._record is None:
            raise ValueError(
                "This IndividualAccountant has tracked no training. Pass it to the optimizer: "
                "`tfdpx.DPSGD(..., plan=plan, individual=accountant)`."
            )
        return self._record

    def _ledger(self):
        # Entries of other optimizers may have unknown sampling probabilities. Assumes the worst
        # case.
        return self._read().ledger().assuming(1.0)


def check_plan(plan):
    """Raises ValueError unless individual privacy losses can be computed for `plan`."""
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"Argument `plan` must be a PrivacyPlan. Received: plan={plan!r}.")
    if plan.is_approximate or not plan.noise_multiplier:
        raise ValueError(
            "Individual accounting needs a plan with Poisson sampling and noise. Received: "
            f"sampling={plan.sampling!r}, noise_multiplier={plan.noise_multiplier}."
        )


def _range(norms):
    return f"from {norms.min():.4g} to {norms.max():.4g}" if norms.size else "none"


_GRID = np.geomspace(1e-4, 1, 1000)
_Fractions = np.ndarray | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Losses:
    """Computes privacy losses of steps in a form that can be summed over steps.

    The privacy loss of a step for an example is a list of numbers: its Renyi divergences at several
    orders. For full batches with "improved", the privacy loss is only one number, mu^2. The sum of
    mu^2 over steps is exact even if the fractions are chosen during the training (Smith and
    Thakurta 2022, arXiv:2210.17520).

    Args:
        conversion: "improved" or "mironov".
        full_batch: Bool, whether all steps take the full batch. It has no effect with "mironov".
    """

    conversion: str
    full_batch: bool

    @property
    def _is_gaussian(self):
        return self.full_batch and self.conversion == "improved"

    def of_step(
        self,
        fractions: np.ndarray | Sequence[float],
        noise_multiplier: float,
        sampling_probability: float,
    ) -> np.ndarray:
        """Returns the privacy losses of one step, float64 [n, numbers].

        Args:
            fractions: As for `gaussian.divergences`, one fraction for each of n examples.
            noise_multiplier: Float >= 0.
            sampling_probability: Float in (0, 1].
        """
        if not noise_multiplier:
            return np.full([len(fractions), 1], np.inf)
        if self._is_gaussian:
            return (np.asarray(fractions, float)[:, np.newaxis] / noise_multiplier) ** 2
        orders = CONVERSIONS[self.conversion]
        return divergences(fractions, noise_multiplier, sampling_probability, orders)

    def interpolated(
        self,
        fractions: np.ndarray | Sequence[float],
        noise_multiplier: float,
        sampling_probability: float,
    ) -> np.ndarray:
        """Returns `of_step` by interpolation between values on a grid of fractions, for speed.

        The result is never too low, for the following reason. At order a, exp((a - 1) RDP) - 1 is a
        power series in the fraction, with positive coefficients. The log of such a series is a
        convex function of the log of the fraction. Linear interpolation is never below a convex
        function.
        """
        if sampling_probability == 1:
            return self.of_step(fractions, noise_multiplier, sampling_probability)
        orders = CONVERSIONS[self.conversion] - 1
        logs = self._logs(noise_multiplier, sampling_probability)
        array = np.asarray(fractions, float)
        at = np.log(np.maximum(array, _GRID[0]))
        logs_at = np.stack([np.interp(at, np.log(_GRID), column) for column in logs.T], axis=1)
        return np.where(array[:, np.newaxis] > 0, np.logaddexp(0.0, logs_at) / orders, 0.0)

    @functools.lru_cache(maxsize=8)  # noqa: B019 `Losses` is frozen and compared by value.
    def _logs(self, noise_multiplier, sampling_probability):
        """Returns the values that `interpolated` interpolates, float64 [grid, orders].

        They are log(exp((a - 1) RDP) - 1) at each order a, for each fraction in `_GRID`.

        Args:
            noise_multiplier: Float > 0.
            sampling_probability: Float in (0, 1).
        """
        exponents = self.of_step(_GRID, noise_multiplier, sampling_probability)
        exponents = exponents * (CONVERSIONS[self.conversion] - 1)
        return exponents + np.log(-np.expm1(-exponents))

    def epsilons(self, spent: np.ndarray, delta: float) -> np.ndarray:
        """Returns the epsilon of each example from its sum of privacy losses.

        Args:
            spent: float64 array [n, numbers], the sum of `of_step` over all steps.
            delta: Float in (0, 1). The share `RESERVED_SHARE` of delta is reserved.

        Returns:
            float64 array [n].
        """
        delta *= 1 - accountants.RESERVED_SHARE
        if self._is_gaussian:
            return exact_epsilons(np.sqrt(spent[:, 0]), delta)
        return epsilons(spent, CONVERSIONS[self.conversion], delta, self.conversion)
