"""One training under way: its secret, its draws, what it spends, where it ends, what it may write.

`fit`, `tfdpx.distributed.fit` and `train_on_batch` make a `Session` each; whoever takes part in the
training asks it. Its secret is 128 fresh bits of the operating system, in memory alone, from which
draws, views, masks and noise follow by the number of the update. So no two trainings share any of
them, whatever was copied, loaded, restored or forked between.
"""

import secrets
import threading

import keras

from tfdpx import noise
from tfdpx._keras import model_internals
from tfdpx.spending import budget
from tfdpx.training import allocator

BUSY = (
    "This optimizer is training already, in another thread or around this `fit`. One account "
    "cannot follow two trainings at a time: wait until the other has ended."
)


class Session:
    """Within it, updates of one optimizer are those of one training.

    Args:
        optimizer: The tfdpx optimizer.
        draws: The `BatchSampler` of the data set, or None where no plan drew it.
        sampling_probability: Float, or None where unknown.
        is_seeded: Bool, whether somebody gave the seed of the data set's draws.

    Attributes:
        draws: As given.
        plan: The `PrivacyPlan` that ends the training, or None.
        thread: Int, the thread that it was made in.

    Raises:
        RuntimeError: On entering, if the optimizer or the data set is in a session already.
    """

    def __init__(self, optimizer, draws, sampling_probability, is_seeded=False):
        self.draws, self.plan, self._is_seeded = draws, None, is_seeded
        self._optimizer, self._state = optimizer, optimizer.state
        self.thread = threading.get_ident()
        self._seed, self._probability = optimizer.seed, sampling_probability
        self._budgets = []  # Pairs of a plan and a function to the updates that it leaves.
        self._entropy, self._renewals = secrets.randbits(128), 0
        self._saved, self._unsaved = None, []  # The updates that a save holds, and what waits.
        if optimizer.plan is not None and optimizer.noise_multiplier:
            self._budgets.append((optimizer.plan, lambda: budget.updates_left(optimizer)))
        if draws is not None:
            self._budgets.append((draws.plan, lambda: budget.plan_left(optimizer, draws.plan)))

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
            exact = draws is not None and not draws.plan.is_approximate
            seeded = self._seed is not None or self._is_seeded
            self._usual = optimizer.spend_tracker.open(self._probability, exact, seeded)
            self.renew()
            optimizer.session = self
            if draws is not None:
                draws.session = self
        return self

    def __exit__(self, *error):
        self._optimizer.session = None
        if self.draws is not None:
            self.draws.session = None
        self._optimizer.spend_tracker.open(*self._usual)
        stand_by(self._optimizer)

    def renew(self):
        """Takes a fresh secret and finds the end: at the start, and when weights were restored."""
        self._renewals += 1
        self.begin()
        self.find_end()

    def begin(self):
        """From here on updates are keyed by the session's secret."""
        self._state.begin(self._secret("step"), self._optimizer.ledger.steps)

    def share(self, entropy):
        """Takes the chief's secret, so that all hosts make one training.

        Args:
            entropy: Int of 128 random bits that all hosts share.
        """
        self._entropy, self._renewals = entropy, 0
        self._optimizer.spend_tracker.renew(secret_of(entropy, "run")[0])
        self.renew()

    def draw_seed(self):
        """Two ints: the seed of the draws."""
        return self._secret("draws")

    def _secret(self, use):
        # With a seed, the number of the update alone distinguishes updates.
        entropy = (self._entropy, self._renewals) if self._seed is None else self._seed
        return secret_of(entropy, use)

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

    def keep_within(self, plan, left):
        """Has the training end where another plan ends, too.

        Args:
            plan: A `PrivacyPlan`.
            left: Function that gives the updates that it still pays for.
        """
        self._budgets.append((plan, left))
        self.find_end()

    def find_end(self):
        """Finds the end anew, by all that is known to be spent."""
        self._others = self._optimizer.spend_tracker.others()
        counts = [left() for _, left in self._budgets]
        least = min(counts, default=None)
        self.plan = None if least is None else self._budgets[counts.index(least)][0]
        self._state.end_after(least)

    def execution(self, model):
        """Int: the updates that must fit into the budget to continue."""
        execution = model.steps_per_execution
        if self.draws is None:
            return execution
        # Batches that a plan draws end where it ended as `fit` began, and the last execution there.
        return max(1, min(execution, (self.draws.ends_at or 0) - self.number))

    def check_room(self, execution=1):
        """Raises BudgetExceeded unless so many updates may be made.

        Args:
            execution: Int, the updates that are made at once.
        """
        if self._optimizer.spend_tracker.others() != self._others:
            self.find_end()
        left = self.left
        if left is not None and left <= 0:
            raise budget.used_up(self._optimizer, self.plan)
        if left is not None and left < execution:
            taken = budget.steps_taken(self._optimizer, self.plan)
            raise budget.BudgetExceeded(
                f"An execution of {execution} steps does not fit into the budget: {taken} of "
                f"{self.plan.steps} steps were taken. Compile with a smaller `steps_per_execution`."
            )

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


def stand_by(optimizer):
    """Between sessions, for whoever calls the step by hand: a fresh secret, and the plan's end.

    Args:
        optimizer: The tfdpx optimizer.
    """
    begin_alone(optimizer)
    ends = optimizer.plan is not None and optimizer.noise_multiplier
    optimizer.state.end_after(budget.updates_left(optimizer) if ends else None)


def begin_alone(optimizer):
    """From here on updates are keyed by a fresh secret, of no session.

    Args:
        optimizer: The tfdpx optimizer.
    """
    seed = secrets.randbits(128) if optimizer.seed is None else optimizer.seed
    optimizer.state.begin(secret_of(seed, "step"), optimizer.ledger.steps)


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


class Limit(keras.callbacks.Callback):
    """Stops `fit` at the end of the session's plan, and logs epsilon and what a policy released.

    The first of all callbacks, so that all others find it in the logs.
    """

    def on_train_begin(self, logs=None):
        """Raises an error if there is no room for an execution."""
        self._is_spent = False
        first = model_internals.initial_epoch(self.model) or 0
        if first < self.params["epochs"]:  # Resumed after its last epoch, no step follows.
            self._session.check_room(self._session.execution(self.model))

    def on_epoch_begin(self, epoch, logs=None):
        """Finds the end anew: a callback may have restored weights."""
        self._session.find_end()

    def on_train_batch_end(self, batch, logs=None):
        """Stops the training when the next execution might exceed the budget."""
        left = self._session.left
        if left is not None and left < self._session.execution(self.model):
            # The first to stop it says so.
            self._is_spent = not self.model.stop_training
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epsilon spent to the logs."""
        optimizer = model_internals.innermost(self.model.optimizer)
        if logs is not None and optimizer.plan is not None:
            logs.update(budget.epsilon_log(optimizer.plan, optimizer))
        if logs is not None:
            logs.update(optimizer.clip_policy.released())

    def on_train_end(self, logs=None):
        """Says that the budget is used up, unless `fit` is silent."""
        if not self._is_spent or not self.params.get("verbose"):
            return
        session, optimizer = self._session, model_internals.innermost(self.model.optimizer)
        [(name, epsilon)] = budget.epsilon_log(session.plan, optimizer).items()
        taken, left = budget.steps_taken(optimizer), session.left
        text = f"Privacy budget used up after {taken} updates"
        if left:
            execution = self.model.steps_per_execution
            text = (
                f"Training ended after {taken} updates, {left} before the end of the plan, since "
                f"`steps_per_execution={execution}` of them do not fit"
            )
        print(f"{text}: {name}={epsilon:.4g} at delta={session.plan.delta:g}.")

    @property
    def _session(self):
        return model_internals.innermost(self.model.optimizer).session


class Room(keras.callbacks.Callback):
    """The last of all callbacks: whatever another one spent or changed, the budget holds."""

    def on_train_batch_begin(self, batch, logs=None):
        """Raises BudgetExceeded where the next execution does not fit into the budget."""
        session = model_internals.innermost(self.model.optimizer).session
        session.check_room(session.execution(self.model))


class Progress(keras.callbacks.ProgbarLogger):
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
