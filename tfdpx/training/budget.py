"""The end of a privacy plan: how many updates are left, and the callback that stops `fit`.

Every update of the weights counts against the plan, also if an earlier optimizer made the update or
if it used other data.
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
    """Returns how many more updates a plan allows, an int that may be negative.

    All updates of the weights count, except those in `plan.spent`. Updates with the plan's noise
    and sampling count as steps of the plan. All other updates use up part of the plan's epsilon.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
        sampling_probability: Optional float, the sampling probability of the coming updates. It is
            ignored if it is below the plan's.
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
    """Returns how many of the next `left` updates the plan's budget pays for, an int.

    Args:
        plan: A `PrivacyPlan`.
        spent: `Ledger` of the weights so far.
        other_updates: Int, the number of updates in `spent` that were not made with this plan.
        left: Int, the number of steps that the plan has left.
        rate: Float, the sampling probability of the next updates.
    """
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

    # Find the largest number of 1, 2, ..., left that does not exceed the budget.
    return bisect.bisect_left(range(1, left + 1), True, key=exceeds)


def ledger_at_rates(optimizer, plan):
    """Returns the `Ledger` of the weights, with unknown sampling probabilities filled in.

    If the sampling probability of an entry is unknown, it is taken from the same entry in
    `plan.spent`. If the entry is not there, the probability is the plan's for updates of this
    optimizer, and 1, an upper bound, for updates of other optimizers.

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
    # `assuming` adds up entries that became equal. `+` counts an entry only once if both ledgers
    # have it.
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
    """Returns how many updates the weights of a tfdpx optimizer have had, an int.

    Args:
        optimizer: A tfdpx optimizer.
        plan: Optional `PrivacyPlan`. If there is one, only updates with its noise and its sampling
            probability are counted.
    """
    return (
        optimizer.ledger.steps
        if plan is None
        else _ledger_without_spent(optimizer, plan).of(plan).steps
    )


def make_budget_error(optimizer, plan):
    """Returns a `BudgetExceeded` error with a message that says how much of a plan was spent.

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
    """Returns `{name: epsilon}` for the logs, where epsilon is the result of `epsilon_spent`.

    The name is "epsilon", or "epsilon_approximate" if this epsilon is not an upper bound.
    """
    approximate = plan.is_approximate or optimizer.epsilon_is_approximate
    name = "epsilon_approximate" if approximate else "epsilon"
    return {name: epsilon_spent(optimizer, plan, before)}


def epsilon_spent(optimizer, plan, before=EMPTY):
    """Returns the epsilon of all updates of the weights that an optimizer trains, a float.

    Unknown sampling probabilities are filled in as by `ledger_at_rates`.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`, which sets the delta and the accountant.
        before: `Ledger` of earlier uses of the same data that are not in the optimizer's ledger.
    """
    ledger = before + plan.spent + ledger_at_rates(optimizer, plan)
    return _epsilon_within_delta(ledger, plan)


def _epsilon_within_delta(ledger, plan):
    """Returns the epsilon of a ledger at the plan's delta, a float.

    Some entries of a ledger have a fixed delta. The plan's delta minus the sum of these deltas is
    the delta for the updates.
    """
    if not ledger.has_noise:
        return math.inf
    delta = plan.delta - math.fsum(delta for _, delta in ledger.parts()[1])
    return ledger.composed_epsilon(delta, plan.accountant) if delta > 0 else math.inf


class StopAtBudget(keras.callbacks.Callback):
    """Stops `fit` at the end of the session's plan, and logs epsilon.

    This callback also logs `ClipPolicy.released()`, for example the current clip. It runs before
    all other callbacks, so they find epsilon and the clip in the logs.
    """

    def on_train_begin(self, logs=None):
        """Raises BudgetExceeded if the first `steps_per_execution` updates exceed the budget."""
        self._is_spent = False
        first = model_internals.initial_epoch(self.model) or 0
        if first < self.params["epochs"]:  # A run that resumes after its last epoch makes no step.
            self.check()

    def check(self):
        """Raises BudgetExceeded if the next `steps_per_execution` updates exceed the budget."""
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
        """Computes the end of the budget again, because a callback may have restored weights."""
        self._session.find_end()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the training if the next `steps_per_execution` updates might exceed the budget."""
        if not self._session.has_room(self._execution()):
            # Only the callback that stops the training reports it.
            self._is_spent = not self.model.stop_training
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Adds epsilon and the numbers of `ClipPolicy.released()` to the logs."""
        optimizer = self._optimizer
        if logs is not None and optimizer.plan is not None:
            logs.update(epsilon_log(optimizer.plan, optimizer))
        if logs is not None:
            logs.update(optimizer.clip_policy.released())

    def on_train_end(self, logs=None):
        """Prints that the budget is used up, unless `fit` is silent."""
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
        """Returns the number of updates that Keras makes before callbacks run again, an int."""
        execution, session = self.model.steps_per_execution, self._session
        if session.draws is None:
            return execution
        # A plan's batches end where the plan ended when `fit` began, so the last execution may be
        # shorter.
        return max(1, min(execution, (session.draws.ends_at or 0) - session.number))

    @property
    def _optimizer(self):
        return model_internals.innermost(self.model.optimizer)

    @property
    def _session(self):
        return self._optimizer.session
