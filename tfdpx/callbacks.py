"""Keras callbacks: stop at the end of the budget, log what the guarantee covers."""

import os

import keras
import tensorflow as tf

from tfdpx import keras_internals
from tfdpx.checks.callbacks import is_covered
from tfdpx.data.draws import Draws
from tfdpx.run.budget import (
    BudgetExceeded,
    check_optimizer,
    epsilon_log,
    epsilon_spent,
    steps_left,
    steps_taken,
)
from tfdpx.run.checkpoint import Checkpoint

__all__ = [
    "BudgetExceeded",
    "Checkpoint",
    "PrivacyBudget",
    "TensorBoard",
    "check_optimizer",
    "epsilon_spent",
    "steps_taken",
]


class PrivacyBudget(keras.callbacks.Callback):
    """Keeps training within a `PrivacyPlan`, and logs the epsilon spent.

    What was spent is the ledger of the model's weights (`model.optimizer.ledger`): the updates of
    this optimizer, of those before it, and of the file that the weights came from. Training stops
    before the step that would take it past the plan's steps, over any number of calls of `fit`,
    restarts and new optimizers. Updates that the plan does not know (of other noise or another
    sampling probability) are said, and compose with the plan's: training then stops before their
    common epsilon exceeds the plan's. With `steps_per_execution` above 1 it stops Keras's `fit`
    before the execution that might, so up to `steps_per_execution - 1` steps can remain unused.

    At the end of an epoch `logs["epsilon"]` is the epsilon of the ledger at the plan's delta; it is
    called "epsilon_approximate" where the plan's sampling, or batches that are not from
    `plan.batches`, make it an approximation. Callbacks after this one see it, and so do the
    progress bar and `History`.

    Args:
        plan: A `PrivacyPlan`.
        allow_approximate: Bool. Whether to train on batches that are not exactly those of
            `plan.batches`, whose epsilon is only approximated.

    Raises:
        TypeError: By `fit`, if the model's optimizer is none of tfdpx.
        ValueError: By `fit`, if the optimizer or the batches are not the plan's.
        BudgetExceeded: By `fit`, if the plan has no room for another execution at the start.
    """

    def __init__(self, plan, allow_approximate=False):
        super().__init__()
        self.plan = plan
        self.allow_approximate = allow_approximate
        self._end, self._run = 0, None

    def on_train_begin(self, logs=None):
        """Checks optimizer and batches against the plan, and that there is budget left."""
        optimizer, plan = keras_internals.innermost(self.model.optimizer), self.plan
        check_optimizer(optimizer, plan)
        self._check_batches(optimizer.draws)
        if (keras_internals.initial_epoch(self.model) or 0) >= self.params["epochs"]:
            return  # Resumed after its last epoch: no step follows.
        self._count()

    def on_epoch_begin(self, epoch, logs=None):
        """Counts anew, if a callback has restored other weights since."""
        if self._run != keras_internals.innermost(self.model.optimizer).run.number:
            self._count()

    def _count(self):
        """Learns after which update to stop."""
        optimizer, plan = keras_internals.innermost(self.model.optimizer), self.plan
        left, execution = steps_left(optimizer, plan), self._execution()
        if left < execution:
            taken = optimizer.ledger.assuming(plan.sampling_probability)
            counted = f"{taken.of(plan).steps} of {plan.steps} steps were taken"
            if left <= 0:
                spent = taken.epsilon(plan.delta, plan.accountant)
                raise BudgetExceeded(
                    f"The privacy budget is used up: {counted}, at epsilon={spent:.4g}, "
                    f"delta={plan.delta}."
                )
            raise BudgetExceeded(
                f"An execution of {execution} steps does not fit into the budget: {counted}. "
                "Compile with a smaller `steps_per_execution`."
            )
        self._end, self._run = optimizer.run.updates + left, optimizer.run.number

    def on_train_batch_end(self, batch, logs=None):
        """Stops the training when the next execution might exceed the budget."""
        if self.model.optimizer.run.updates + self._execution() > self._end:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epsilon spent to the logs."""
        if logs is not None:
            logs.update(epsilon_log(self.plan, self.model.optimizer))

    def _check_batches(self, draws):
        if not isinstance(draws, Draws):
            if not self.allow_approximate:
                raise ValueError(
                    "PrivacyBudget counts on the batches of its plan, and `fit` was given other "
                    "data, or batches that were changed (by `take`, `cache`, `map`, `prefetch`, "
                    "...), for which epsilon would be an approximation. Give `fit` "
                    "`plan.batches(x, y)` as it is, or say that an approximation will do: "
                    "`PrivacyBudget(plan, allow_approximate=True)`."
                )
            return
        for name in ("num_examples", "batch_size", "sampling"):
            planned, actual = getattr(self.plan, name), getattr(draws.plan, name)
            if planned != actual:
                raise ValueError(
                    f"The batches are of another plan than the budget's. Received: plan.{name}="
                    f"{planned}, and batches of a plan with {name}={actual}. Use one plan for both."
                )

    def _execution(self):
        # Our own loop ends with a shorter execution.
        ours = keras_internals.driver(self.model) == "tfdpx"
        return 1 if ours else self.model.steps_per_execution


class TensorBoard(keras.callbacks.TensorBoard):
    """`keras.callbacks.TensorBoard` without the numbers that the guarantee does not cover.

    Training loss and metrics are functions of the private data that no noise was added to: whoever
    sees them learns more than epsilon says. This writes what the guarantee covers: epsilon, the
    noise multiplier, the learning rate, the norm of the privatized gradient
    (`optimizer.privatized_gradient_norm`) and weight histograms. Validation metrics are written
    too; they are functions of other data, for which no guarantee is given.

    Args:
        log_dir: String. Folder for the event files.
        plan: Optional `PrivacyPlan`, for epsilon; not needed after a `PrivacyBudget` in the list of
            callbacks.
        log_private_metrics: Bool. Whether to write the training loss and metrics nevertheless:
            with names that start with "not_private/", in the sub-folder `not_private` of `log_dir`,
            to be deleted before the logs are given away.
        **kwargs: Arguments of `keras.callbacks.TensorBoard`.
    """

    writes_only_covered = True  # Looked for by `check_callbacks`.

    def __init__(self, log_dir="logs", plan=None, log_private_metrics=False, **kwargs):
        super().__init__(log_dir=log_dir, **kwargs)
        self.plan = plan
        self.log_private_metrics = log_private_metrics
        self._private_writer = None
        self._batches_seen = 0

    def on_train_begin(self, logs=None):
        """Opens the writers."""
        super().on_train_begin(logs)
        self._batches_seen = 0
        if self.log_private_metrics:
            folder = os.path.join(self.log_dir, "not_private")
            self._private_writer = tf.summary.create_file_writer(folder)

    def on_train_batch_end(self, batch, logs=None):
        """Writes the batch's numbers, if `update_freq` asks for it."""
        self._batches_seen += 1
        if self.update_freq == "epoch":
            super().on_train_batch_end(batch, {})
            return
        # Some releases of Keras (3.8, 3.12) would write every batch.
        due = self._batches_seen % self.update_freq == 0
        super().on_train_batch_end(batch, self._gradient_norm() if due else {})
        if due:
            self._write_private("batch_", logs, self._batches_seen)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's numbers."""
        logs = dict(logs or {})
        covered = {name: value for name, value in logs.items() if is_covered(name)}
        optimizer = self.model.optimizer
        if self.plan is not None and hasattr(optimizer, "ledger"):
            covered.update(epsilon_log(self.plan, optimizer))
        if hasattr(optimizer, "noise_multiplier"):
            covered["noise_multiplier"] = optimizer.noise_multiplier
        covered.update(self._gradient_norm())
        super().on_epoch_end(epoch, covered)
        private = {name: value for name, value in logs.items() if not is_covered(name)}
        self._write_private("epoch_", private, epoch)

    def on_train_end(self, logs=None):
        """Closes the writers."""
        super().on_train_end(logs)
        if self._private_writer is not None:
            self._private_writer.close()

    def _gradient_norm(self):
        norm = getattr(self.model.optimizer, "privatized_gradient_norm", None)
        return {} if norm is None else {"privatized_gradient_norm": _scalar(norm, float)}

    def _write_private(self, prefix, logs, step):
        if self._private_writer is None:
            return
        with self._private_writer.as_default():
            for name, value in (logs or {}).items():
                tf.summary.scalar(f"not_private/{prefix}{name}", value, step=step)


def _scalar(value, number):
    # convert_to_numpy, since int() refuses the variables of a distribution strategy.
    return number(keras.ops.convert_to_numpy(value))
