"""What the traced step reads and counts of a training: its secret, its updates and its end.

Whoever knows the secret can subtract the noise and replay the draws. So nothing here is in a
variable that Keras or `tf.train.Checkpoint` knows, and no file holds it. Numbers computed from the
data without noise are kept here for the same reason.
"""

import threading

import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx._keras.variables import value_of, variable

_NEVER = 2**62


class StepState:
    """Variables, so that a step that was traced once serves every session after it."""

    def __init__(self):
        self._secret = variable(noise.make_seed(), "int64")
        self._before = variable(0, "int64")  # The updates made before those that are counted here.
        self._updates = variable(0, "int64")
        self._end = variable(_NEVER, "int64")
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

    def begin(self, secret, number):
        """From here on updates are keyed by another secret.

        Args:
            secret: Two ints, int64.
            number: Int, of the next update.
        """
        self._secret.assign(np.array(secret, "int64"))
        self._before.assign(number - self.updates)

    def end_after(self, left):
        """Says how many more updates there may be, an int; None for any number."""
        self._end.assign(_NEVER if left is None else self.updates + left)

    def key(self):
        """int64 tensor [2]: the key of the next update's noise, views and masks, of no other's."""
        return noise.fold_in(self._secret, self._before + self._updates)

    def until_end(self, sums):
        """What the data may change in an update: nothing, once the plan has none left.

        Python stops `fit` and `train_on_batch` before such an update. This is for whoever calls the
        step from a loop of their own: an error, or under XLA, which knows no errors, an update of
        noise alone, which costs no privacy.

        Args:
            sums: List of tensors, computed from the data.

        Returns:
            List of tensors.
        """
        allowed = self._updates < self._end
        stop = tf.debugging.Assert(
            allowed, ["The privacy budget of the optimizer's plan is used up."]
        )
        with tf.control_dependencies([stop] if stop is not None else []):
            return [tf.where(allowed, total, tf.zeros_like(total)) for total in sums]

    def count(self, nonfinite):
        """Called by the private step, once an update.

        Args:
            nonfinite: Scalar tensor, the examples of the update whose gradient was not finite.
        """
        self._updates.assign_add(1)
        self._nonfinite.assign_add(tf.cast(nonfinite, "int64"))
