"""The end of a plan: training stops before the update that it does not pay for, whoever asks."""

import keras

from tfdpx import keras_internals
from tfdpx.run.budget import BudgetExceeded, epsilon_spent, steps_taken, updates_left, used_up


class Limit(keras.callbacks.Callback):
    """Stops `fit` before the execution that a plan does not pay for, and says so at the end.

    Args:
        plan: The optimizer's `PrivacyPlan`.

    Attributes:
        end: Int, the updates of the optimizer's run after which nothing is left; None before the
            training, and where no step follows.

    Raises:
        BudgetExceeded: By `fit`, if the plan has no room for another execution.
    """

    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.end = self._run = None
        self._is_spent = False

    def on_train_begin(self, logs=None):
        """Finds the end, and raises an error if there is no room before it."""
        self.end, self._is_spent, self._run = None, False, None
        if (keras_internals.initial_epoch(self.model) or 0) >= self.params["epochs"]:
            return  # Resumed after its last epoch: no step follows.
        self._find_end()

    def on_epoch_begin(self, epoch, logs=None):
        """Finds the end anew, if a callback has restored other weights since."""
        if self._run != self._optimizer.run.number:
            self._find_end()

    def _find_end(self):
        optimizer, plan = self._optimizer, self.plan
        left = self._updates_left(optimizer)
        execution = self._execution()
        if left <= 0:
            raise used_up(optimizer, plan)
        if left < execution:
            raise BudgetExceeded(
                f"An execution of {execution} steps does not fit into the budget: "
                f"{steps_taken(optimizer, plan)} of {plan.steps} steps were taken. "
                "Compile with a smaller `steps_per_execution`."
            )
        self.end, self._run = optimizer.run.updates + left, optimizer.run.number

    def on_train_batch_begin(self, batch, logs=None):
        """Raises an error where another callback had the training go on past the end."""
        if self.end is not None and self._optimizer.run.updates + self._execution() > self.end:
            raise used_up(self._optimizer, self.plan)

    def on_train_batch_end(self, batch, logs=None):
        """Stops the training when the next execution might exceed the budget."""
        updates = self._optimizer.run.updates
        if self.end is not None and updates + self._execution() > self.end:
            # The first to stop it says so.
            self._is_spent = not self.model.stop_training
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        """Says that the budget is used up, unless `fit` is silent."""
        if self._is_spent and self.params.get("verbose"):
            optimizer, plan = self._optimizer, self.plan
            left = self.end - optimizer.run.updates
            rest = f" ({left} left, less than an execution)" if left else ""
            print(
                f"Privacy budget used up after {steps_taken(optimizer)} updates{rest}: "
                f"epsilon={epsilon_spent(optimizer, plan):.4g} at delta={plan.delta:g}."
            )

    def _updates_left(self, optimizer):
        """Int: how many more updates there may be."""
        return updates_left(optimizer)

    @property
    def _optimizer(self):
        return keras_internals.innermost(self.model.optimizer)

    def _execution(self):
        # Our own loop ends with a shorter execution.
        ours = keras_internals.driver(self.model) == "tfdpx"
        return 1 if ours else self.model.steps_per_execution


class Progress(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, whose target is the number of steps that the budget leaves an epoch.

    Args:
        limits: List of the `Limit`s of this `fit`.
    """

    def __init__(self, limits):
        super().__init__()
        self._limits = limits
        self._steps = None

    def set_params(self, params):
        """Keeps the number of steps that `fit` was asked for."""
        super().set_params(params)
        self._steps = params["steps"]

    def on_epoch_begin(self, epoch, logs=None):
        """Begins a bar of the steps that follow."""
        updates = keras_internals.innermost(self.model.optimizer).run.updates
        left = [limit.end - updates for limit in self._limits if limit.end is not None]
        if self._steps is not None and left:
            execution = self.model.steps_per_execution
            self.target = min(self._steps, min(left) // execution * execution)
        super().on_epoch_begin(epoch, logs)
