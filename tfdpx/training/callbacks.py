"""Keras callbacks: stop at the end of the budget, log what the guarantee covers, measure norms."""

from __future__ import annotations

import math
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorboard.plugins.hparams import api as hparams

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
from tfdpx.training.norms import GradientNorms
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

# The number of gradient norms in the histogram of an epoch.
_NORMS = 256


class PrivacyBudget(keras.callbacks.Callback):
    """Keeps training within a smaller budget than the optimizer's plan, and logs its epsilon.

    An optimizer's own plan ends its training, and logs epsilon, without a callback. The ledger of
    the model's weights (`model.optimizer.ledger`) holds everything that was spent: the updates of
    this optimizer, of earlier ones, and of the file that the weights came from. Training stops
    before the step that would exceed the plan's steps, over any number of calls of `fit`, restarts
    and new optimizers. Updates with other noise or another sampling probability than the plan's
    are printed and compose with the plan's: training then stops before the common epsilon exceeds
    the plan's. On data that no plan draws, with `steps_per_execution` above 1, Keras's `fit` stops
    before the execution that might exceed it, so up to `steps_per_execution - 1` steps can remain
    unused.

    At the end of an epoch `logs["epsilon"]` is the epsilon of the ledger at the plan's delta. It is
    called "epsilon_approximate" if the plan's sampling makes it an approximation, or if it is no
    limit, because no plan drew some batches. Later callbacks, the progress bar and `History` see
    it.

    Args:
        plan: A `PrivacyPlan` with the delta of the optimizer's plan.
        allow_approximate: Bool. Whether to train on batches that no plan draws, for example of a
            generator. Their epsilon is as if they were Poisson samples, which is no limit: such
            weights must not be released.

    Raises:
        TypeError: By `fit`, if the model's optimizer is not a tfdpx optimizer.
        ValueError: By `fit`, if the optimizer or the batches are not the plan's, or another plan of
            the training has another delta.
        BudgetExceeded: By `fit`, if the plan has no room for another execution at the start.
    """

    def __init__(self, plan: PrivacyPlan, allow_approximate: bool = False) -> None:
        super().__init__()
        self.plan = plan
        self.allow_approximate = allow_approximate

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks optimizer and batches against the plan, and that there is budget left."""
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


class TensorBoard(keras.callbacks.TensorBoard):
    """`keras.callbacks.TensorBoard` without the numbers that the guarantee does not cover.

    Training loss and metrics are functions of the private data without noise, so they reveal more
    than epsilon allows. This callback writes only numbers that the guarantee covers: epsilon, the
    noise multiplier, the learning rate, the norm of the privatized gradient
    (`optimizer.privatized_gradient_norm`) and weight histograms. Validation metrics are written if
    the optimizer was made with `public_validation=True`, which declares that their examples are
    public. The x-axis shows model updates, not epochs. Hyperparameters are under "HParams"; the
    plan and the amount spent of it are under "Text". The chart of `epsilon` has a second line, the
    run "budget", with the plan's epsilon. With a `tfdpx.callbacks.Checkpoint` the numbers of an
    update are written once a save holds that update.

    Args:
        log_dir: String. Folder for the event files.
        plan: Optional `PrivacyPlan`, for epsilon; not needed after a `PrivacyBudget` in the list of
            callbacks.
        log_private_metrics: Bool. Whether to write metrics without a guarantee too, with names
            that start with "not_private/", in the sub-folder `not_private` of `log_dir`. Delete
            that folder before you share the logs. If the plan draws the batches, each epoch has a
            histogram "not_private/gradient_norms" of 256 examples, before clipping.
        before: `Ledger` of earlier uses of the same data, which epsilon counts too.
        **kwargs: Arguments of `keras.callbacks.TensorBoard`.
    """

    writes_only_covered = True  # Looked for by `check_callbacks`.

    def __init__(
        self,
        log_dir: str | os.PathLike = "logs",
        plan: PrivacyPlan | None = None,
        log_private_metrics: bool = False,
        *,
        before: Ledger = EMPTY,
        **kwargs: Any,
    ) -> None:
        super().__init__(log_dir=log_dir, **kwargs)
        self.plan, self._before = plan, before
        self.log_private_metrics = log_private_metrics
        self._private_writer = self._budget_writer = self._norms = None
        self._batches_seen = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Opens the writers."""
        super().on_train_begin(logs)
        self._batches_seen, self._norms = 0, None
        if self.log_private_metrics:
            folder = os.path.join(self.log_dir, "not_private")
            self._private_writer = tf.summary.create_file_writer(folder)
        optimizer = model_internals.innermost(self.model.optimizer)
        if self.plan is None:
            self.plan = getattr(optimizer, "plan", None)
        with model_internals.writing(self):
            hparams.hparams(_hyperparameters(optimizer))
            if self.plan is not None:
                self._describe(f"The plan: {self.plan.summary()}.", optimizer)
        if self.plan is not None and math.isfinite(self.plan.epsilon):
            self._budget_writer = tf.summary.create_file_writer(
                os.path.join(self.log_dir, "budget")
            )
            self._write_epsilon(self._epsilon(optimizer), _count_updates(optimizer))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the batch's numbers, if `update_freq` asks for it."""
        self._batches_seen += 1
        super().on_train_batch_end(batch, {})
        # Some releases of Keras (3.8, 3.12) would write every batch.
        if self.update_freq == "epoch" or self._batches_seen % self.update_freq:
            return
        step, norm, logs = self._batches_seen, self._gradient_norm(), dict(logs or {})

        def write():
            with model_internals.writing(self):
                for name, value in norm.items():
                    tf.summary.scalar(f"batch_{name}", value, step=step)
            self._write_private("batch_", logs, step)

        self._after_save(write)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the validation metrics."""
        super().on_test_end({})
        logs, step = dict(logs or {}), _to_number(self.model.optimizer.iterations, int)
        is_public = self._is_covered("val_loss")
        if not is_public:
            warn(
                f"{type(self).__name__} leaves the validation metrics out, which the privacy "
                f"guarantee does not cover. {IF_PUBLIC} In `tfdpx classify` this is --public_test."
            )

        def write():
            if not is_public:
                return self._write_private("evaluation_", logs, step)
            with model_internals.writing(self, validation=True):
                for name, value in logs.items():
                    tf.summary.scalar(f"evaluation_{name}_vs_iterations", value, step=step)

        self._after_save(write)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's numbers."""
        logs = dict(logs or {})
        covered_logs = {name: value for name, value in logs.items() if self._is_covered(name)}
        private_logs = {name: value for name, value in logs.items() if name not in covered_logs}
        optimizer = model_internals.innermost(self.model.optimizer)
        if self.plan is not None and hasattr(optimizer, "ledger"):
            covered_logs.update(epsilon_log(self.plan, optimizer, self._before))
        if hasattr(optimizer, "noise_multiplier"):
            covered_logs["noise_multiplier"] = optimizer.noise_multiplier
        covered_logs.update(self._gradient_norm())
        step, epsilons = _count_updates(optimizer), self._epsilon(optimizer)
        norms = self._gradient_norms(optimizer)

        def write():
            super(TensorBoard, self).on_epoch_end(epoch, {})
            model_internals.write_epoch(self, step, covered_logs)
            self._write_epsilon(epsilons, step)
            self._write_private("epoch_", private_logs, step)
            if norms is not None:
                with self._private_writer.as_default():
                    tf.summary.histogram("not_private/gradient_norms", norms, step=step)

        self._after_save(write)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the writers."""
        optimizer = model_internals.innermost(self.model.optimizer)
        if self.plan is not None and hasattr(optimizer, "ledger"):
            [(name, epsilon)] = epsilon_log(self.plan, optimizer, self._before).items()
            with model_internals.writing(self):
                self._describe(
                    f"Spent: {name}={epsilon:.4g} at delta={self.plan.delta:g}, in "
                    f"{_count_updates(optimizer)} updates, under adding or removing one example.",
                    optimizer,
                )
        super().on_train_end(logs)
        for writer in (self._private_writer, self._budget_writer):
            if writer is not None:
                writer.close()

    def _is_covered(self, name):
        return is_covered(name, model_internals.innermost(self.model.optimizer))

    def _describe(self, text, optimizer):
        tf.summary.text("privacy_statement", text, step=_count_updates(optimizer))

    def _after_save(self, write):
        """Calls `write` once a `Checkpoint` holds its update; at once without one."""

        def write_records():
            with tf.summary.record_if(True):
                write()

        after_save(self.model, write_records)

    def _epsilon(self, optimizer):
        """The epsilon spent by its name, a dict; empty where no budget is shown."""
        if self._budget_writer is None or not hasattr(optimizer, "ledger"):
            return {}
        return epsilon_log(self.plan, optimizer, self._before)

    def _write_epsilon(self, epsilons, step):
        """Epsilon and, as another run, its budget: two lines in one chart."""
        for name, value in epsilons.items():
            with model_internals.writing(self):
                tf.summary.scalar(name, value, step=step)
            with self._budget_writer.as_default():
                tf.summary.scalar(name, self.plan.epsilon, step=step)

    def _gradient_norm(self):
        optimizer = model_internals.innermost(self.model.optimizer)
        norm = getattr(optimizer, "privatized_gradient_norm", None)
        return {} if norm is None else {"privatized_gradient_norm": _to_number(norm, float)}

    def _gradient_norms(self, optimizer):
        """float32 [n]: before clipping, of some examples; None where they are not wanted or known.

        By the engine of the training, in microbatches as it was traced for.
        """
        session = getattr(optimizer, "session", None)
        if self._private_writer is None or session is None or session.draws is None:
            return None
        if optimizer.of_users:
            return None
        examples = session.draws.examples
        if self._norms is None:
            cache = optimizer.prepared[self.model]
            [size, *_] = cache.sizes.values()
            self._norms = GradientNorms(
                self.model, examples, size.examples, lambda *_: cache.engine
            )
        count = min(_NORMS, examples.count)
        norms = self._norms(np.linspace(0, examples.count, count, endpoint=False).astype(int))
        return norms[np.isfinite(norms)]

    def _write_private(self, prefix, logs, step):
        if self._private_writer is None:
            return
        with self._private_writer.as_default():
            for name, value in (logs or {}).items():
                tf.summary.scalar(f"not_private/{prefix}{name}", value, step=step)


def _count_updates(optimizer):
    """Int: the updates behind the weights, or of another optimizer, its own."""
    if hasattr(optimizer, "ledger"):
        return steps_taken(optimizer)
    return _to_number(optimizer.iterations, int)


def _hyperparameters(optimizer):
    """Dict of plain values: the optimizer's arguments and its plan's."""
    settings = optimizer.get_config()
    plan = getattr(optimizer, "plan", None)
    if plan is not None:
        settings |= {f"plan_{name}": value for name, value in plan.get_config().items()}
    return {
        name: value
        for name, value in settings.items()
        if isinstance(value, (bool, int, float, str))
    }


def _to_number(value, number_type):
    # convert_to_numpy, since int() refuses the variables of a distribution strategy.
    return number_type(keras.ops.convert_to_numpy(value))
