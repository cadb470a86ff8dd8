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
    refuse_elsewhere,
    require,
)
from tfdpx._warnings import warn
from tfdpx.accounting import accountants, calibration, statement
from tfdpx.accounting.attack import AttackBounds, attack_bounds, full_batch_epsilon
from tfdpx.accounting.ledger import EXAMPLE, UNITS, USER, Entry, Ledger

SAMPLINGS = ("poisson", "shuffle")

# Half of the accountants' reserve of delta; the other half is for the noise's tail.
_OVERFLOW_SHARE = accountants.RESERVED_SHARE / 2
# Below it the noise hides all signal in the data.
_LEAST_USEFUL_EPSILON = 0.01
# Above it the guarantee is void in practice.
_MOST_USEFUL_EPSILON = 100.0


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """The number of noisy steps on a number of examples that a privacy budget pays for.

    Leave out exactly one of `noise_multiplier`, `steps`, `batch_size` and `epsilon`. It is
    computed: the least noise, the most steps or the largest batch within `epsilon`, or the epsilon
    itself. The solution never overshoots: `epsilon_at(steps) <= epsilon`. A plan is immutable.

    Guarantee: `steps` updates of a tfdpx optimizer on `plan.batches(...)` are (epsilon, delta)-
    differentially private under adding or removing one example; `tfdpx.accounting.epsilon` lists
    the conditions. The plan is public, with `num_examples` and `batch_size`, because neighbours are
    a data set of `num_examples` and the same without one example, both trained at
    `batch_size / num_examples` and divided by `batch_size`. So the content of an example and its
    presence are protected; the number of examples in the plan is not. (With a null example in
    place of the one removed these are the "zero-out" neighbours.) Delta covers the overflow of
    `capacity`. With `sampling="shuffle"` batches are cut from a permutation of the data, while
    epsilon is computed for Poisson sampling: an approximation, as in De et al. 2022 ("Unlocking
    High-Accuracy Differentially Private Image Classification through Scale").

    With `unit="user"` neighbours differ in all examples of one person: each update draws people, up
    to k examples of each, and clips the mean of a person's gradients. The guarantee is the same
    with "person" for "example"; the number of people is public. `fit(x, y, user_ids=ids)` takes the
    person of each example.

    With `spent`, epsilon covers the training and the earlier releases about the same data. Delta
    covers the delta of paid searches and other mechanisms in it.

    With `right_guesses` in place of `epsilon`, the plan bounds attacks (`attack_bounds`): someone
    who knows everything except whether one example was in the data, which a coin decided, is right
    at most that often. Right guesses are an average, and a few sampled updates meet it with so
    little noise that examples which are drawn are found out almost surely. So epsilon also does not
    exceed the epsilon of full batches with the same right guesses, for example 2.02 for 0.6 and
    3.25 for 0.65 at delta 1e-5. Where this binds, fewer guesses are right, and `summary` says so.

    Args:
        num_examples: Int. Number of examples of the private data set, or of people; public.
        batch_size: Int. Expected number of examples, or people, per step, over all devices.
        steps: Int. Number of model updates (never microbatches).
        noise_multiplier: Float >= 0. Standard deviation of the noise on the clipped sum, divided by
            `l2_norm_clip`. 0 trains without privacy: epsilon is infinite.
        epsilon: Float > 0.
        delta: Float in (0, 1), well below 1/num_examples.
        sampling: "poisson" or "shuffle".
        accountant: "pld" (the tighter) or "rdp"; for full batches also "gdp" or "zcdp".
        epochs: Float > 0, instead of `steps`: the average number of passes over the data, which is
            `ceil(epochs * num_examples / batch_size)` steps.
        unit: "example" or "user", the unit that epsilon protects.
        spent: Optional `Ledger` of the same data, for example from `tfdpx.private_adapt`.
        right_guesses: Float in (0.5, 1), instead of `epsilon`, for example 0.6; 0.5 is a coin.

    Raises:
        ValueError: If an argument is out of range, if not exactly one of the four is left out, or
            if no value meets the target.

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
    right_guesses: float | None = None

    def __new__(cls, *arguments: Any, **named: Any) -> PrivacyPlan:
        """Refuses arguments that other libraries have."""
        refuse_elsewhere(cls.__name__, named)
        return super().__new__(cls)

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
        right_guesses: float | None = None,
    ) -> None:
        values = (num_examples, batch_size, steps, noise_multiplier, epsilon, delta)
        names = [field.name for field in dataclasses.fields(self)]
        if right_guesses is not None:
            values = (*values[:4], largest_epsilon(right_guesses, epsilon, delta), delta)
        spent = Ledger() if spent is None else _named(spent)
        choices = (sampling, accountant, unit, spent, right_guesses)
        settings: dict[str, Any] = dict(zip(names, (*values, *choices), strict=True))
        if epochs is not None:
            if steps is not None or batch_size is None:
                raise ValueError(
                    "Argument `epochs` takes the place of `steps`, and requires `batch_size`. "
                    f"Received: epochs={epochs}, steps={steps}, batch_size={batch_size}."
                )
            check_positive_integer("num_examples", num_examples)
            calibration.check({**settings, "epochs": epochs})
            *_, settings["steps"] = calibration.run_of({**settings, "epochs": epochs})
        for name, value in settings.items():
            object.__setattr__(self, name, value)
        solvable = ("noise_multiplier", "steps", "batch_size", "epsilon")
        unknown = exactly_one_missing({name: getattr(self, name) for name in solvable})
        self._check()
        if self.spent.entries and is_number(self.epsilon):
            cost = self._epsilon_of(1.0, 1.0, 0, self.delta, accountant)
            must = f"pay for `spent`, which costs epsilon={cost:.4g} at delta={delta}"
            goal = "epsilon" if right_guesses is None else "right_guesses"
            require(cost <= self.epsilon, goal, settings[goal], must)
            if right_guesses is not None:
                share = self.spent.attack_bounds(delta).right_guesses
                must = f"pay for `spent`, which alone allows a share of {share:.4g}"
                require(share < right_guesses, goal, right_guesses, must)
        if unknown == "epsilon":
            value = self.epsilon_at(self.steps)
        else:
            config = self.get_config()
            value = calibration.solve(unknown, config, self.accountant, self._epsilon_of)
        object.__setattr__(self, unknown, value)
        if right_guesses is not None:
            if self.attack_bounds().right_guesses > right_guesses:  # Rare: after a search.
                value = calibration.solve(unknown, config, self.accountant, self._cost_of)
                object.__setattr__(self, unknown, value)
            object.__setattr__(self, "epsilon", self.epsilon_at(self.steps))
        for warning in plan_warnings(
            self.epsilon, self.delta, self.num_examples, self.noise_multiplier
        ):
            warn(warning)

    def _check(self):
        """Raises ValueError unless all arguments are in range."""
        if not isinstance(self.spent, Ledger):
            raise ValueError(
                "Argument `spent` must be a tfdpx.accounting.Ledger, for example from "
                f"tfdpx.private_adapt. Received: spent={self.spent!r}."
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
                f"each {self.spent.unit}, like those of tfdpx.private_adapt."
            )
        if self.is_approximate and (self.unit == USER or self.right_guesses is not None):
            must = f'be "poisson" with unit="{USER}" or `right_guesses`'
            hint = " No bound on attacks is known for other batches."
            require(False, "sampling", self.sampling, must, hint)
        for name in ("num_examples", "batch_size", "steps"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, int(value))  # NumPy's cannot go into a config.

    @property
    def sampling_probability(self) -> float:
        """Probability that a step draws a given example: batch_size / num_examples."""
        return self.batch_size / self.num_examples

    @property
    def epochs(self) -> float:
        """Float: how often an example is drawn on average, steps * batch_size / num_examples.

        This is not the `epochs` of `fit`, which may be any number, because they only set reports.
        """
        return self.steps * self.sampling_probability

    @property
    def is_approximate(self) -> bool:
        """Whether batches are drawn in another way than epsilon assumes."""
        return self.sampling != "poisson"

    @functools.cached_property
    def capacity(self) -> int:
        """Number of rows of every batch, an int.

        With Poisson sampling the number of examples drawn varies, and batches are padded. A step
        that draws more examples than the batch has rows raises an error, which depends on the data.
        Given the draws of all other examples, the example that neighbours differ in can influence
        this only if the others fill the batch. The probability that any of the plan's steps draws
        so many is at most delta * 5e-5 (binomial tail, union bound over the steps), which is
        reserved from delta. This is the least such number of rows, at most `num_examples`.
        """
        if self.sampling == "shuffle":
            return self.batch_size
        num_others = scipy.stats.binom(self.num_examples - 1, self.sampling_probability)
        allowed = _OVERFLOW_SHARE * self.delta / self.steps
        # Not scipy's quantile, which loses precision below 1e-16 and returns all rows.
        return 1 + bisect.bisect_left(
            range(1, self.num_examples), True, key=lambda rows: num_others.sf(rows - 1) <= allowed
        )

    def epsilon_at(self, steps: int) -> float:
        """Returns the epsilon spent by `steps` updates, at the plan's `delta`.

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
        """Returns the epsilon of such a run and of `spent`, within `delta` for both."""
        runs, pairs = self.spent.parts()
        epsilons, deltas = (math.fsum(pair[i] for pair in pairs) for i in (0, 1))
        run = (noise_multiplier, sampling_probability, steps)
        if delta <= deltas:
            return math.inf
        return accountants.composed_epsilon((*runs, run), delta - deltas, accountant) + epsilons

    def _cost_of(self, *run):
        """Returns `_epsilon_of`, or the one of full batches with the right guesses if larger."""
        epsilon = self._epsilon_of(*run)
        if self.right_guesses is None or epsilon > self.epsilon:
            return epsilon
        runs, pairs = self.spent.parts()
        bounds = attack_bounds((*runs, run[:3]), self.delta, self.unit, pairs)
        return max(epsilon, full_batch_epsilon(bounds.right_guesses, self.delta))

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
        """Returns the data of the plan's steps, as a dataset for `model.fit`.

        Epsilon is exact for training on this dataset itself, because `take`, `cache`, `map` and the
        like make another one. `fit` uses each draw once, however often the dataset is iterated.

        Args:
            x: Any input of `fit`: an array, a pandas object, a list of numbers, or a dict, tuple or
                list of arrays, of shape `[num_examples, ...]`. Or a `tfdpx.RandomAccess`, for
                examples that are read when they are drawn; it holds the targets too. So does a
                `tf.data.Dataset` of known size, of examples or of batches. Draws need every example
                at hand, so it is read into memory once, here, and its size is printed.
            y: Like `x`, or None.
            sample_weight: Optional array of shape `[num_examples]`, finite and >= 0. An example of
                weight 0 is absent.
            class_weight: Optional dict from class (int) to weight, finite and >= 0, for one `y` of
                class indices, `[num_examples]` or `[num_examples, 1]`, or one-hot,
                `[num_examples, num_classes]`. Other classes weigh 1. A private optimizer multiplies
                clipped gradients by the weights divided by the largest one; with `user_ids`,
                or without such an optimizer, they multiply the `sample_weight`.
            user_ids: Array of `num_rows` ints or strings, the person of each example, for a plan
                with `unit="user"`; its `num_examples` is the number of different ones.
            examples_per_user: Int k, with `user_ids`; 4 if left out. Of a person with more, each
                update draws k again. The update costs as much as k views of an example.
            validation_split: Float in [0, 1). As in `fit`, the last part of the arrays is not
                drawn, and `fit` validates on it. The plan's `num_examples` counts the others
                alone. That part is private too, and no epsilon covers it: callbacks may act on its
                metrics only if the optimizer has `public_validation=True`.
            optimizer: Optional tfdpx optimizer, from which seed and first step are taken, so that a
                run resumed by `tfdpx.callbacks.Checkpoint` gets the draws of an uninterrupted run.
                The dataset ends after the steps that the plan has left. Without it, every
                iteration over the dataset draws again.
            seed: Optional int, for repeatable experiments: draws of a known seed give no privacy.
                See `tfdpx.sampling.sampled_batches`.
            start: Int or scalar variable, the first step. Needed only with a `seed`.
            pad_to_multiple_of: Int. Pads further: `tf.distribute` can then split a batch
                evenly: a multiple of the number of replicas.
            input_context: Optional `tf.distribute.InputContext` of one host of several, for
                `tfdpx.distributed.fit`: the shares of this host's replicas, see
                `tfdpx.sampling.sampled_batches.poisson_sampler`.

        Returns:
            A `tf.data.Dataset` of `(x, y, sample_weight)` of fixed shapes `[rows, ...]` that ends
            after the plan's steps, with `rows` the `capacity` rounded up to `pad_to_multiple_of`.
            Padding is zero, and its sample_weight (float32) is 0. With `user_ids` a row is a
            person: `[rows, k, ...]`.

        Raises:
            ValueError: If the arrays do not hold `num_examples` examples, a weight is invalid, or a
                data set has no known size or is made by `repeat`.

        Warns:
            UserWarning: If arrays hold equal rows, `x` with `y`, that chance does not explain, with
                the largest number of them and its `group_epsilon`. Both numbers are computed from
                private data without noise: they are for the user only, and no file holds them. Of
                more than 100,000 rows, as many are drawn at random and compared. Rows of a plan of
                people and of a `RandomAccess` are not compared.

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
        """Returns the `tfdpx.accounting.Ledger` after this number of updates of the plan.

        Args:
            steps: Int >= 0.

        Raises:
            ValueError: If `steps` is negative or no integer.
        """
        if steps == 0:
            return self.spent
        run = self.noise_multiplier, self.sampling_probability, steps
        shuffled = self.is_approximate
        entry = Entry(*run, poisson_sampled=not shuffled, unit=self.unit, shuffled=shuffled)
        return self.spent + Ledger((entry,))

    def attack_bounds(self) -> AttackBounds:
        """Returns bounds on finding out whether an example, or person, was in the data.

        Returns:
            `tfdpx.accounting.AttackBounds` after all steps, including what was spent before.

        Raises:
            ValueError: If no bound is known, as for `Ledger.attack_bounds`.
        """
        return self.ledger_at(self.steps).attack_bounds(self.delta)

    def statement(
        self,
        *,
        steps: int | None = None,
        dataset: str = "the training data",
        rows_per_user: int | None = None,
    ) -> str:
        """Returns a text to cite: the guarantee of a training by this plan, and its conditions.

        After a training, `model.optimizer.ledger.statement()` tells more.

        Args:
            steps: Optional int >= 0, the number of updates. Defaults to the plan's.
            dataset: String, the name of the data.
            rows_per_user: As for `tfdpx.accounting.Ledger.statement`.

        Returns:
            String of lines of at most 88 characters. Epsilon is rounded up.

        Raises:
            ValueError: If `steps` is negative or no integer.
        """
        ledger = self.ledger_at(self.steps if steps is None else steps)
        about = (dataset, self.num_examples, self.delta, self.accountant)
        goals = {"rows_per_user": rows_per_user, "goal": statement.words().goal_of(self)}
        return statement.words().of_ledger(ledger, *about, **goals, is_planned=True)

    def summary(self) -> str:
        """Returns the plan in a line of prose."""
        return statement.words().summary(self)

    def get_config(self) -> dict[str, Any]:
        """Returns all arguments, including the computed one."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**config, "spent": self.spent.to_json()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PrivacyPlan:
        """Returns the plan from `get_config`; its epsilon is not below the one of its other values.

        Args:
            config: Dict.

        Raises:
            ValueError: If a value is out of range.
        """
        plan = object.__new__(cls)
        # Before version 0.2 all plans were for examples, and there was no `spent`.
        config = {"unit": EXAMPLE, "spent": Ledger().to_json(), "right_guesses": None, **config}
        for field in dataclasses.fields(cls):
            value = config[field.name]
            value = Ledger.from_json(value) if field.name == "spent" else value
            object.__setattr__(plan, field.name, value)
        plan._check()
        # Solved values are within epsilon, so only edited ones change it.
        object.__setattr__(plan, "epsilon", max(plan.epsilon, plan.epsilon_at(plan.steps)))
        return plan


def largest_epsilon(right_guesses: float, epsilon: float | None, delta: float | None) -> float:
    """Returns the largest epsilon of a plan with these right guesses.

    Args:
        right_guesses: As for `PrivacyPlan`.
        epsilon: Must be None, because it follows.
        delta: Float in (0, 1).

    Raises:
        ValueError: If an argument is invalid.
    """
    accountants.check_delta(delta)
    is_valid = is_number(right_guesses) and 0.5 < right_guesses < 1
    hint = " 0.6 lets an attacker be right at most 60 times of 100; 0.5 is tossing a coin."
    require(is_valid, "right_guesses", right_guesses, "lie strictly between 0.5 and 1", hint)
    must = "be left out with `right_guesses`, from which it follows"
    require(epsilon is None, "epsilon", epsilon, must)
    return full_batch_epsilon(right_guesses, delta)


def _named(ledger):
    """Returns the ledger with a run number for every entry: each counts once."""
    if not isinstance(ledger, Ledger) or all(entry.run for entry in ledger.entries):
        return ledger
    # A digest of the content: every host must compute the same number.
    digest = hashlib.sha256(ledger.to_json().encode()).hexdigest()
    first = int(digest[:12], 16)
    entries = enumerate(ledger.entries)
    named = (e if e.run else dataclasses.replace(e, run=first + i + 1) for i, e in entries)
    return dataclasses.replace(ledger, entries=tuple(named))


def plan_warnings(
    epsilon: float, delta: float, num_examples: int | None, noise_multiplier: float
) -> list[str]:
    """Returns warnings about values that are valid but probably not intended, as sentences.

    Args:
        epsilon: Float.
        delta: Float.
        num_examples: Int, or None if unknown.
        noise_multiplier: Float.
    """
    sentences = []
    if num_examples is not None and delta > 1 / num_examples:
        sentences.append(
            f"delta={delta:g} exceeds 1/num_examples={1 / num_examples:.3g}: publishing one "
            "example in full, chosen at random, would satisfy such a guarantee. Choose a delta "
            f"well below, such as {0.1 / num_examples:.1g}."
        )
    if epsilon > _MOST_USEFUL_EPSILON and noise_multiplier:
        sentences.append(
            f"epsilon={epsilon:.4g} is too large to protect anyone in practice. Use more "
            "noise; epsilons from 1 to 10 are common."
        )
    if epsilon < _LEAST_USEFUL_EPSILON:
        sentences.append(
            f"epsilon={epsilon:.2g}: noise_multiplier={noise_multiplier:.4g} drowns any signal in "
            "the data, and nothing will be learned. Epsilons from 1 to 10 are common."
        )
    return sentences
