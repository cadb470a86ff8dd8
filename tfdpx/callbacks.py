"""Keras callbacks: stop at the end of the budget, log what the guarantee covers."""

import math
import os

import keras
import tensorflow as tf

from tfdpx import keras_hook

_DP_OPTIMIZER_ATTRIBUTES = ("batch_size", "noise_multiplier", "l2_norm_clip", "private_train_step")


class BudgetExceeded(RuntimeError):
    """The privacy budget does not pay for the next step."""


class PrivacyBudget(keras.callbacks.Callback):
    """Keeps training within a `PrivacyPlan`, and logs the epsilon spent.

    Training stops before the step that would take the model's updates past the plan's steps:
    `model.optimizer.iterations` never exceeds `plan.steps`, over any number of calls of `fit` and
    restarts from checkpoints. With `steps_per_execution` above 1 it stops Keras's `fit` before the
    execution that might, so up to `steps_per_execution - 1` steps can remain unused there.

    At the end of an epoch `logs["epsilon"]` is the epsilon of the updates made so far, at the
    plan's delta; it is called "epsilon_approximate" where the plan's sampling, or batches that are
    not from `plan.batches`, make it an approximation. Callbacks after this one see it, and so do
    the progress bar and `History`.

    Args:
        plan: A `PrivacyPlan`.

    Raises:
        TypeError: By `fit`, if the model's optimizer is none of tfdpx.
        ValueError: By `fit`, if the optimizer's batch_size or noise_multiplier is not the plan's.
        BudgetExceeded: By `fit`, if the plan has no room for another execution at the start.
    """

    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def on_train_begin(self, logs=None):
        """Checks the optimizer against the plan, and that there is budget left."""
        check_optimizer(self.model.optimizer, self.plan)
        taken, execution = steps_taken(self.model.optimizer), self._execution()
        if taken >= self.plan.steps:
            raise BudgetExceeded(
                f"The privacy budget is used up: {taken} of {self.plan.steps} steps were taken, at "
                f"epsilon={self.plan.epsilon_at(taken):.4g}, delta={self.plan.delta}."
            )
        if taken + execution > self.plan.steps:
            raise BudgetExceeded(
                f"An execution of {execution} steps does not fit into the budget: {taken} of "
                f"{self.plan.steps} steps were taken. Compile with a smaller `steps_per_execution`."
            )

    def on_train_batch_end(self, batch, logs=None):
        """Stops the training when the next execution might exceed the budget."""
        if steps_taken(self.model.optimizer) + self._execution() > self.plan.steps:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        """Adds the epsilon spent to the logs."""
        if logs is not None:
            logs.update(_epsilon_log(self.plan, self.model.optimizer))

    def _execution(self):
        # Our own loop ends with a shorter execution.
        ours = keras_hook.driver(self.model) == "tfdpx"
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
        # Keras has set tf.summary to record every `update_freq` batches.
        super().on_train_batch_end(batch, self._gradient_norm())
        self._write_private("batch_", logs, self._batches_seen)

    def on_epoch_end(self, epoch, logs=None):
        """Writes the epoch's numbers."""
        logs = dict(logs or {})
        covered = {name: value for name, value in logs.items() if is_covered(name)}
        optimizer = self.model.optimizer
        if self.plan is not None:
            covered.update(_epsilon_log(self.plan, optimizer))
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


def check_optimizer(optimizer, plan):
    """Raises unless `optimizer` spends what `plan` counts.

    Args:
        optimizer: The optimizer that a model is compiled with.
        plan: A `PrivacyPlan`.

    Raises:
        TypeError: If `optimizer` is none of tfdpx.
        ValueError: If its batch_size or noise_multiplier is not the plan's.
    """
    missing = [name for name in _DP_OPTIMIZER_ATTRIBUTES if not hasattr(optimizer, name)]
    if missing:
        raise TypeError(
            "A PrivacyPlan needs a model compiled with a private optimizer. Received: "
            f"optimizer of type {type(optimizer).__name__}, without {', '.join(missing)}. "
            "Compile with optimizer=tfdpx.DPSGD(...)."
        )
    for name in ("batch_size", "noise_multiplier"):
        planned, actual = getattr(plan, name), getattr(optimizer, name)
        # Not ==, since a checkpoint or a config may have kept float32.
        if not math.isclose(planned, actual, rel_tol=1e-6):
            raise ValueError(
                f"The plan and the optimizer disagree on `{name}`. Received: plan.{name}="
                f"{planned}, optimizer.{name}={actual}. Pass `plan=plan` to the optimizer."
            )


def steps_taken(optimizer):
    """The number of updates that a Keras optimizer has made, an int, also under a strategy."""
    return _scalar(optimizer.iterations, int)


def is_covered(name):
    """Whether the guarantee covers a number of the logs, or it is not of the private data."""
    return name in ("epsilon", "epsilon_approximate", "learning_rate") or name.startswith("val_")


def _epsilon_log(plan, optimizer):
    """The epsilon that the optimizer has spent, by its name in the logs."""
    # An optimizer knows when it was given other batches than the plan's.
    approximate = plan.is_approximate or getattr(optimizer, "epsilon_is_approximate", False)
    name = "epsilon_approximate" if approximate else "epsilon"
    return {name: plan.epsilon_at(steps_taken(optimizer))}


def _scalar(value, number):
    # convert_to_numpy, since int() refuses the variables of a distribution strategy.
    return number(keras.ops.convert_to_numpy(value))
