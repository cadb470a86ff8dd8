"""A private model that is compiled and traced once, and returns to its start before each update.

A fresh private `compile` and first step cost a second, a second step on the same model 6 ms. So a
test module makes one `Bench` for each policy, in a fixture of the module's scope, and its tests
share the trace: each `step` first restores the weights and the optimizer's variables.
"""

import numpy as np
import small


class Bench:
    """A compiled model that returns to its start before each step.

    An example is left out by a sample weight of zero, which marks it absent: another number
    of rows would be another trace. One trace serves all `x` and `y` of the same shapes and dtypes.

    Attributes:
        model: The compiled `keras.Model`.
        optimizer: Its private optimizer.
        class_weight: Dict that each step passes on, or None.
    """

    def __init__(self, optimizer=None, layers=None, loss=None, shape=(6,), **arguments):
        """Compiles and builds the model; the first `step` traces it.

        Args:
            optimizer: A private optimizer; None for `DPSGD` with `arguments`, as `small.model`.
            layers: Function that returns a list of layers, or None for two dense layers.
            loss: A Keras loss, or None for the cross-entropy of integer labels.
            shape: Tuple, the shape of an example, for example `(6,)`.
            **arguments: Arguments of `small.model`, for example `noise_multiplier=0.0`.
        """
        self.model = small.model(optimizer, layers, loss, **arguments)
        self.model.build((None, *shape))
        self.optimizer = self.model.optimizer
        self.optimizer.build(self.model.trainable_variables)
        self.class_weight = None
        self._start = [
            (variable, np.array(variable))
            for variable in (*self.model.variables, *self.optimizer.variables)
        ]

    def restore(self):
        """Restores the weights and the optimizer's variables to their start; the ledger stays."""
        for variable, value in self._start:
            variable.assign(value)

    def step(self, x, y, sample_weight=None, weights=None):
        """Returns the change of the weights by one update from the start, or from `weights`.

        Args:
            x: Array [B, ...], or [B, K, ...] of K views.
            y: Array [B, ...].
            sample_weight: Array [B], zero for an absent example; None for all ones.
            weights: List of values of the trainable variables to start from; None for the first.

        Returns:
            Float array, flat.
        """
        self.restore()
        for variable, value in zip(self.model.trainable_variables, weights or [], strict=False):
            variable.assign(value)
        return self.continue_step(x, y, sample_weight)

    def continue_step(self, x, y, sample_weight=None):
        """Returns the change of the weights by an update that follows the last one; see `step`."""
        before = small.weights(self.model)
        weight = np.ones(len(x)) if sample_weight is None else np.asarray(sample_weight)
        self.model.train_on_batch(x, y, weight.astype("float32"), self.class_weight)
        return small.weights(self.model) - before

    def influence(self, x, y, example):
        """Returns how far an example moves the update without noise, in units of 1 / `batch_size`.

        Args:
            x: As for `step`.
            y: As for `step`.
            example: Int, the row that is marked absent in the second of two updates.

        Returns:
            Float; at most 1 if the optimizer takes plain steps at learning rate 1.
        """
        present = np.arange(len(x)) != example
        moved = self.step(x, y).astype("float64") - self.step(x, y, present)
        return np.linalg.norm(moved) * self.optimizer.batch_size

    def noise(self, x, y, updates):
        """Returns the noise of updates without any example, in units of 1 / `batch_size`.

        Args:
            x: As for `step`.
            y: As for `step`.
            updates: Int.

        Returns:
            Float array [updates, number of weights].
        """
        absent = np.zeros(len(x))
        noisy = [-self.step(x, y, absent) for _ in range(updates)]
        return np.stack(noisy) * self.optimizer.batch_size
