"""One training under way: its secret, its draws, and the end of its budget.

`fit`, `tfdpx.distributed.fit` and `train_on_batch` are a session each. Its secret is 128 fresh bits
of the operating system, in memory alone, from which draws, views, masks and noise follow by the
number of the update. So no two trainings share any of them, even after copies, loads or forks.

A plan ends twice: a mask in the graph stops whoever calls the step, and `StopAtBudget` stops `fit`
politely before that.
"""

import bisect
import dataclasses
import functools
import math
import secrets
import threading

import keras
import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx._keras import model_internals
from tfdpx._keras.variables import value_of, variable
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import EMPTY, Entry, Ledger
from tfdpx.training import allocator

BUSY = (
    "This optimizer is training already, in another thread or around this `fit`. One account "
    "cannot follow two trainings at a time: wait until the other has ended."
)
_NEVER = 2**62


class BudgetExceeded(RuntimeError):
    """The privacy budget does not pay for the next step."""


class StepState:
    """The numbers of a training that the traced step reads: its secret, its updates and its end.

    They are variables that neither Keras nor `tf.train.Checkpoint` knows, because no file may hold
    the secret, and because a step that was traced once serves every session.
    """

    def __init__(self):
        self._secret = variable(noise.make_seed(), "int64")
        self._before = variable(0, "int64")  # The updates made before those that are counted here.
        self._updates = variable(0, "int64")
        self._end = variable(_NEVER, "int64")
        self._most = variable(_NEVER, "int64")
        self._nonfinite = variable(0, "int64")
        self.lock = threading.RLock()  # Held by an update outside of any `fit`, and as one begins.

    @property
    def updates(self):
        """Int: the updates that this optimizer has made; nothing that a user assigns changes it."""
        return int(value_of(self._updates))

    @property
    def number(self):
        """Int: the number of the next update, which keys its draws and noise."""
        return int(value_of(self._before)) + self.updates

    @property
    def nonfinite(self):
        """Int: examples so far whose gradient was not finite. Not private."""
        return int(value_of(self._nonfinite))

    @property
    def end(self):
        """Int: the updates after which nothing is left; 2**62 without a plan."""
        return int(value_of(self._end))

    def begin(self, secret, number, most=None):
        """Keys the updates to come by another secret.

        Args:
            secret: Two ints, int64.
            number: Int, of the next update.
            most: Int, the examples that an update may have; None where a plan draws them.
        """
        self._secret.assign(np.array(secret, "int64"))
        self._before.assign(number - self.updates)
        self._most.assign(_NEVER if most is None else most)

    def end_after(self, left):
        """Sets how many more updates there may be, an int; None for any number."""
        self._end.assign(_NEVER if left is None else self.updates + left)

    def key(self):
        """int64 tensor [2]: the key of the next update's noise, views and masks, of no other's."""
        return noise.fold_in(self._secret, self._before + self._updates)

    def mask_after_budget(self, sums, examples, most=None):
        """Lets the data change nothing in an update that the account does not count on.

        That is one after the end of the plan, or of more examples than declared. It is an error; or
        under XLA, which knows no errors, an update of noise alone, which costs no privacy.

        Args:
            sums: List of tensors, computed from the data.
            examples: Scalar tensor, the examples of the update.
            most: Int, how many it may have; None for the number of the session.

        Returns:
            List of tensors.
        """
        is_paid = self._updates < self._end
        fits = tf.cast(examples, "int64") <= (self._most if most is None else most)
        checks = [
            tf.debugging.Assert(
                is_paid, ["The privacy budget of the optimizer's plan is used up."]
            ),
            tf.debugging.Assert(
                fits, ["This batch is too large: the optimizer counts on fewer examples.", examples]
            ),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            return [tf.where(is_paid & fits, total, tf.zeros_like(total)) for total in sums]

    def count(self, nonfinite):
        """Counts an update.

        Args:
            nonfinite: Scalar tensor, the examples of the update whose gradient was not finite.
        """
        self._updates.assign_add(1)
        self._nonfinite.assign_add(tf.cast(nonfinite, "int64"))


class Session:
    """Context manager in which the updates of one optimizer are those of one training.

    Args:
        optimizer: The tfdpx optimizer.
        draws: The `BatchSampler` of the data set, or None where no plan drew it.
        sampling_probability: Float, or None where unknown.
        is_seeded: Bool, whether a seed of the data set's draws was given.
        callbacks: List of the callbacks of a `fit`.

    Attributes:
        draws: The argument.
        plan: The `PrivacyPlan` that ends the training, or None.
        thread: Int, the thread that it was made in.

    Raises:
        RuntimeError: On entering, if the optimizer or the data set is in a session already.
    """

    def __init__(self, optimizer, draws, sampling_probability, is_seeded=False, callbacks=()):
        self.draws, self.plan, self._is_seeded = draws, None, is_seeded
        self._optimizer, self._state = optimizer, optimizer.state
        self._callbacks = callbacks
        self.thread = threading.get_ident()
        self._seed, self._probability = optimizer.seed, sampling_probability
        plans = [optimizer.plan if optimizer.noise_multiplier else None, draws and draws.plan]
        self._plans = [plan for plan in plans if plan is not None]
        self._entropy, self._renewals = secrets.randbits(128), 0
        self._saved, self._unsaved = None, []  # The updates that a save holds, and what waits.

    def __enter__(self):
        allocator.keep_freed_memory()
        optimizer, draws = self._optimizer, self.draws
        with optimizer.state.lock:
            if optimizer.session is not None:
                raise RuntimeError(BUSY)
            if draws is not None and draws.session is not None:
                raise RuntimeError(
                    "These batches are being trained on already, and each draw may be used once. "
                    "Make another data set: `plan.batches(...)`."
                )
            is_exact = draws is not None and not draws.plan.is_approximate
            seeded = self._seed is not None or self._is_seeded
            self._usual = optimizer.account.open(self._probability, is_exact, seeded)
            self.renew()
            optimizer.session, optimizer.account.on_spent = self, self.find_end
            if draws is not None:
                draws.session = self
        return self

    def __exit__(self, *error):
        self._optimizer.session, self._optimizer.account.on_spent = None, lambda: None
        if self.draws is not None:
            self.draws.session = None
        self._optimizer.account.open(**self._usual)
        reset_between_fits(self._optimizer)

    def renew(self):
        """Takes a fresh secret and finds the end: at the start, and when weights were restored."""
        self._renewals += 1
        self.begin()
        self.find_end()

    def begin(self):
        """Keys the updates to come by the session's secret."""
        most = None if self.draws is not None else most_examples(self._optimizer)
        self._state.begin(self._secret("step"), self._optimizer.ledger.steps, most)

    def share(self, entropy):
        """Takes the chief's secret, so that all hosts make one training.

        Args:
            entropy: Int of 128 random bits that all hosts share.
        """
        self._entropy, self._renewals = entropy, 0
        self._optimizer.account.renew(secret_of(entropy, "run")[0])
        self.renew()

    def draw_seed(self):
        """Two ints: the seed of the draws."""
        return self._secret("draws")

    def _secret(self, use):
        # With a seed, the number of the update alone distinguishes updates.
        entropy = (self._entropy, self._renewals) if self._seed is None else self._seed
        return secret_of(entropy, use)

    def best_weights(self):
        """Lists of arrays that Keras's own `EarlyStopping` took from the model in this training."""
        stopping = [c for c in self._callbacks if type(c) is keras.callbacks.EarlyStopping]
        return [callback.best_weights for callback in stopping if callback.best_weights]

    @property
    def number(self):
        """Int: the number of the next update, which keys its draws."""
        return self._state.number

    @property
    def updates(self):
        """Int: the updates that the optimizer has made, in this session and before it."""
        return self._state.updates

    @property
    def left(self):
        """Int: the updates that may still be made; None without a plan."""
        return None if self.plan is None else max(0, self._state.end - self._state.updates)

    def add_budget(self, plan):
        """Ends the training where another plan ends, too.

        Args:
            plan: A `PrivacyPlan`.
        """
        self._plans.append(plan)
        self.find_end()

    def find_end(self):
        """Finds the end anew, by all that is known to be spent."""
        rate = self._probability
        counts = [updates_left(self._optimizer, plan, rate) for plan in self._plans]
        least = min(counts, default=None)
        self.plan = None if least is None else self._plans[counts.index(least)]
        self._state.end_after(least)

    def has_room(self, updates):
        """Whether the budget pays for so many updates."""
        return self.left is None or self.left >= updates

    def after_save(self, write):
        """Calls `write()` once a save holds the updates made so far; at once if nothing saves."""
        if self._saved in (None, self.updates):
            write()
        else:
            self._unsaved.append(write)

    def saved(self):
        """Writes what has waited: a save holds the updates made so far, and will hold others."""
        self._saved, waiting, self._unsaved = self.updates, self._unsaved, []
        for write in waiting:
            write()


def reset_between_fits(optimizer):
    """Draws a fresh secret and finds the plan's end, for updates outside of `fit`.

    Args:
        optimizer: The tfdpx optimizer.
    """
    start_unmanaged_step(optimizer)
    ends = optimizer.plan is not None and optimizer.noise_multiplier
    optimizer.state.end_after(updates_left(optimizer, optimizer.plan) if ends else None)


def start_unmanaged_step(optimizer):
    """Keys the updates to come by a fresh secret, of no session.

    Args:
        optimizer: The tfdpx optimizer.
    """
    seed = secrets.randbits(128) if optimizer.seed is None else optimizer.seed
    most = most_examples(optimizer)
    optimizer.state.begin(secret_of(seed, "step"), optimizer.ledger.steps, most)


def most_examples(optimizer):
    """Int: the examples that an update on data that no plan draws may have; None for any number."""
    if not optimizer.noise_multiplier:
        return None
    # A Poisson sample varies around its size: up to a plan's capacity, or six deviations and a few.
    if optimizer.plan is not None:
        return optimizer.plan.capacity
    return optimizer.batch_size + 6 * math.isqrt(optimizer.batch_size) + 16


def after_save(model, write):
    """`Session.after_save` of the training of a model; at once where there is none.

    Args:
        model: `keras.Model`.
        write: Function without arguments.
    """
    session = getattr(model_internals.innermost(model.optimizer), "session", None)
    if session is None:
        write()
    else:
        session.after_save(write)


def secret_of(entropy, use):
    """Two ints, int64: 128 bits that follow from an int or a tuple, others for each use.

    Args:
        entropy: Int or tuple of ints.
        use: Str.
    """
    return noise.make_seed(int.from_bytes(f"{use} {entropy}".encode(), "big"))


def updates_left(optimizer, plan, sampling_probability=None):
    """The number of updates that a plan still pays for, an int; may be negative.

    All that was spent on the weights counts, but what the plan names as `spent` already: updates of
    the plan's noise and sampling as its steps, all others by their epsilon.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
        sampling_probability: Optional float, of the updates to come if it is above the plan's.
    """
    rest = _not_before(optimizer, plan)
    rate = max(sampling_probability or 0.0, plan.sampling_probability)
    left = plan.steps - rest.of(plan).steps
    others = rest.steps - rest.of(plan).steps
    if left <= 0 or not others and math.isclose(rate, plan.sampling_probability):
        return left
    spent = plan.spent + optimizer.ledger.assuming(plan.sampling_probability)
    return _affordable(plan, Ledger(spent.entries), others, left, rate)


@functools.lru_cache(maxsize=64)
def _affordable(plan, spent, others, left, rate):
    """Int: how many of `left` updates at `rate` keep the epsilon of all within the plan's."""
    if others:
        warn(
            f"{others} updates of the model's weights are not this plan's. They count: "
            f"epsilon is {spent.composed_epsilon(plan.delta, plan.accountant):.4g} now, and "
            "composes with the plan's steps."
        )

    def exceeds(steps):
        total = spent + Ledger((Entry(plan.noise_multiplier, rate, steps, unit=plan.unit),))
        return total.composed_epsilon(plan.delta, plan.accountant) > plan.epsilon

    # How many of 1, 2, ..., left steps do not exceed.
    return bisect.bisect_left(range(1, left + 1), True, key=exceeds)


def _not_before(optimizer, plan):
    """The `Ledger` of the weights without what the plan counts as spent before it."""
    before = {entry.key: entry.steps for entry in plan.spent.entries}
    ledger = optimizer.ledger.assuming(plan.sampling_probability)
    steps = [entry.steps - before.get(entry.key, 0) for entry in ledger.entries]
    rest = zip(ledger.entries, steps, strict=True)
    return Ledger(tuple(dataclasses.replace(e, steps=n) for e, n in rest if n > 0))


def steps_taken(optimizer, plan=None):
    """The number of updates behind the weights that a tfdpx optimizer trains, an int.

    Args:
        optimizer: A tfdpx optimizer.
        plan: Optional `PrivacyPlan`: only its own updates, by their noise and sampling.
    """
    return optimizer.ledger.steps if plan is None else _not_before(optimizer, plan).of(plan).steps


def used_up(optimizer, plan):
    """The `BudgetExceeded` that says how much of a plan was spent.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`.
    """
    taken = steps_taken(optimizer, plan)
    return BudgetExceeded(
        f"The privacy budget is used up: {taken} of {plan.steps} steps were taken, at "
        f"epsilon={epsilon_spent(optimizer, plan):.4g}, delta={plan.delta}; the plan's is "
        f"{plan.epsilon:.4g}. Updates on all data sets add up in one ledger, an upper bound where "
        "no person is in two. To train on, compile with an optimizer of a plan that has room for "
        f"them: a longer one, `tfdpx.PrivacyPlan(..., steps={taken + 1})` or more, or of other "
        "data or noise, `tfdpx.PrivacyPlan(..., spent=model.optimizer.ledger)`."
    )


def epsilon_log(plan, optimizer, before=EMPTY):
    """The epsilon that was spent on the optimizer's weights, by its name in the logs."""
    approximate = plan.is_approximate or optimizer.epsilon_is_approximate
    name = "epsilon_approximate" if approximate else "epsilon"
    return {name: epsilon_spent(optimizer, plan, before)}


def epsilon_spent(optimizer, plan, before=EMPTY):
    """Float: the epsilon of all updates behind the weights that an optimizer trains.

    Args:
        optimizer: A tfdpx optimizer.
        plan: A `PrivacyPlan`: gives delta, the accountant, and a sampling probability for updates
            where none is known.
        before: `Ledger` of the same data that the optimizer's does not hold.
    """
    ledger = before + optimizer.ledger.assuming(plan.sampling_probability)
    return ledger.composed_epsilon(plan.delta, plan.accountant)


class StopAtBudget(keras.callbacks.Callback):
    """Stops `fit` at the end of the session's plan, and logs epsilon and what a policy released.

    The first of all callbacks, so that all others find it in the logs.
    """

    def on_train_begin(self, logs=None):
        """Raises BudgetExceeded if there is no room for an execution."""
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
            raise used_up(self._optimizer, session.plan)
        taken = steps_taken(self._optimizer, session.plan)
        raise BudgetExceeded(
            f"An execution of {execution} steps does not fit into the budget: {taken} of "
            f"{session.plan.steps} steps were taken. Compile with a smaller `steps_per_execution`."
        )

    def on_epoch_begin(self, epoch, logs=None):
        """Finds the end anew: a callback may have restored weights."""
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
        taken, left = steps_taken(optimizer), session.left
        text = f"Privacy budget used up after {taken} updates"
        if left:
            execution = self.model.steps_per_execution
            text = (
                f"Training ended after {taken} updates, {left} before the end of the plan, since "
                f"`steps_per_execution={execution}` of them do not fit"
            )
        print(f"{text}: {name}={epsilon:.4g} at delta={session.plan.delta:g}.")

    def _execution(self):
        """Int: the updates that must fit into the budget to continue."""
        execution, session = self.model.steps_per_execution, self._session
        if session.draws is None:
            return execution
        # Batches that a plan draws end where it ended as `fit` began, and the last execution there.
        return max(1, min(execution, (session.draws.ends_at or 0) - session.number))

    @property
    def _optimizer(self):
        return model_internals.innermost(self.model.optimizer)

    @property
    def _session(self):
        return self._optimizer.session


class BudgetProgressBar(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, whose target is the number of steps that the budget leaves an epoch."""

    def set_params(self, params):
        """Keeps the number of steps that `fit` was asked for."""
        super().set_params(params)
        self._steps = params["steps"]

    def on_epoch_begin(self, epoch, logs=None):
        """Begins a bar of the steps that follow."""
        left = model_internals.innermost(self.model.optimizer).session.left
        if self._steps is not None and left is not None:
            execution = self.model.steps_per_execution
            self.target = min(self._steps, left // execution * execution)
        super().on_epoch_begin(epoch, logs)
