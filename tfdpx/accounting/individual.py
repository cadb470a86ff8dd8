"""An epsilon for every example (Yu et al. 2022, "Per-Instance Privacy Accounting for DP-SGD").

An example whose gradient never was longer than a fraction f of the clip moves each sum by at most
that, so it spends what DP-SGD with noise sigma / f does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdpx._arguments import check_choice, is_integer, is_number, require
from tfdpx.accounting import accountants, statistics
from tfdpx.accounting.gaussian import CONVERSIONS, divergences, epsilons, exact_epsilons
from tfdpx.accounting.plan import PrivacyPlan

# Ids of examples travel between replicas as float32, in which integers up to 2^24 are exact.
_MOST_EXAMPLES = 2**24
_FINEST_ROUNDING = 1e-4
# Different norms from which on their losses are interpolated, in `individual_epsilon`.
_MANY = 500


def individual_epsilon(norms, plan, delta=None, conversion="improved"):
    """The epsilon of examples whose gradients had these norms.

    Guarantee: let an example be clipped at step t at `norms[t]` times the clip, whatever the noise
    and the draws were. Then the plan's run, of that many steps, is (epsilon, delta)-differentially
    private with respect to adding or removing this example (Yu et al. 2022, Definition 1: the other
    examples are as they are). Norms that were merely measured, and not clipped at, are no bound.

    Args:
        norms: Float array, as fractions of the clip in [0, 1]: `[n]`, the same at each of the
            plan's steps, or `[steps, n]`, one row for each step taken, of whatever number.
        plan: A `PrivacyPlan` of Poisson sampling: its noise, sampling probability, and steps.
        delta: Float in (0, 1); the plan's if left out.
        conversion: "improved" (from RDP by Canonne et al. 2020; exact where every step takes the
            full batch), or "mironov" (Mironov 2017), the looser one of Yu et al.

    Returns:
        float64 array `[n]`. By RDP at integer orders, up to 256 for "mironov". At a norm of 1 it
        may lie above `plan.epsilon`, which a tighter accountant may have computed. Losses of more
        than 500 different norms are interpolated: never too low, up to 2% too high where tiny.

    Raises:
        ValueError: If an argument is out of its range.

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
    fits = bool(((norms >= 0) & (norms <= 1)).all())
    hint = " They are fractions of the clip; clip them: `np.minimum(norms / l2_norm_clip, 1)`."
    require(fits, "norms", _range(norms), "lie in [0, 1]", hint)
    times = plan.steps if norms.ndim == 1 else 1
    losses = Losses(conversion, exact=plan.sampling_probability == 1)
    of_step = losses.interpolated if np.unique(norms).size > _MANY else losses.of_step
    spent = 0.0
    for row in np.atleast_2d(norms):
        spent += times * of_step(row, plan.noise_multiplier, plan.sampling_probability)
    return losses.epsilons(spent, delta)


class IndividualAccountant:
    """Follows the privacy loss of every example, and has each clipped at what it is charged for.

    Given to a DP optimizer as `individual=`, it keeps the norm that each example's gradient had
    when it was last drawn, as a fraction of the clip C, rounded up to a multiple of `rounding`. At
    every step an example is clipped at C times its own fraction, and charged for exactly that; one
    that was not drawn yet, at C. Only then is its norm brought up to date (Yu et al. 2022,
    Algorithm 1). So the account holds whether or not norms are like those before; what is lost
    where a norm grew is signal.

    Guarantee. Fix an example i; neighbours differ in having it. Its clip at a step depends on i
    itself, on when i was drawn before, and on earlier weights, which are noisy already; on no other
    example except through these. (To see that its own draws do no harm, let the training without i
    make up draws of i, from their distribution given the weights: each step, given the past, is
    then a sampled Gaussian of the accounted sensitivity, and the made-up draws cost nothing.) By
    Feldman and Zrnic 2021 (Theorem 3.1) losses at clips chosen so add up:

    - If the summed RDP of i is at most R(a) in every run, the run is (a, R(a))-RDP for adding or
      removing i. That bound on all runs is the plan's epsilon, which holds for everybody.
    - What `epsilon` gives is the sum that this run had. It bounds the loss of this run: for an
      order a fixed beforehand, the privacy loss (the log of the ratio of likelihoods, of weights
      and draws of i) is at most R(a) + log(1 / delta) / (a - 1) with probability 1 - delta over
      noise and draws. As Yu et al. do, the order is the best one, and epsilon is called the epsilon
      of i. It is an ex-post number, and no promise made before the training. Only conversion
      "mironov" gives that bound: the loss of a run exceeds an epsilon of the improved or the exact
      conversion with a probability of several delta (`docs/individual.md`), the more the shorter
      the norms. So it may with the plan's epsilon, at which `epsilon` is cut.

    Not covered: the individual epsilons are themselves functions of the private data. Tell one to
    its owner at most, and publish statistics only by `release`. Rounding in the float32 sum of
    a batch (about 2**-24 of C for each example in it) does not shrink with an example's clip. What
    is protected is a row of the data: a person in two rows has more than the sum of both epsilons
    (full batch, noise 1, delta 1e-5: 9.997 for two of 4.377), at most `group_epsilon(plan, 2)`.

    Memory: 4 bytes times ceil(1 / rounding) + 4 for each example, on every device: 21 MB for 50,000
    at the default. Time: one gather and scatter of a batch a step.

    Args:
        plan: The `PrivacyPlan` of the optimizer, by Poisson sampling, with noise.
        rounding: Float in [1e-4, 1]. Norms are rounded up to multiples of it; the RDP of each of
            the ceil(1 / rounding) values is computed once.
        refreshes_per_epoch: Int >= 0. How often the norms of all examples are measured while
            `num_examples / batch_size` steps go by. Each costs about an epoch's time. With
            `steps_per_execution` above 1 they wait for the end of an execution.
        conversion: "improved" or "mironov", as of `individual_epsilon`.

    Raises:
        ValueError: If an argument is out of its range, or the plan has no noise or no Poisson
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
        fits = is_number(rounding) and _FINEST_ROUNDING <= rounding <= 1
        require(fits, "rounding", rounding, f"lie in [{_FINEST_ROUNDING}, 1]")
        fits = is_integer(refreshes_per_epoch, 0)
        require(fits, "refreshes_per_epoch", refreshes_per_epoch, "be an int >= 0")
        check_choice("conversion", conversion, CONVERSIONS)
        if plan.num_examples >= _MOST_EXAMPLES:
            raise ValueError(
                f"IndividualAccountant follows at most {_MOST_EXAMPLES - 1} examples. Received: "
                f"plan.num_examples={plan.num_examples}."
            )
        self._plan, self._rounding = plan, float(rounding)
        self._refreshes, self._conversion = int(refreshes_per_epoch), conversion
        self._record: Any = None
        self._tables = {}  # What a step costs at each fraction, by how it is counted.

    # Read-only: the clips of the training are those of the arguments.
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
        """float64 array [levels]: the fractions of the clip that norms are rounded up to."""
        # Without the margin, 1 / 0.01 could have 101 levels.
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
        """Called by the optimizer, once: the account is read from `record` from here on.

        Args:
            record: Object with `counts()`, int64 array [num_examples, levels] of the steps that
                each example was clipped at each level; `fractions()`, float64 [num_examples] of the
                norms now; `ledger()`; and `spend(ledger)`.

        Raises:
            ValueError: If another optimizer has it.
        """
        if self._record is not None:
            raise ValueError(
                "Argument `individual` is the accountant of another optimizer. It follows one "
                "training: make a new `IndividualAccountant(plan)` for each optimizer."
            )
        self._record = record

    def epsilon(self, delta: float | None = None) -> np.ndarray:
        """The epsilon that each example has spent so far. Not private: see the class.

        Updates of the same weights that this accountant did not see (of an optimizer or a file
        before it, or of a release) count for every example as those of a norm at the clip.

        Args:
            delta: Float in (0, 1); the plan's if left out.

        Returns:
            float64 array [num_examples], in the order of the arrays given to `plan.batches`. At
            most the epsilon of the ledger by the plan's accountant, which holds for all.

        Raises:
            ValueError: If the accountant was given to no optimizer.
        """
        delta = self.plan.delta if delta is None else delta
        accountants.check_delta(delta)
        counts, ledger = self._read().counts(), self._ledger()
        full = all(entry.sampling_probability == 1 for entry in ledger.entries)
        losses = Losses(self.conversion, exact=full)
        table = self._table(losses)
        known = ledger.of(self.plan)
        spent = counts @ table + max(known.steps - int(counts[0].sum()), 0) * table[-1]
        for entry in (entry for entry in ledger.entries if entry not in known.entries):
            worst = losses.of_step([1.0], entry.noise_multiplier, entry.sampling_probability)
            spent += entry.steps * worst[0]
        found = losses.epsilons(spent, delta)
        return np.minimum(found, ledger.composed_epsilon(delta, self.plan.accountant))

    def norms(self) -> np.ndarray:
        """float64 array [num_examples]: the fraction of the clip that each is clipped at now."""
        return self._read().fractions()

    def release(
        self, delta: float | None = None, noise_multiplier: float = 10.0, **arguments: Any
    ) -> statistics.Statistics:
        """Publishes the mean and quantiles of the individual epsilons, privately.

        Guarantee, cost and arguments: see `tfdpx.accounting.statistics.release_statistics`. The
        bound that it needs is the ledger's epsilon, which is public. What the release costs is
        added to the ledger of the weights, so a `PrivacyBudget` counts it in whatever is trained
        after.

        Args:
            delta: Float in (0, 1), of the individual epsilons and of the release's own; the plan's
                if left out.
            noise_multiplier: Float > 0, of each of the Gaussian releases.
            **arguments: `quantiles`, `steps` and `seed` of `release_statistics`.

        Returns:
            `tfdpx.accounting.statistics.Statistics`; its `total_epsilon` is of training and release
            together, at `delta`.
        """
        delta = self.plan.delta if delta is None else delta
        values, before = self.epsilon(delta), self._ledger()
        bound = before.epsilon(delta, self.plan.accountant)
        found = statistics.release_statistics(
            values, bound, delta, noise_multiplier, before=before,
            accountant=self.plan.accountant, **arguments,
        )  # fmt: skip
        self._record.spend(found.ledger)
        return found

    def get_config(self) -> dict[str, Any]:
        """The arguments as JSON values; no norm is in it."""
        return {
            "plan": self.plan.get_config(),
            "rounding": self.rounding,
            "refreshes_per_epoch": self.refreshes_per_epoch,
            "conversion": self.conversion,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> IndividualAccountant:
        """An accountant of the same arguments that has seen nothing."""
        return cls(**{**config, "plan": PrivacyPlan.from_config(config["plan"])})

    def _read(self):
        if self._record is None:
            raise ValueError(
                "This IndividualAccountant has followed no training. Give it to the optimizer: "
                "`tfdpx.DPSGD(..., plan=plan, individual=accountant)`."
            )
        return self._record

    def _ledger(self):
        return self._read().ledger().assuming(self.plan.sampling_probability)


def check_plan(plan):
    """Raises ValueError unless `plan` is one whose individual losses can be computed."""
    if not isinstance(plan, PrivacyPlan):
        raise ValueError(f"Argument `plan` must be a PrivacyPlan. Received: plan={plan!r}.")
    if plan.is_approximate or not plan.noise_multiplier:
        raise ValueError(
            "Individual accounting needs a plan of Poisson sampling with noise. Received: "
            f"sampling={plan.sampling!r}, noise_multiplier={plan.noise_multiplier}."
        )


def _range(norms):
    return f"from {norms.min():.4g} to {norms.max():.4g}" if norms.size else "none"


_GRID = np.geomspace(1e-4, 1, 1000)
_Fractions = np.ndarray | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Losses:
    """Losses of steps as rows of numbers that add up over steps.

    They are Renyi divergences at several orders. Gaussians of full batches have one number, the
    square of mu, which is exact; also where fractions are chosen in the course of training (Smith
    and Thakurta 2022, arXiv:2210.17520).

    Args:
        conversion: "improved" or "mironov".
        exact: Bool, whether all steps take the full batch. With "mironov" it changes nothing.
    """

    conversion: str
    exact: bool

    @property
    def _is_gaussian(self):
        return self.exact and self.conversion == "improved"

    def of_step(
        self,
        fractions: np.ndarray | Sequence[float],
        noise_multiplier: float,
        sampling_probability: float,
    ) -> np.ndarray:
        """float64 [n, numbers]: the loss of one step; arguments as of `divergences`."""
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
        """`of_step` for many fractions of a sampled step: never too low, by little too high.

        exp((a - 1) RDP) - 1 is a power series of the fraction with positive coefficients, so its
        log is a convex function of the log of the fraction, and lies below its chords.
        """
        if sampling_probability == 1:
            return self.of_step(fractions, noise_multiplier, sampling_probability)
        orders = CONVERSIONS[self.conversion] - 1
        logs = self._logs(noise_multiplier, sampling_probability)
        array = np.asarray(fractions, float)
        at = np.log(np.maximum(array, _GRID[0]))
        found = np.stack([np.interp(at, np.log(_GRID), column) for column in logs.T], axis=1)
        return np.where(array[:, np.newaxis] > 0, np.logaddexp(0.0, found) / orders, 0.0)

    @functools.lru_cache(maxsize=8)  # noqa: B019 Of the arguments alone: losses are equal by value.
    def _logs(self, noise_multiplier, sampling_probability):
        """float64 [grid, orders]: log(exp((a - 1) RDP) - 1)."""
        exponents = self.of_step(_GRID, noise_multiplier, sampling_probability)
        exponents = exponents * (CONVERSIONS[self.conversion] - 1)
        return exponents + np.log(-np.expm1(-exponents))

    def epsilons(self, spent: np.ndarray, delta: float) -> np.ndarray:
        """float64 [n]: epsilon at `delta` of sums [n, numbers]; the reserve of delta is kept."""
        delta *= 1 - accountants.RESERVED_SHARE
        if self._is_gaussian:
            return exact_epsilons(np.sqrt(spent[:, 0]), delta)
        return epsilons(spent, CONVERSIONS[self.conversion], delta, self.conversion)
