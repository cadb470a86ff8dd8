"""The plan of a private training: computes the noise, steps or batch size for a privacy budget."""

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

# The share of delta for steps that draw more examples than `capacity`. The other half of the
# accountants' reserve is for the noise, which has a largest value.
_OVERFLOW_SHARE = accountants.RESERVED_SHARE / 2
# With a smaller epsilon the noise hides all signal in the data.
_LEAST_USEFUL_EPSILON = 0.01
# With a larger epsilon the guarantee means nothing in practice.
_MOST_USEFUL_EPSILON = 100.0


@dataclasses.dataclass(frozen=True, init=False)
class PrivacyPlan:
    """The plan of a private training: how many updates, on which batches, with how much noise.

    Leave out exactly one of `noise_multiplier`, `steps`, `batch_size` and `epsilon`. The plan
    computes the missing one: the least noise, the largest number of steps or the largest batch for
    `epsilon`, or the epsilon that follows from the other three. Epsilon is never exceeded:
    `epsilon_at(steps) <= epsilon`. A plan is immutable.

    Guarantee: `steps` updates of a tfdpx optimizer on `plan.batches(...)` are (epsilon, delta)-
    differentially private for adding or removing one example; `tfdpx.accounting.epsilon` lists the
    conditions. The plan itself is public, including `num_examples` and `batch_size`. Neighbouring
    data sets are `num_examples` examples, and the same examples without one of them. For both, the
    sampling probability is `batch_size / num_examples`, and sums are divided by `batch_size`. So
    the presence and the content of an example are protected, but the number of examples in the plan
    is not. (This neighbouring relation is called "zero-out" if an empty example replaces the
    missing one.) Delta includes the probability that a step draws more examples than `capacity`.

    With `sampling="shuffle"`, batches are parts of a permutation of the data, but epsilon is
    computed for Poisson sampling. It is then only an approximation, as in De et al. 2022
    ("Unlocking High-Accuracy Differentially Private Image Classification through Scale").

    With `unit="user"`, all examples of one person are protected together. Each update draws people,
    takes up to k examples of each person, and clips the mean of their gradients. The guarantee is
    the same, with "person" instead of "example", and the number of people is public. To tell tfdpx
    the person of each example, call `fit(x, y, user_ids=ids)`.

    With `spent`, a ledger, epsilon covers the training together with the entries of this ledger.
    Delta includes the deltas of paid searches and other mechanisms among these entries.

    With `right_guesses` instead of `epsilon`, the plan limits attacks (`attack_bounds`). Suppose
    that a fair coin decides whether an example is in the data, and that an attacker who knows
    everything else guesses the result. Then the share of right guesses is at most `right_guesses`.
    This share is an average over the random batches. With few updates and a small sampling
    probability, most examples are never drawn. Little noise would then be enough for the average,
    but an attacker could recognise the examples that were drawn. To prevent this, epsilon is also
    limited to the epsilon that full batches have at the same share of right guesses, for example
    2.02 for 0.6 and 3.25 for 0.65 at delta 1e-5. If this limit on epsilon is the stricter one, the
    share of right guesses stays below `right_guesses`, and `summary` says so.

    Args:
        num_examples: Int. Number of private examples, or of people for `unit="user"`; public.
        batch_size: Int. Expected number of examples, or people, per step, over all devices.
        steps: Int. Number of model updates. An update of several microbatches counts once.
        noise_multiplier: Float >= 0. Standard deviation of the noise on the clipped sum, divided by
            `l2_norm_clip`. 0 trains without privacy: epsilon is infinite.
        epsilon: Float > 0. The privacy budget.
        delta: Float in (0, 1), well below 1/num_examples.
        sampling: "poisson" draws each example independently; "shuffle" permutes the data.
        accountant: "pld" (tighter) or "rdp"; for full batches also "gdp" or "zcdp".
        epochs: Float > 0, instead of `steps`: the average number of times that each example is
            drawn. The plan has `ceil(epochs * num_examples / batch_size)` steps.
        unit: "example" or "user", the unit that epsilon protects.
        spent: Optional `Ledger` of the same data, for example from `tfdpx.private_adapt`.
        right_guesses: Float in (0.5, 1), instead of `epsilon`, for example 0.6. A coin is right
            with probability 0.5.

    Raises:
        ValueError: If an argument is out of range, if none or several of the four arguments are
            left out, or if no value meets the target.

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
        """Raises TypeError for arguments of other libraries, such as `target_epsilon`."""
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
            if self.attack_bounds().right_guesses > right_guesses:  # Rare, such as after a search.
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
                object.__setattr__(self, name, int(value))  # NumPy's ints cannot go into a config.

    @property
    def sampling_probability(self) -> float:
        """Float: the probability that a step draws an example, batch_size / num_examples."""
        return self.batch_size / self.num_examples

    @property
    def epochs(self) -> float:
        """Float: how often an example is drawn on average, steps * batch_size / num_examples.

        The `epochs` of `fit` may differ: they decide only how often `fit` reports and validates.
        """
        return self.steps * self.sampling_probability

    @property
    def is_approximate(self) -> bool:
        """Bool: whether batches are shuffled, while epsilon assumes Poisson sampling."""
        return self.sampling != "poisson"

    @functools.cached_property
    def capacity(self) -> int:
        """Int, the number of rows of each batch.

        With Poisson sampling the number of examples in a batch varies. Batches are padded to
        `capacity` rows, and a step that draws more examples raises an error. This error can reveal
        something about the data: if the other examples fill a batch, one more example decides
        whether the error is raised. So the capacity is large enough to make this unlikely: the
        probability that the other examples fill any batch of the plan is at most `delta * 5e-5`
        (binomial tail, union bound over the steps). This part of delta is reserved. The capacity is
        the smallest such number, and at most `num_examples`.
        """
        if self.sampling == "shuffle":
            return self.batch_size
        num_others = scipy.stats.binom(self.num_examples - 1, self.sampling_probability)
        allowed = _OVERFLOW_SHARE * self.delta / self.steps
        # scipy's quantile function is too imprecise: for probabilities below 1e-16 it returns all
        # rows.
        return 1 + bisect.bisect_left(
            range(1, self.num_examples), True, key=lambda rows: num_others.sf(rows - 1) <= allowed
        )

    def epsilon_at(self, steps: int) -> float:
        """Returns the epsilon of `steps` updates and of `spent`, at the plan's `delta`.

        Args:
            steps: Int >= 0, which may exceed the plan's steps.

        Returns:
            Float. Without `spent` it is 0.0 for 0 steps. It is infinite if there are updates and
            `noise_multiplier` is 0.

        Raises:
            ValueError: If `steps` is negative or no integer.
        """
        run = self.noise_multiplier, self.sampling_probability, steps
        return self._epsilon_of(*run, self.delta, self.accountant)

    def _epsilon_of(self, noise_multiplier, sampling_probability, steps, delta, accountant):
        """Returns the joint epsilon of a run and of `spent`, at `delta` for both together."""
        runs, pairs = self.spent.parts()
        epsilons, deltas = (math.fsum(pair[i] for pair in pairs) for i in (0, 1))
        run = (noise_multiplier, sampling_probability, steps)
        if delta <= deltas:
            return math.inf
        return accountants.composed_epsilon((*runs, run), delta - deltas, accountant) + epsilons

    def _cost_of(self, *run):
        """Returns the larger of two epsilons, which must not exceed the plan's epsilon.

        The first is the epsilon of the run. The second is only for plans with `right_guesses`: the
        epsilon that full batches have at the same share of right guesses as the run.

        Args:
            *run: The arguments of `_epsilon_of`.
        """
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
        """Returns a dataset of randomly drawn batches, one for each step of the plan.

        Pass the dataset to `model.fit` as it is. `take`, `cache`, `map` and other methods make a
        different dataset, and for training on such a dataset epsilon is not exact. `fit` uses each
        batch only once, even if it iterates over the dataset several times.

        Args:
            x: The private examples, in one of three forms. First, an array, pandas object or list
                of numbers of shape `[num_examples, ...]`, or a dict, tuple or list of such arrays.
                Second, a `tfdpx.RandomAccess`, which includes the targets and reads examples when
                they are drawn. Third, a `tf.data.Dataset` of examples or batches, which includes
                the targets and has a known size. Any example may be drawn at any time, so this
                method reads the whole dataset into memory and prints its size.
            y: The targets, in the same forms as `x`, or None.
            sample_weight: Optional array of shape `[num_examples]`, finite and >= 0. An example
                with weight 0 counts as absent.
            class_weight: Optional dict from class (int) to weight, finite and >= 0. Other classes
                have weight 1. Requires a `y` that is a single array: either class indices of shape
                `[num_examples]` or `[num_examples, 1]`, or one-hot of shape
                `[num_examples, num_classes]`. A private optimizer multiplies clipped gradients by
                these weights, divided by the largest one. With `user_ids`, or without such an
                optimizer, the class weights multiply `sample_weight` instead.
            user_ids: Array of `num_rows` ints or strings, the person of each example, for a plan
                with `unit="user"`. The plan's `num_examples` is the number of different ids.
            examples_per_user: Int k, only with `user_ids`. Defaults to 4. If a person has more than
                k examples, each update draws k of them at random. If a person has fewer, the rest
                is padding, which takes the same time.
            validation_split: Float in [0, 1). As in `fit`, the last part of the arrays is used only
                for validation, and the plan's `num_examples` does not count it. It is private as
                well, but no epsilon covers it, so callbacks may act on its metrics only if the
                optimizer has `public_validation=True`.
            optimizer: Optional tfdpx optimizer. The dataset takes its seed and its first step from
                the optimizer. So if `tfdpx.callbacks.Checkpoint` resumes a run, the dataset has
                only the remaining batches. Without an optimizer, each iteration over the dataset
                draws new batches.
            seed: Optional int, for repeatable experiments. There is no privacy if the seed is
                known. See `tfdpx.sampling.sampled_batches`.
            start: Int or scalar variable, the first step. Needed only with a `seed`.
            pad_to_multiple_of: Int. Batches are padded to a multiple of this number of rows. Pass
                the number of replicas, so that `tf.distribute` can split a batch evenly.
            input_context: Optional `tf.distribute.InputContext` of one of several hosts, for
                `tfdpx.distributed.fit`. The batches then have only the rows of this host's
                replicas; see `tfdpx.sampling.sampled_batches.poisson_sampler`.

        Returns:
            A `tf.data.Dataset` of batches `(x, y, sample_weight)` with fixed shapes `[rows, ...]`.
            `rows` is `capacity`, rounded up to a multiple of `pad_to_multiple_of`. Padded rows are
            zero, and their sample_weight (float32) is 0. With `user_ids` a row is a person, and the
            shapes are `[rows, k, ...]`. The dataset ends after the plan's steps.

        Raises:
            ValueError: If `x` does not have `num_examples` examples, a weight is invalid, or a
                `tf.data.Dataset` has no known size or was made by `repeat`.

        Warns:
            UserWarning: If `x` and `y` have more equal rows than chance explains, because equal
                rows may belong to one person. The text tells the largest number of equal rows, and
                the `group_epsilon` for this number. Both are computed from private data without
                noise, so they are only for the user and are not saved. If there are more than
                100,000 rows, a random sample of 100,000 is compared. For a plan of people or a
                `RandomAccess`, no rows are compared.

        Example:
        >>> plan = PrivacyPlan(1000, batch_size=100, steps=20, epsilon=8.0, delta=1e-5)
        >>> x, y, sample_weight = next(iter(plan.batches(np.ones((1000, 2)), np.zeros(1000))))
        >>> [len(x), len(y), len(sample_weight)] == 3 * [plan.capacity]
        True
        >>> drawn = int(np.sum(sample_weight))  # 100 on average; the rest is padding.
        >>> 0 < drawn < plan.capacity and not np.any(x[drawn:])
        True
        """
        from tfdpx.sampling import sampled_batches  # Imported here: accounting needs no TensorFlow.

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
        """Returns the `tfdpx.accounting.Ledger` after `steps` updates of the plan.

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
        """Returns bounds on attacks that find out whether an example, or person, was in the data.

        Returns:
            `tfdpx.accounting.AttackBounds`, for all steps of the plan and `spent`.

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
        """Returns a text that states the guarantee of a training by this plan, and its conditions.

        After the training, use `model.optimizer.ledger.statement()`, which is about the updates
        that were made.

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
        """Returns a sentence that describes the plan."""
        return statement.words().summary(self)

    def get_config(self) -> dict[str, Any]:
        """Returns a dict of all arguments, including the one that was computed."""
        config = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**config, "spent": self.spent.to_json()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PrivacyPlan:
        """Returns the plan from a dict that `get_config` returned.

        If the dict was edited and its epsilon is too low for the other values, epsilon is raised.

        Args:
            config: Dict of all arguments.

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
        # Computed values never exceed epsilon. So epsilon only grows here if someone edited the
        # config.
        object.__setattr__(plan, "epsilon", max(plan.epsilon, plan.epsilon_at(plan.steps)))
        return plan


def largest_epsilon(right_guesses: float, epsilon: float | None, delta: float | None) -> float:
    """Returns the largest epsilon that a plan with `right_guesses=` may have.

    Args:
        right_guesses: As for `PrivacyPlan`.
        epsilon: Must be None, because it follows from `right_guesses`.
        delta: Float in (0, 1).

    Raises:
        ValueError: If an argument is invalid.
    """
    accountants.check_delta(delta)
    is_valid = is_number(right_guesses) and 0.5 < right_guesses < 1
    hint = " 0.6 lets an attacker be right at most 60 times out of 100; 0.5 is tossing a coin."
    require(is_valid, "right_guesses", right_guesses, "lie strictly between 0.5 and 1", hint)
    must = "be left out with `right_guesses`, from which it follows"
    require(epsilon is None, "epsilon", epsilon, must)
    return full_batch_epsilon(right_guesses, delta)


def _named(ledger):
    """Returns a ledger in which each entry has a run number, so sums count each entry only once."""
    if not isinstance(ledger, Ledger) or all(entry.run for entry in ledger.entries):
        return ledger
    # The numbers are computed from a digest, because they must be the same on all hosts.
    digest = hashlib.sha256(ledger.to_json().encode()).hexdigest()
    first = int(digest[:12], 16)
    entries = enumerate(ledger.entries)
    named = (e if e.run else dataclasses.replace(e, run=first + i + 1) for i, e in entries)
    return dataclasses.replace(ledger, entries=tuple(named))


def plan_warnings(
    epsilon: float, delta: float, num_examples: int | None, noise_multiplier: float
) -> list[str]:
    """Returns warnings about values that are valid in a plan, but probably not intended.

    Args:
        epsilon: Float, as for `PrivacyPlan`.
        delta: Float.
        num_examples: Int, or None if unknown.
        noise_multiplier: Float.

    Returns:
        List of strings.
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
