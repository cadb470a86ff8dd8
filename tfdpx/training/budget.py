"""The end of a privacy plan: the updates that it still pays for, and the callback that stops `fit`.

Everything spent on the weights counts, on any data.
"""

import bisect
import dataclasses
import functools
import math

import keras

from tfdpx._keras import model_internals
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import EMPTY, Entry, Ledger


class BudgetExceeded(RuntimeError):
    """Raised when the privacy budget does not pay for the next step."""


def updates_left(optimizer, plan, sampling_probability=None):
    """Returns the number of updates that a plan still pays for, an int; may be negative.

    Everything spent on the weights counts, except the plan's own `spent`. Updates with the plan's
    noise and sampling count as its steps, all others by their epsilon.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
        sampling_probability: Optional float, of the updates to come if it is above the plan's.
    """
    ledger = _ledger_without_spent(optimizer, plan)
    rate = max(sampling_probability or 0.0, plan.sampling_probability)
    left = plan.steps - ledger.of(plan).steps
    other_updates = ledger.steps - ledger.of(plan).steps
    if left <= 0 or not other_updates and math.isclose(rate, plan.sampling_probability):
        return left
    spent = plan.spent + ledger_at_rates(optimizer, plan)
    return _count_affordable(plan, Ledger(spent.entries), other_updates, left, rate)


@functools.lru_cache(maxsize=64)
def _count_affordable(plan, spent, other_updates, left, rate):
    """Int: how many of `left` updates at `rate` keep the epsilon of all within the plan's."""
    if other_updates:
        warn(
            f"{other_updates} updates of the model's weights are not this plan's. They count: "
            f"epsilon is {_epsilon_within_delta(spent, plan):.4g} now, and "
            "composes with the plan's steps."
        )

    def exceeds(steps):
        total = spent + Ledger((Entry(plan.noise_multiplier, rate, steps, unit=plan.unit),))
        if _epsilon_within_delta(total, plan) > plan.epsilon:
            return True
        most = plan.right_guesses
        is_unknown = total.is_approximate  # No bound on attacks is known.
        return bool(most) and (is_unknown or total.attack_bounds(plan.delta).right_guesses > most)

    # How many of 1, 2, ..., left steps do not exceed.
    return bisect.bisect_left(range(1, left + 1), True, key=exceeds)


def ledger_at_rates(optimizer, plan):
    """Returns the `Ledger` of the weights without unknown sampling probabilities.

    A rate belongs to the optimizer that took the updates: a plan tells it for its own optimizer and
    for the entries of its `spent`. Updates of other optimizers count at 1.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
    """
    unknown = {"sampling_probability": None}
    declared = {dataclasses.replace(e, **unknown).key: e for e in plan.spent.entries}
    ledger, others, of_spent = optimizer.ledger, [], []
    for entry in ledger.entries:
        if entry.sampling_probability is not None:
            others.append(entry)
        elif entry.key in declared:
            of_spent.append(dataclasses.replace(declared[entry.key], steps=entry.steps))
        else:
            is_own = optimizer.account.has_made(entry.run)
            rate = plan.sampling_probability if is_own else 1.0
            others.append(dataclasses.replace(entry, sampling_probability=rate))
    # `assuming` adds up equal entries. Those in `spent`, which the weights may have, are the same.
    joined = Ledger(tuple(others)).assuming(1.0) + Ledger(tuple(of_spent))
    return dataclasses.replace(ledger, entries=joined.entries)


def _ledger_without_spent(optimizer, plan):
    """Returns the `Ledger` of the weights without the entries that the plan counts as `spent`."""
    steps_before = {entry.key: entry.steps for entry in plan.spent.entries}
    ledger = ledger_at_rates(optimizer, plan)
    steps = [entry.steps - steps_before.get(entry.key, 0) for entry in ledger.entries]
    pairs = zip(ledger.entries, steps, strict=True)
    return Ledger(tuple(dataclasses.replace(e, steps=n) for e, n in pairs if n > 0))


def steps_taken(optimizer, plan=None):
    """Returns the number of updates that the weights of a tfdpx optimizer have had, an int.

    Args:
        optimizer: A tfdpx optimizer.
        plan: Optional `PrivacyPlan`: only its own updates, by their noise and sampling.
    """
    return (
        optimizer.ledger.steps
        if plan is None
        else _ledger_without_spent(optimizer, plan).of(plan).steps
    )


def make_budget_error(optimizer, plan):
    """Returns the `BudgetExceeded` with a message that names how much of a plan was spent.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
    """
    steps = steps_taken(optimizer, plan)
    [(name, epsilon)] = epsilon_log(plan, optimizer).items()
    advice = f"a longer one, `tfdpx.PrivacyPlan(..., steps={steps + 1})` or more, or of other "
    advice = f"{advice}data or noise, " if steps else ""
    return BudgetExceeded(
        f"The privacy budget is used up: {steps} of {plan.steps} steps were taken, at "
        f"{name}={epsilon:.4g}, delta={plan.delta}; the plan's is "
        f"{plan.epsilon:.4g}. Updates on all data sets add up in one ledger, an upper bound where "
        "no person is in two. To train on, compile with an optimizer of a plan that has room for "
        f"them: {advice}`tfdpx.PrivacyPlan(..., spent=model.optimizer.ledger)`."
    )


def epsilon_log(plan, optimizer, before=EMPTY):
    """Returns a dict of the epsilon spent on the optimizer's weights, by its name in the logs."""
    approximate = plan.is_approximate or optimizer.epsilon_is_approximate
    name = "epsilon_approximate" if approximate else "epsilon"
    return {name: epsilon_spent(optimizer, plan, before)}


def epsilon_spent(optimizer, plan, before=EMPTY):
    """Float: the epsilon of all updates behind the weights that an optimizer trains.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`: gives delta, the accountant, and a sampling probability for the
            optimizer's own updates if none is known. Updates of other optimizers count at 1.
        before: `Ledger` of the same data that the optimizer's does not hold.
    """
    ledger = before + plan.spent + ledger_at_rates(optimizer, plan)
    return _epsilon_within_delta(ledger, plan)


def _epsilon_within_delta(ledger, plan):
    """Float: the epsilon of a ledger at the plan's delta, which pays for all its deltas."""
    if not ledger.has_noise:
        return math.inf
    delta = plan.delta - math.fsum(delta for _, delta in ledger.parts()[1])
    return ledger.composed_epsilon(delta, plan.accountant) if delta > 0 else math.inf


class StopAtBudget(keras.callbacks.Callback):
    """Stops `fit` at the end of the session's plan, and logs epsilon and a clip policy's releases.

    It comes before all other callbacks, and they find these numbers in the logs.
    """

    def on_train_begin(self, logs=None):
        """Raises BudgetExceeded if the budget does not pay for one execution."""
        self._is_spent = False
        first = model_internals.initial_epoch(self.model) or 0
        if first < self.params["epochs"]:  # Resumed after its last epoch, no step follows.
            self.check()

    def check(self):
        """Raises BudgetExceeded unless the next execution fits into the budget."""
        session, execution = self._session, self._execution()
        if session.has_room(execution):
            return
        if not session.left:
            raise make_budget_error(self._optimizer, session.plan)
        steps = steps_taken(self._optimizer, session.plan)
        raise BudgetExceeded(
            f"An execution of {execution} steps does not fit into the budget: {steps} of "
            f"{session.plan.steps} steps were taken. Compile with a smaller `steps_per_execution`."
        )

    def on_epoch_begin(self, epoch, logs=None):
        """Computes the end again, because a callback may have restored weights."""
        self._session.find_end()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the training when the next execution might exceed the budget."""
        if not self._session.has_room(self._execution()):
            # The first to stop it says so.
            self._is_spent = not self.model.stop_training
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epsilon spent to the logs."""
        optimizer = self._optimizer
        if logs is not None and optimizer.plan is not None:
            logs.update(epsilon_log(optimizer.plan, optimizer))
        if logs is not None:
            logs.update(optimizer.clip_policy.released())

    def on_train_end(self, logs=None):
        """Says that the budget is used up, unless `fit` is silent."""
        if not self._is_spent or not self.params.get("verbose"):
            return
        session, optimizer = self._session, self._optimizer
        [(name, epsilon)] = epsilon_log(session.plan, optimizer).items()
        steps, left = steps_taken(optimizer), session.left
        text = f"Privacy budget used up after {steps} updates"
        if left:
            execution = self.model.steps_per_execution
            text = (
                f"Training ended after {steps} updates, {left} before the end of the plan, since "
                f"`steps_per_execution={execution}` of them do not fit"
            )
        print(f"{text}: {name}={epsilon:.4g} at delta={session.plan.delta:g}.")

    def _execution(self):
        """Int: the updates that must fit into the budget to continue."""
        execution, session = self.model.steps_per_execution, self._session
        if session.draws is None:
            return execution
        # A plan's batches, and the last execution, end where the plan ended as `fit` began.
        return max(1, min(execution, (session.draws.ends_at or 0) - session.number))

    @property
    def _optimizer(self):
        return model_internals.innermost(self.model.optimizer)

    @property
    def _session(self):
        return self._optimizer.session
