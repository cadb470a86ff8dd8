"""A privacy budget and the training run that spends it."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import math
from typing import Any

import scipy.stats

from tfdpx._arguments import (
    check_choice,
    check_positive_integer,
    exactly_one_missing,
    is_number,
    require,
)
from tfdpx._warnings import warn
from tfdpx.accounting import accountants, calibration, statement
from tfdpx.accounting.attack import AttackBounds
from tfdpx.accounting.ledger import EXAMPLE, UNITS, USER, Entry, Ledger

SAMPLINGS = ("poisson", "shuffle")

# Half of what the accountants keep back; the noise's tail has the other half.
_OVERFLOW_SHARE = accountants.RESERVED_SHARE / 2
# Below it noise hides whatever the data say.
_LEAST_USEFUL_EPSILON = 0.01
# Above it the guarantee is void in practice.
_MOST_USEFUL_EPSILON = 100.0


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """How many noisy steps on how many examples a privacy budget pays for.

    Exactly one of `noise_multiplier`, `steps`, `batch_size` and `epsilon` is left out, and solved:
    the least noise, the most steps or the largest batch that keeps within `epsilon`, or the epsilon
    itself. The solution never overshoots: `epsilon_at(steps) <= epsilon`. A plan is immutable.

    Guarantee: `steps` updates of a tfdpx optimizer on `plan.batches(...)` are (epsilon, delta)-
    differentially private under adding or removing one example; `tfdpx.accounting.epsilon` gives
    the conditions. The plan is public, `num_examples` and `batch_size` among it: neighbours are a
    data set of `num_examples` and the same without one example, both trained at
    `batch_size / num_examples` and divided by `batch_size`. So what an example holds and whether
    it was there are protected; how many examples the plan names is not. (With a null example in
    place of the one removed these are the "zero-out" neighbours.) Delta covers the overflow of
    `capacity`. With `sampling="shuffle"` batches are cut from a permutation of the data, while
    epsilon is computed for Poisson sampling: an approximation, as in De et al. 2022 ("Unlocking
    High-Accuracy Differentially Private Image Classification through Scale").

    With `unit="user"` neighbours differ in all examples of one person: each update draws people, up
    to k examples of each, and clips the mean of a person's gradients. The guarantee is as above,
    read with "person" for "example"; how many people there are is public. `fit(x, y, user_ids=ids)`
    says whose each example is.

    With `spent` epsilon is of the training and of what was released about the same data before.

    Args:
        num_examples: Int. Number of examples of the private data set, or of people; public.
        batch_size: Int. Expected number of examples, or people, of a step, over all devices.
        steps: Int. Number of model updates (never microbatches).
        noise_multiplier: Float >= 0. Standard deviation of the noise on the clipped sum, over
            `l2_norm_clip`. 0 trains without privacy: epsilon is infinite.
        epsilon: Float > 0.
        delta: Float in (0, 1), well below 1/num_examples.
        sampling: "poisson" or "shuffle".
        accountant: "pld" (the tighter) or "rdp"; for full batches also "gdp" or "zcdp".
        epochs: Float > 0, in place of `steps`: so many passes over the data on average, which are
            `ceil(epochs * num_examples / batch_size)` steps.
        unit: "example" or "user": whom epsilon protects.
        spent: Optional `Ledger` of the same data, such as `tfdpx.private_adapt` returns.

    Raises:
        ValueError: If an argument is out of its range, if not exactly one of the four is left out,
            or if nothing meets the target.

    Warns:
        UserWarning: If delta exceeds 1/num_examples, or epsilon is below 0.01 or above 100.

    Example:
    >>> plan = PrivacyPlan(50_000, batch_size=4096, steps=2468, epsilon=8.0, delta=1e-5)
    >>> round(plan.noise_multiplier, 2)
    2.56
    """

    num_examples: int
    batch_size: int
    steps: int
    noise_multiplier: float
    epsilon: float
    delta: float
    sampling: str
    accountant: str
    unit: str = EXAMPLE
    spent: Ledger = Ledger()

    def __init__(
        self,
        num_examples: int,
        batch_size: int | None = None,
        steps: int | None = None,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float | None = None,
        sampling: str = "poisson",
        accountant: str = "pld",
        *,
        epochs: float | None = None,
        unit: str = EXAMPLE,
        spent: Ledger | None = None,
    ) -> None:
        values = (num_examples, batch_size, steps, noise_multiplier, epsilon, delta)
        names = [field.name for field in dataclasses.fields(self)]
        others = (sampling, accountant, unit, Ledger() if spent is None else _named(spent))
        given: dict[str, Any] = dict(zip(names, (*values, *others), strict=True))
        if epochs is not None:
            if steps is not None or batch_size is None:
                raise ValueError(
                    "Argument `epochs` takes the place of `steps`, and needs `batch_size`. "
                    f"Received: epochs={epochs}, steps={steps}, batch_size={batch_size}."
                )
            check_positive_integer("num_examples", num_examples)
            calibration.check({**given, "epochs": epochs})
            *_, given["steps"] = calibration.run_of({**given, "epochs": epochs})
        for name, value in given.items():
            object.__setattr__(self, name, value)
        solvable = ("noise_multiplier", "steps", "batch_size", "epsilon")
        unknown = exactly_one_missing({name: getattr(self, name) for name in solvable})
        self._check()
        if self.spent.entries and is_number(epsilon):
            cost = self.spent.composed_epsilon(self.delta, accountant)
            must = f"pay for `spent`, which costs {cost:.4g} at delta={delta}"
            require(cost <= epsilon, "epsilon", epsilon, must)
        if unknown == "epsilon":
            value = self.epsilon_at(self.steps)
        else:
            config = self.get_config()
            value = calibration.solve(unknown, config, self.accountant, self._epsilon_of)
        object.__setattr__(self, unknown, value)
        for warning in plan_warnings(
            self.epsilon, self.delta, self.num_examples, self.noise_multiplier
        ):
            warn(warning)

    def _check(self):
        """Raises ValueError unless all arguments are in range."""
        if not isinstance(self.spent, Ledger):
            raise ValueError(
                "Argument `spent` must be a tfdpx.accounting.Ledger, which tfdpx.private_adapt "
                f"returns. Received: spent={self.spent!r}."
            )
        check_positive_integer("num_examples", self.num_examples)
        accountants.check_delta(self.delta)
        calibration.check(self.get_config())
        accountants.check_accountant(self.accountant)
        check_choice("sampling", self.sampling, SAMPLINGS)
        check_choice("unit", self.unit, UNITS)
        if self.spent.entries and self.spent.unit != self.unit:
            raise ValueError(
                f"Argument `spent` must be of releases about each {self.unit}. Received: one about "
                f"each {self.spent.unit}, as tfdpx.private_adapt returns it."
            )
        if self.unit == USER and self.is_approximate:
            raise ValueError(
                f'Argument `sampling` must be "poisson" with unit="{USER}". Received: '
                f"sampling={self.sampling!r}."
            )
        for name in ("num_examples", "batch_size", "steps"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))  # NumPy's do not go into a config.

    @property
    def suggested_learning_rate(self) -> float:
        """Float: of `DPSGD` with `l2_norm_clip="automatic"`, without momentum, to be tested first.

        `0.18 batch_size / (noise_multiplier sqrt(steps))`: the noise of all updates then moves each
        weight by some 0.18. It is a rule of thumb, of networks of a few thousand weights on small
        images (docs/choosing.md), and reads no data. Infinite without noise.
        """
        noise = self.noise_multiplier * self.steps**0.5
        return 0.18 * self.batch_size / noise if noise else math.inf

    @property
    def sampling_probability(self) -> float:
        """Probability that a step draws a given example: batch_size / num_examples."""
        return self.batch_size / self.num_examples

    @property
    def epochs(self) -> float:
        """Float: how often a given example is drawn on average, steps * batch_size / num_examples.

        Not the `epochs` of `fit`, which may be any number: each reports once.
        """
        return self.steps * self.sampling_probability

    @property
    def is_approximate(self) -> bool:
        """Whether batches are drawn otherwise than epsilon assumes."""
        return self.sampling != "poisson"

    @functools.cached_property
    def capacity(self) -> int:
        """Number of rows of every batch, an int.

        With Poisson sampling the number of examples drawn varies, and batches are padded. A step
        that draws more than the batch has rows for raises an error, which depends on the data.
        Given the draws of all other examples, the example that neighbours differ in can matter to
        that only where the others fill the batch. That any of the plan's steps draws so many has a
        probability of at most delta * 5e-5 (binomial tail, union bound over the steps), which is
        kept back of delta. The least such number of rows, and never more than `num_examples`.
        """
        if self.sampling == "shuffle":
            return self.batch_size
        others = scipy.stats.binom(self.num_examples - 1, self.sampling_probability)
        allowed = _OVERFLOW_SHARE * self.delta / self.steps
        # Not the quantile of scipy, which is lost below 1e-16: it gives all rows.
        return 1 + bisect.bisect_left(
            range(1, self.num_examples), True, key=lambda rows: others.sf(rows - 1) <= allowed
        )

    def epsilon_at(self, steps: int) -> float:
        """Epsilon spent by `steps` updates, at the plan's `delta`.

        Args:
            steps: Int >= 0. May exceed the plan's steps.

        Returns:
            Float. 0.0 at step 0; later infinity if `noise_multiplier` is 0.

        Raises:
            ValueError: If `steps` is negative or no integer.
        """
        run = self.noise_multiplier, self.sampling_probability, steps
        return self._epsilon_of(*run, self.delta, self.accountant)

    def _epsilon_of(self, noise_multiplier, sampling_probability, steps, delta, accountant):
        """Float: of such a run and of what was spent before."""
        run = (noise_multiplier, sampling_probability, steps)
        return accountants.composed_epsilon((*self.spent.runs, run), delta, accountant)

    def batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        class_weight: dict[int, float] | None = None,
        user_ids: Any = None,
        examples_per_user: int | None = None,
        validation_split: float = 0.0,
        optimizer: Any = None,
        seed: int | None = None,
        start: Any = 0,
        pad_to_multiple_of: int = 1,
        input_context: Any = None,
    ) -> Any:
        """The data of the plan's steps, as a dataset for `model.fit`.

        Epsilon is exact for training on this very dataset: `take`, `cache`, `map` and the like make
        another. However often it is iterated over, `fit` uses each draw once.

        Args:
            x: What `fit` takes: an array, a pandas object, a list of numbers, or a dict, tuple or
                list of arrays, of shape `[num_examples, ...]`. Or a `tfdpx.RandomAccess`, for
                examples read as they are drawn; it holds the targets too. So does a
                `tf.data.Dataset` of known size, of examples or of batches: draws need every example
                at hand, so it is read into memory once, here, and a line says how much that is.
            y: Like `x`, or None.
            sample_weight: Optional array of shape `[num_examples]`, finite and >= 0. An example of
                weight 0 is absent.
            class_weight: Optional dict from class (int) to weight, finite and >= 0, for one `y` of
                class indices, `[num_examples]` or `[num_examples, 1]`, or one-hot,
                `[num_examples, num_classes]`. Classes not in it weigh 1. A private optimizer
                multiplies clipped gradients by the weights over the largest one; with `user_ids`,
                or without such an optimizer, they multiply the `sample_weight`.
            user_ids: Array of `num_rows` ints or strings, whose each example is, for a plan with
                `unit="user"`; its `num_examples` counts the different ones.
            examples_per_user: Int k, with `user_ids`; 4 if left out. Of a person with more, k are
                drawn afresh in each update. The update costs what k views of an example do.
            validation_split: Float in [0, 1). As in `fit`: this share of the arrays, the last, is
                not drawn from, and `fit` validates on it. The plan's `num_examples` counts the
                others alone. That part is private too, and nothing accounts for it: callbacks may
                act on its metrics only if the optimizer has `public_validation=True`.
            optimizer: Optional tfdpx optimizer, which then gives the seed and the step to begin at:
                a run resumed by `tfdpx.callbacks.Checkpoint` sees the draws that it would have. The
                dataset ends after the steps that the plan has left. Without it, draws are fresh
                each time that the dataset is iterated over.
            seed: Optional int, for experiments that must be repeatable: the draws of a known seed
                give no privacy. See `tfdpx.sampling.sampled_batches`.
            start: Int or scalar variable: the step to begin at. Needed only with a `seed`.
            pad_to_multiple_of: Int. Pads further, such that `tf.distribute` can split a batch
                evenly: a multiple of the number of replicas.
            input_context: Optional `tf.distribute.InputContext` of a host of several, for
                `tfdpx.distributed.fit`: the shares of this host's replicas, see
                `tfdpx.sampling.sampled_batches.poisson_sampler`.

        Returns:
            A `tf.data.Dataset` of `(x, y, sample_weight)` of fixed shapes `[rows, ...]` that ends
            after the plan's steps, with `rows` the `capacity` rounded up to `pad_to_multiple_of`.
            Padding is zero, and its sample_weight (float32) is 0. With `user_ids` a row is a
            person: `[rows, k, ...]`.

        Raises:
            ValueError: If the arrays do not hold `num_examples` examples, a weight is unfit, or a
                data set has no known size.

        Example:
        >>> plan = PrivacyPlan(1000, batch_size=100, steps=20, epsilon=8.0, delta=1e-5)
        >>> x, y, sample_weight = next(iter(plan.batches(np.ones((1000, 2)), np.zeros(1000))))
        >>> [len(x), len(y), len(sample_weight)] == 3 * [plan.capacity]
        True
        >>> drawn = int(np.sum(sample_weight))  # 100 on average; the rest is padding.
        >>> 0 < drawn < plan.capacity and not np.any(x[drawn:])
        True
        """
        from tfdpx.sampling import sampled_batches  # On the call: accounting needs no TensorFlow.

        sampler = sampled_batches.plan_sampler(
            self,
            x,
            y,
            sample_weight,
            class_weight=class_weight,
            user_ids=user_ids,
            examples_per_user=examples_per_user,
            validation_split=validation_split,
            optimizer=optimizer,
            seed=seed,
            start=start,
            pad_to_multiple_of=pad_to_multiple_of,
            input_context=input_context,
        )
        return sampler.dataset()

    def ledger_at(self, steps: int) -> Ledger:
        """The `tfdpx.accounting.Ledger` that so many updates of this plan leave.

        Args:
            steps: Int >= 0.

        Raises:
            ValueError: If `steps` is negative or no integer.
        """
        if steps == 0:
            return self.spent
        run = self.noise_multiplier, self.sampling_probability, steps
        return self.spent + Ledger(
            (Entry(*run, poisson_sampled=not self.is_approximate, unit=self.unit),)
        )

    def attack_bounds(self) -> AttackBounds:
        """Bounds on how well anyone can find out whether an example, or person, was in the data.

        Returns:
            `tfdpx.accounting.AttackBounds` after all steps, what was spent before included.

        Raises:
            ValueError: If no bound is known, as of `Ledger.attack_bounds`.
        """
        return self.ledger_at(self.steps).attack_bounds(self.delta)

    def statement(
        self,
        *,
        steps: int | None = None,
        dataset: str = "the training data",
        rows_per_user: int | None = None,
    ) -> str:
        """A text to cite: what a training by this plan guarantees, to whom, how, and if what.

        Of a training that was made, `model.optimizer.ledger.statement()` says more.

        Args:
            steps: Optional int >= 0, of the updates that are made; the plan's if left out.
            dataset: String, the name of the data.
            rows_per_user: As for `tfdpx.accounting.Ledger.statement`.

        Returns:
            String of lines of at most 88 characters. Epsilon is rounded up.

        Raises:
            ValueError: If `steps` is negative or no integer.
        """
        ledger = self.ledger_at(self.steps if steps is None else steps)
        about = (self.delta, self.accountant, self.num_examples, dataset)
        facts = statement.Facts(ledger, *about, rows_per_user=rows_per_user, is_planned=True)
        return statement.text(facts)

    def summary(self) -> str:
        """The plan in a line of prose."""
        about = "about " if self.is_approximate else ""
        return (
            f"{about}({self.epsilon:.4g}, {self.delta:.3g})-DP for {self.steps} steps of "
            f"{self.batch_size} out of {self.num_examples} {self.unit}s ({self.sampling} sampling, "
            f"{self.accountant} accountant) at noise_multiplier={self.noise_multiplier:.5g}"
        )

    def get_config(self) -> dict[str, Any]:
        """All arguments, the solved one among them."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**config, "spent": self.spent.to_json()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PrivacyPlan:
        """The plan of `get_config`, without solving again: its epsilon is believed.

        Args:
            config: Dict.

        Raises:
            ValueError: If a value is out of its range.
        """
        plan = object.__new__(cls)
        # Before version 0.2 every plan was of examples, and nothing else was spent.
        config = {"unit": EXAMPLE, "spent": Ledger().to_json(), **config}
        for field in dataclasses.fields(cls):
            value = config[field.name]
            value = Ledger.from_json(value) if field.name == "spent" else value
            object.__setattr__(plan, field.name, value)
        plan._check()
        return plan


def _named(ledger):
    """The ledger with a number for every entry without a run, so that each counts once."""
    if not isinstance(ledger, Ledger) or all(entry.run for entry in ledger.entries):
        return ledger
    # Of the content, because every host must find the same.
    digest = hashlib.sha256(ledger.to_json().encode()).hexdigest()
    first = int(digest[:12], 16)
    entries = enumerate(ledger.entries)
    named = (e if e.run else dataclasses.replace(e, run=first + i + 1) for i, e in entries)
    return dataclasses.replace(ledger, entries=tuple(named))


def plan_warnings(
    epsilon: float, delta: float, num_examples: int | None, noise_multiplier: float
) -> list[str]:
    """What is in range of a guarantee, and hardly meant: a sentence for each.

    Args:
        epsilon: Float.
        delta: Float.
        num_examples: Int, or None where unknown.
        noise_multiplier: Float.
    """
    found = []
    if num_examples is not None and delta > 1 / num_examples:
        found.append(
            f"delta={delta:g} exceeds 1/num_examples={1 / num_examples:.3g}: publishing one "
            "example in full, chosen at random, would satisfy such a guarantee. Choose a delta "
            f"well below, such as {0.1 / num_examples:.1g}."
        )
    if epsilon > _MOST_USEFUL_EPSILON and noise_multiplier:
        found.append(
            f"epsilon={epsilon:.4g} is too large to protect anyone in practice. Give more "
            "noise; epsilons from 1 to 10 are common."
        )
    if epsilon < _LEAST_USEFUL_EPSILON:
        found.append(
            f"epsilon={epsilon:.2g}: noise_multiplier={noise_multiplier:.4g} drowns whatever the "
            "data say, and nothing will be learned. Epsilons from 1 to 10 are common."
        )
    return found
