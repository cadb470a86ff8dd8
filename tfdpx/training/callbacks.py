"""Keras callbacks that end a training at a budget, and log only what the guarantee covers."""

from __future__ import annotations

import os
from typing import Any

import keras
import tensorflow as tf

from tfdpx._keras import model_internals
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import EMPTY, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.checks.callbacks import IF_PUBLIC, is_covered
from tfdpx.sampling.batch_sampler import check_optimizer
from tfdpx.training.budget import (
    BudgetExceeded,
    StopAtBudget,
    epsilon_log,
    epsilon_spent,
    steps_taken,
)
from tfdpx.training.checkpoint import Checkpoint
from tfdpx.training.session import after_save

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
    """Keeps training within a smaller budget than the optimizer's plan, and logs epsilon.

    The optimizer's plan needs no callback: it ends the training and logs epsilon by itself. The
    ledger of the model's weights (`model.optimizer.ledger`) holds everything that was spent: the
    updates of this optimizer, of earlier optimizers, and those in the file that the weights came
    from.

    Training stops before it would exceed the number of steps of `plan`. Steps add up over calls of
    `fit`, restarts and new optimizers. If the weights had updates with other noise or another
    sampling probability than the plan's, a warning says so. Training then stops before the epsilon
    of all updates together exceeds the plan's. If no plan draws the data, up to
    `steps_per_execution - 1` steps of the budget can remain unused, because Keras's `fit` always
    makes `steps_per_execution` updates at once.

    At the end of an epoch `logs["epsilon"]` is the epsilon of the ledger at the plan's delta. If
    this epsilon is not an upper bound, its name is "epsilon_approximate": either the plan's
    sampling makes it an approximation, or some batches were not drawn by a plan. Later callbacks,
    the progress bar and `History` see this number.

    Args:
        plan: A `PrivacyPlan` with the delta of the optimizer's plan.
        allow_approximate: Bool, whether to train on batches that no plan draws, for example from a
            generator. Epsilon is then computed as if the batches were Poisson samples. It is not an
            upper bound, so do not release the weights.

    Raises:
        TypeError: By `fit`, if the model's optimizer is not a tfdpx optimizer.
        ValueError: By `fit`, if the optimizer or the batches do not belong to the plan, or if
            another plan of the same training has another delta.
        BudgetExceeded: By `fit`, if the first `steps_per_execution` updates exceed the budget.
    """

    def __init__(self, plan: PrivacyPlan, allow_approximate: bool = False) -> None:
        super().__init__()
        self.plan = plan
        self.allow_approximate = allow_approximate

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that optimizer and batches belong to the plan, and that there is budget left."""
        optimizer = model_internals.innermost(self.model.optimizer)
        check_optimizer(optimizer, self.plan)
        session = optimizer.session
        self._check_batches(None if session is None else session.draws)
        if session is None:  # In a custom loop the step itself ends with the optimizer's plan.
            return
        session.add_budget(self.plan)
        stop = StopAtBudget()
        stop.set_params(self.params)
        stop.set_model(self.model)
        stop.on_train_begin()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epsilon spent to the logs."""
        if logs is not None:
            optimizer = model_internals.innermost(self.model.optimizer)
            logs.update(epsilon_log(self.plan, optimizer))

    def _check_batches(self, draws):
        if draws is None:
            if not self.allow_approximate:
                raise ValueError(
                    "PrivacyBudget counts on the batches of its plan, and `fit` was given other "
                    "data, or batches that were changed (by `take`, `cache`, `map`, `prefetch`, "
                    "...), for which epsilon would be no limit. Give `fit` "
                    "`plan.batches(x, y)` as it is, or say that you need no limit: "
                    "`PrivacyBudget(plan, allow_approximate=True)`."
                )
            return
        for name in ("num_examples", "batch_size", "sampling"):
            expected, actual = getattr(self.plan, name), getattr(draws.plan, name)
            if expected != actual:
                raise ValueError(
                    f"The batches are of another plan than the budget's. Received: plan.{name}="
                    f"{expected}, and batches of a plan with {name}={actual}. Use one plan for "
                    "both."
                )


class TensorBoard(keras.callbacks.Callback):
    """Writes numbers of each epoch for TensorBoard, but only numbers that the guarantee covers.

    Training loss and metrics are functions of the private data without noise, so they reveal more
    than epsilon allows. `keras.callbacks.TensorBoard` would write them. This callback writes
    epsilon, the noise multiplier, the learning rate, the norm of the privatized gradient
    (`optimizer.privatized_gradient_norm`), and the clip of `tfdpx.AdaptiveClip`. Validation metrics
    are written if the optimizer was made with `public_validation=True`, which declares that their
    examples are public. The x-axis shows model updates, not epochs. The chart of `epsilon` has a
    second line, named "budget": the plan's epsilon. With a `tfdpx.callbacks.Checkpoint`, the
    numbers of an update are written only when a save contains that update.

    Args:
        log_dir: String. Folder for the event files.
        plan: Optional `PrivacyPlan`, for epsilon; by default the optimizer's.
        before: `Ledger` of earlier uses of the same data, which epsilon counts too.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike = "logs",
        plan: PrivacyPlan | None = None,
        *,
        before: Ledger = EMPTY,
    ) -> None:
        super().__init__()
        self.log_dir, self.plan, self._before = log_dir, plan, before
        self._writers: dict[str, Any] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the epsilon that was spent before this training."""
        self._after_save(self._epsilons())

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the numbers of the epoch."""
        optimizer, numbers = model_internals.innermost(self.model.optimizer), self._epsilons()
        for name, value in (logs or {}).items():
            run, metric = ("validation", name[4:]) if name.startswith("val_") else ("train", name)
            if is_covered(name, optimizer):
                is_epsilon = name in ("epsilon", "epsilon_approximate")
                numbers.setdefault((run, metric if is_epsilon else f"epoch_{metric}"), value)
            elif run == "validation":
                warn(
                    f"{type(self).__name__} leaves the validation metrics out, which the privacy "
                    f"guarantee does not cover. {IF_PUBLIC} In `tfdpx classify` this is "
                    "--public_test."
                )
        for name in ("learning_rate", "noise_multiplier", "privatized_gradient_norm"):
            if hasattr(optimizer, name):
                numbers["train", f"epoch_{name}"] = getattr(optimizer, name)
        self._after_save(numbers)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the event files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _epsilons(self):
        """Returns the two lines of the chart of epsilon: the epsilon spent, and the plan's epsilon.

        The result is a dict for `_after_save`; it is empty without a plan.
        """
        optimizer = model_internals.innermost(self.model.optimizer)
        plan = self.plan or getattr(optimizer, "plan", None)
        if plan is None or not hasattr(optimizer, "ledger"):
            return {}
        [(name, epsilon)] = epsilon_log(plan, optimizer, self._before).items()
        return {("train", name): epsilon, ("budget", name): plan.epsilon}

    def _after_save(self, numbers):
        """Writes numbers for TensorBoard; with a `Checkpoint`, as soon as it saves the next time.

        `numbers` is a dict from pairs (subfolder of `log_dir`, name) to scalars.
        """
        optimizer = model_internals.innermost(self.model.optimizer)
        is_private = hasattr(optimizer, "ledger")
        step = steps_taken(optimizer) if is_private else _to_float(optimizer.iterations)
        numbers = {place: _to_float(value) for place, value in numbers.items()}

        def write():
            for (run, name), value in numbers.items():
                if run not in self._writers:
                    folder = os.path.join(self.log_dir, run)
                    self._writers[run] = tf.summary.create_file_writer(folder)
                with self._writers[run].as_default(), tf.summary.record_if(True):
                    tf.summary.scalar(name, value, step=int(step))

        after_save(self.model, write)


def _to_float(value):
    # float() refuses the variables of a distribution strategy.
    return float(keras.ops.convert_to_numpy(value))
