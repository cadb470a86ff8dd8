"""The session of one training: its secret, its draws, and the end of its budget.

Each call of `fit`, `tfdpx.distributed.fit` or `train_on_batch` is a session. Its secret is 128
fresh bits from the operating system, held only in memory. Draws, views, the random numbers of
layers, and noise are derived from the secret and the number of the update. So no two trainings use
the same random numbers, even after copies, loads or forks.

The end of a plan is enforced twice. First, `StopAtBudget` stops `fit` in time. If a step is called
nevertheless, its graph removes the data from the update.
"""

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
from tfdpx.sampling.batch_sampler import check_delta
from tfdpx.sampling.class_weights import WeightTable
from tfdpx.training.budget import updates_left

BUSY = (
    "This optimizer is training already, in another thread or around this `fit`. One account "
    "cannot follow two trainings at a time: wait until the other has ended."
)
_NEVER = 2**62


class StepState:
    """The numbers of a training that the traced step reads: secret, update count and end.

    The numbers are variables, so a step that was traced once serves every session. Neither Keras
    nor `tf.train.Checkpoint` tracks them: no file may hold the secret.
    """

    def __init__(self):
        self._secret = variable(noise.make_seed(), "int64")
        self._before = variable(0, "int64")  # The number of updates that `_updates` leaves out.
        self._updates = variable(0, "int64")
        self._end = variable(_NEVER, "int64")
        self._most = variable(_NEVER, "int64")
        self._nonfinite = variable(0, "int64")
        self.class_weights = WeightTable()
        self.lock = threading.RLock()  # Held when a session begins, and by other updates.

    @property
    def updates(self):
        """Int, the number of updates so far; assigning `iterations` does not change it."""
        return int(value_of(self._updates))

    @property
    def number(self):
        """Int, the number of the next update, which determines the update's draws and noise."""
        return int(value_of(self._before)) + self.updates

    @property
    def nonfinite(self):
        """Int, the number of examples so far without a finite gradient, which no epsilon covers."""
        return int(value_of(self._nonfinite))

    @property
    def end(self):
        """Int: the number of updates at which the plan is used up; 2**62 without a plan."""
        return int(value_of(self._end))

    def begin(self, secret, number, most=None):
        """Sets the secret from which the keys of the next updates are derived.

        Args:
            secret: Two ints that fit into int64.
            number: Int, the number of the next update.
            most: Int, how many examples an update may have; None if a plan draws them.
        """
        self._secret.assign(np.array(secret, "int64"))
        self._before.assign(number - self.updates)
        self._most.assign(_NEVER if most is None else most)

    def end_after(self, left):
        """Allows `left` more updates, an int; None allows any number."""
        self._end.assign(_NEVER if left is None else self.updates + left)

    def key(self):
        """Returns the key for the next update's noise, views and random layers, int64 [2]."""
        return noise.fold_in(self._secret, self._before + self._updates)

    def mask_after_budget(self, sums, examples, most=None):
        """Removes the data from an update that the account does not allow.

        The account does not allow an update after the end of the plan, or an update with more
        examples than declared. Such an update raises an error. Under XLA no error can be raised, so
        the update then consists only of noise, and costs no privacy.

        Args:
            sums: Nest of tensors that are computed from the data.
            examples: Scalar tensor, the number of examples in the update.
            most: Int, how many examples the update may have; None means `most` in the last `begin`.

        Returns:
            `sums`, or zeros of the same shapes.
        """
        is_paid = self._updates < self._end
        is_small_enough = tf.cast(examples, "int64") <= (self._most if most is None else most)
        checks = [
            tf.debugging.Assert(
                is_paid, ["The privacy budget of the optimizer's plan is used up."]
            ),
            tf.debugging.Assert(
                is_small_enough,
                ["This batch is too large: the optimizer counts on fewer examples.", examples],
            ),
        ]
        with tf.control_dependencies([check for check in checks if check is not None]):
            factor = tf.cast(is_paid & is_small_enough, "float32")
        # The product is formed in place. A branch would need ten graph nodes for each tensor.
        return tf.nest.map_structure(
            lambda t: tf.math.multiply_no_nan(t, tf.cast(factor, t.dtype)), sums
        )

    def count(self, nonfinite):
        """Counts an update.

        Args:
            nonfinite: Scalar tensor, how many examples of the update have no finite gradient.
        """
        self._updates.assign_add(1)
        self._nonfinite.assign_add(tf.cast(nonfinite, "int64"))


class Session:
    """Context manager in which all updates of an optimizer belong to one training.

    Args:
        optimizer: The tfdpx optimizer.
        draws: The `BatchSampler` of the data set, or None if no plan draws its batches.
        sampling_probability: Float, the probability that an example is in a batch, or None if
            unknown.
        is_seeded: Bool, whether the user chose the seed of the data set's draws.
        callbacks: List of the callbacks of a `fit`.
        data: The argument `x` of a `fit`.

    Attributes:
        draws: See the argument.
        data: See the argument.
        plan: The `PrivacyPlan` that ends the training, or None.
        thread: Int, the thread in which the session was made.

    Raises:
        RuntimeError: On entering, if the optimizer or the data set is in a session already.
    """

    def __init__(
        self, optimizer, draws, sampling_probability, is_seeded=False, callbacks=(), data=None
    ):
        self.draws, self.plan, self._is_seeded = draws, None, is_seeded
        self.data, self._nonfinite = data, optimizer.state.nonfinite
        self._optimizer, self._state = optimizer, optimizer.state
        self._callbacks = callbacks
        self.thread = threading.get_ident()
        self._seed, self._probability = optimizer.seed, sampling_probability
        plans = [optimizer.plan if optimizer.noise_multiplier else None, draws and draws.plan]
        self._plans = [plan for plan in plans if plan is not None]
        self._entropy, self._renewals = secrets.randbits(128), 0
        # The number of updates in the last save, and functions to call after the next save.
        self._saved, self._unsaved = None, []

    def __enter__(self):
        optimizer, draws = self._optimizer, self.draws
        with optimizer.state.lock:
            if optimizer.session is not None:
                raise RuntimeError(BUSY)
            if draws is not None and draws.session is not None:
                raise RuntimeError(
                    "These batches are being trained on already, and each draw may be used once. "
                    "Make another data set: `plan.batches(...)`."
                )
            is_shuffled = draws is not None and draws.plan.is_approximate
            is_exact = draws is not None and not is_shuffled
            seeded = self._seed is not None or self._is_seeded
            if not is_exact:
                optimizer.account.renew()  # Each such training is a separate entry in the ledger.
            self._usual = optimizer.account.open(self._probability, is_exact, seeded, is_shuffled)
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
        left_out = self._state.nonfinite - self._nonfinite
        if left_out:
            warn(
                f"{left_out} examples were left out of updates, because their loss or gradient was "
                "not finite: a missing value or a division by zero, for example. Keep this count "
                "private: it follows from the data without noise."
            )
        reset_between_fits(self._optimizer)

    def renew(self):
        """Draws a fresh secret and finds the end of the budget, at the start and after loads."""
        self._renewals += 1
        self.begin()
        self.find_end()

    def begin(self):
        """Derives the keys of the next updates from the session's secret."""
        most = None if self.draws is not None else most_examples(self._optimizer)
        self._state.begin(self._secret("step"), self._optimizer.ledger.steps, most)

    def share(self, entropy):
        """Replaces the session's secret. Hosts with the same secret take part in one training.

        Args:
            entropy: Int of 128 random bits, the same on all hosts.
        """
        self._entropy, self._renewals = entropy, 0
        self._optimizer.account.renew(secret_of(entropy, "run")[0])
        self.renew()

    def draw_seed(self):
        """Returns the seed of the draws, two ints."""
        return self._secret("draws")

    def _secret(self, purpose):
        # With a seed, only the number of the update distinguishes updates.
        entropy = (self._entropy, self._renewals) if self._seed is None else self._seed
        return secret_of(entropy, purpose)

    def best_weights(self):
        """Returns a list with one list of arrays, the best weights, for each `EarlyStopping`."""
        stopping = [c for c in self._callbacks if type(c) is keras.callbacks.EarlyStopping]
        return [callback.best_weights for callback in stopping if callback.best_weights]

    @property
    def number(self):
        """Int, the number of the next update, which determines the update's draws."""
        return self._state.number

    @property
    def updates(self):
        """Int: the number of updates of the optimizer, in this session and before it."""
        return self._state.updates

    @property
    def left(self):
        """Int: the number of updates that may still be made; None without a plan."""
        return None if self.plan is None else max(0, self._state.end - self._state.updates)

    def add_budget(self, plan):
        """Ends the training at the end of another plan, too.

        Args:
            plan: A `PrivacyPlan`.

        Raises:
            ValueError: If the plan has another delta than a plan that already ends the training.
        """
        for other in self._plans:
            check_delta(plan, other)
        self._plans.append(plan)
        if self._probability is None:  # The plan tells how often an example is drawn.
            self._probability = plan.sampling_probability
            seeded = self._seed is not None or self._is_seeded
            self._optimizer.account.open(self._probability, poisson_sampled=False, seeded=seeded)
        self.find_end()

    def find_end(self):
        """Computes the end of the budget again, from everything that was spent."""
        rate = self._probability
        updates_of_plans = [updates_left(self._optimizer, plan, rate) for plan in self._plans]
        least = min(updates_of_plans, default=None)
        self.plan = None if least is None else self._plans[updates_of_plans.index(least)]
        self._state.end_after(least)

    def has_room(self, updates):
        """Returns whether the budget pays for this number of updates."""
        return self.left is None or self.left >= updates

    def after_save(self, write):
        """Calls `write()` after the next save.

        If nothing saves, or if the last save contains all updates, the call is made now.
        """
        if self._saved in (None, self.updates):
            write()
        else:
            self._unsaved.append(write)

    def call_after_save(self):
        """Called after a save: calls the functions that were passed to `after_save`."""
        self._saved, functions, self._unsaved = self.updates, self._unsaved, []
        for write in functions:
            write()


def reset_between_fits(optimizer):
    """Draws a fresh secret and finds the plan's end, for updates outside of `fit`.

    Args:
        optimizer: The tfdpx optimizer.
    """
    start_unmanaged_step(optimizer)
    has_end = optimizer.plan is not None and optimizer.noise_multiplier
    optimizer.state.end_after(updates_left(optimizer, optimizer.plan) if has_end else None)


def start_unmanaged_step(optimizer):
    """Derives the keys of the next updates from a fresh secret, not from the secret of a session.

    Args:
        optimizer: The tfdpx optimizer.
    """
    seed = secrets.randbits(128) if optimizer.seed is None else optimizer.seed
    most = most_examples(optimizer)
    optimizer.state.begin(secret_of(seed, "step"), optimizer.ledger.steps, most)


def most_examples(optimizer):
    """Returns how many examples an update that no plan draws may have; None for any number."""
    if not optimizer.noise_multiplier:
        return None
    # A Poisson sample may be larger than `batch_size`. Its size is limited to a plan's capacity, or
    # to six standard deviations and 16 above `batch_size`.
    if optimizer.plan is not None:
        return optimizer.plan.capacity
    return optimizer.batch_size + 6 * math.isqrt(optimizer.batch_size) + 16


def after_save(model, write):
    """Calls `write()` after the next save of a model's training, or now if nothing trains it.

    Args:
        model: `keras.Model`.
        write: Function without arguments.
    """
    session = getattr(model_internals.innermost(model.optimizer), "session", None)
    if session is None:
        write()
    else:
        session.after_save(write)


def secret_of(entropy, purpose):
    """Returns 128 bits derived from a secret, two ints that fit into int64.

    Args:
        entropy: Int or tuple of ints, the secret.
        purpose: Str, the name of the use. Different names give different bits.
    """
    return noise.make_seed(int.from_bytes(f"{purpose} {entropy}".encode(), "big"))
