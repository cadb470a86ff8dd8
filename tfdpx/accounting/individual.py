"""An epsilon for every example (Yu et al. 2022, "Per-Instance Privacy Accounting for DP-SGD").

An example with gradients never longer than a fraction f of the clip moves each sum by at most that
fraction, so it spends as much as DP-SGD with noise sigma / f.
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

# Ids of examples are sent between replicas as float32, in which integers up to 2^24 are exact.
_MOST_EXAMPLES = 2**24
_FINEST_ROUNDING = 1e-4
# With more different norms than this, `individual_epsilon` interpolates their losses.
_MANY = 500


def individual_epsilon(norms, plan, delta=None, conversion="improved"):
    """Returns the epsilon of examples from the norms of their gradients.

    Guarantee: let an example be clipped at step t at `norms[t]` times the clip, for every outcome
    of noise and draws. Then the plan's run, of that many steps, is (epsilon, delta)-differentially
    private for adding or removing this example (Yu et al. 2022, Definition 1: the other examples
    stay the same). Norms that were only measured, and not used as a clip, are no bound.

    Args:
        norms: Float array, as fractions of the clip in [0, 1]: `[n]`, the same at each of the
            plan's steps, or `[steps, n]`, one row for each step taken, for any number of them.
        plan: A `PrivacyPlan` with Poisson sampling, for its noise, sampling probability and steps.
        delta: Float in (0, 1). Defaults to the plan's.
        conversion: "improved" (from RDP by Canonne et al. 2020; exact if every step takes the full
            batch), or "mironov" (Mironov 2017), the looser one of Yu et al.

    Returns:
        float64 array `[n]`, by RDP at integer orders, up to 256 for "mironov". At a norm of 1 it
        may exceed `plan.epsilon`, because the plan may use a tighter accountant. Losses of more
        than 500 different norms are interpolated: never too low, up to 2% too high for tiny ones.

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
    """Tracks the privacy loss of every example, and clips each at the norm that it is charged for.

    Passed to a DP optimizer as `individual=`, it stores the norm of each example's gradient at its
    last draw, as a fraction of the clip C, rounded up to a multiple of `rounding`. At every step an
    example is clipped at C times its own fraction, and charged for exactly that; before its first
    draw, at C. Only then is its norm updated (Yu et al. 2022, Algorithm 1). So the account holds
    even if norms change. If a norm grows, the example loses some signal.

    Guarantee. Fix an example i; neighbours differ in having it. Its clip at a step depends on i
    itself, on the earlier draws of i, and on earlier weights, which are noisy already; on no other
    example except through these. (Its own draws do no harm, because the training without i could
    simulate draws of i, from their distribution given the weights: each step, given the past, is
    then a sampled Gaussian of the accounted sensitivity, and the simulated draws cost nothing.) By
    Feldman and Zrnic 2021 (Theorem 3.1) losses at clips chosen in this way add up:

    - If the summed RDP of i is at most R(a) in every run, the run is (a, R(a))-RDP for adding or
      removing i. That bound on all runs is the plan's epsilon, which holds for every example.
    - `epsilon` is computed from the sum in this run. It bounds the loss of this run: for an
      order a fixed beforehand, the privacy loss (the log of the ratio of likelihoods, of weights
      and draws of i) is at most R(a) + log(1 / delta) / (a - 1) with probability 1 - delta over
      noise and draws. As in Yu et al., the order is the best one, and epsilon is called the epsilon
      of i. It is an ex-post number, and no promise made before the training. Only conversion
      "mironov" gives that bound: the loss of a run exceeds an epsilon of the improved or the exact
      conversion with a probability of several delta (`docs/individual.md`), the more the shorter
      the norms. The same is true of the plan's epsilon, which is the upper limit of `epsilon`.

    Not covered: the individual epsilons are themselves functions of the private data. Reveal one to
    its owner at most, and publish statistics only by `release`. Rounding in the float32 sum of
    a batch (about 2**-24 of C for each example in it) does not shrink with an example's clip. The
    guarantee is for one row: a person with two rows has more than the sum of both epsilons (full
    batch, noise 1, delta 1e-5: 9.997 for two of 4.377), at most `group_epsilon(plan, 2)`.

    Memory: 4 bytes times ceil(1 / rounding) + 4 for each example, on every device, for example
    21 MB for 50,000 examples at the default. Time: one gather and scatter of a batch per step.

    Args:
        plan: The `PrivacyPlan` of the optimizer, with Poisson sampling and noise.
        rounding: Float in [1e-4, 1]. Norms are rounded up to multiples of it. The RDP of each of
            the ceil(1 / rounding) values is computed once.
        refreshes_per_epoch: Int >= 0. How often the norms of all examples are measured during
            `num_examples / batch_size` steps. Each refresh takes about as long as an epoch. With
            `steps_per_execution` above 1 they wait for the end of an execution.
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
        self._tables = {}  # The cost of a step at each fraction, by the way of counting it.

    # Read-only: the clips of the training follow the arguments.
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
        """float64 array [levels]: the fractions of the clip to which norms are rounded up."""
        # Without the margin, 1 / 0.01 could give 101 levels.
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
        """Connects the accountant to an optimizer's `record`, which the optimizer does once.

        Args:
            record: Object with `counts()`, int64 array [num_examples, levels] of the steps at which
                each example was clipped at each level; `fractions()`, float64 [num_examples] of the
                current norms; `ledger()`; and `spend(ledger)`.

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
        """Returns the epsilon that each example has spent so far. It is private: see the class.

        Updates of the same weights that this accountant did not see (by an earlier optimizer or
        file, or of a release) count for every example like a gradient at the clip.

        Args:
            delta: Float in (0, 1). Defaults to the plan's.

        Returns:
            float64 array [num_examples], in the order of the arrays passed to `plan.batches`. At
            most the epsilon of the ledger by the plan's accountant, which holds for all examples.

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
        """float64 array [num_examples]: the fraction of the clip at which each is clipped now."""
        return self._read().fractions()

    def release(
        self, delta: float | None = None, noise_multiplier: float = 10.0, **arguments: Any
    ) -> individual_statistics.Statistics:
        """Publishes the mean and quantiles of the individual epsilons, privately.

        Guarantee, cost and arguments: see `release_statistics` in
        `tfdpx.accounting.individual_statistics`. The bound that it needs is the ledger's epsilon,
        which is public. The cost of the release is added to the ledger of the weights, so that a
        `PrivacyBudget` counts it in any later training.

        Args:
            delta: Float in (0, 1), for the individual epsilons and for the release itself. Defaults
                to the plan's.
            noise_multiplier: Float > 0, for each of the Gaussian releases.
            **arguments: `quantiles`, `steps` and `seed` of `release_statistics`.

        Returns:
            `tfdpx.accounting.individual_statistics.Statistics`; its `total_epsilon` is for training
            and release together, at `delta`.
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
        """Returns the arguments as JSON values; it contains no norm."""
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
        return self._read().ledger().assuming(1.0)  # Only other optimizers have unknown rates.


def check_plan(plan):
    """Raises ValueError unless individual losses can be computed for `plan`."""
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
    """Losses of steps as rows of numbers that add up over steps.

    They are Renyi divergences at several orders. Gaussians of full batches need one number, the
    square of mu, which is exact even if fractions are chosen in the course of training (Smith and
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
        """Returns float64 [n, numbers], the loss of one step; arguments as for `divergences`."""
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
        """Returns `of_step` for many fractions of a sampled step: never too low, slightly too high.

        exp((a - 1) RDP) - 1 is a power series of the fraction with positive coefficients, so its
        log is a convex function of the log of the fraction, and lies below its chords.
        """
        if sampling_probability == 1:
            return self.of_step(fractions, noise_multiplier, sampling_probability)
        orders = CONVERSIONS[self.conversion] - 1
        logs = self._logs(noise_multiplier, sampling_probability)
        array = np.asarray(fractions, float)
        at = np.log(np.maximum(array, _GRID[0]))
        logs_at = np.stack([np.interp(at, np.log(_GRID), column) for column in logs.T], axis=1)
        return np.where(array[:, np.newaxis] > 0, np.logaddexp(0.0, logs_at) / orders, 0.0)

    @functools.lru_cache(maxsize=8)  # noqa: B019 A function of the arguments; equal by value.
    def _logs(self, noise_multiplier, sampling_probability):
        """Returns float64 [grid, orders]: log(exp((a - 1) RDP) - 1)."""
        exponents = self.of_step(_GRID, noise_multiplier, sampling_probability)
        exponents = exponents * (CONVERSIONS[self.conversion] - 1)
        return exponents + np.log(-np.expm1(-exponents))

    def epsilons(self, spent: np.ndarray, delta: float) -> np.ndarray:
        """Returns float64 [n]: epsilon at `delta` of sums [n, numbers], less delta's reserve."""
        delta *= 1 - accountants.RESERVED_SHARE
        if self._is_gaussian:
            return exact_epsilons(np.sqrt(spent[:, 0]), delta)
        return epsilons(spent, CONVERSIONS[self.conversion], delta, self.conversion)
