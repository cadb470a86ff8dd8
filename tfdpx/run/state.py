"""The secrets of one training run: the seeds of noise and draws, and how far they were used.

Whoever knows the seeds can subtract the noise and replay the draws. So nothing here is in a
variable that Keras or `tf.train.Checkpoint` saves, and an optimizer that is loaded, copied or
unpickled begins a run of its own, with fresh seeds. Only `tfdpx.callbacks.Checkpoint` writes this
state down. Numbers computed from the data without noise are kept here for the same reason.
"""

import hashlib
import os
import secrets

import numpy as np
import tensorflow as tf

from tfdpx import noise

_HELD = ("noise_seed", "draw_seed", "branch", "rate", "updates", "nonfinite")
_NEVER = 2**62
_UNSET = -1  # The bits of a NaN, which is no learning rate.


class Run:
    """One run's seeds and counters.

    Args:
        seed: Optional int, from which all seeds follow. None asks the operating system, which is
            what private training needs.

    Attributes:
        number: Int below 2**52, random: names the run in ledgers. It is no secret.

    Raises:
        ValueError: If `seed` is neither None nor an int.
    """

    def __init__(self, seed=None):
        state = fresh_state(seed)
        self.number = state["number"]
        # Held by a plain object, so that no tracking of Keras or TensorFlow finds them.
        self._held = {name: variable(state[name], "int64") for name in _HELD}
        self._used, self._pass = state["used"], None
        # Nothing to save: what a plan leaves follows from the ledger.
        self._end = variable(_NEVER, "int64")
        self.is_shared = False

    @property
    def updates(self):
        """Int: the updates that this run has made; nothing that a user assigns changes it."""
        return int(self._array("updates"))

    @property
    def end(self):
        """Int: the updates after which the plan has none left; 2**62 without a plan."""
        return int(value_of(self._end))

    def end_after(self, updates):
        """Says how many updates the run may make at most, before `until_end` stops it.

        Args:
            updates: Int, or None for no end.
        """
        self._end.assign(_NEVER if updates is None else updates)

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
        allowed = self._held["updates"] < self._end
        stop = tf.debugging.Assert(
            allowed, ["The privacy budget of the optimizer's plan is used up."]
        )
        with tf.control_dependencies([stop] if stop is not None else []):
            return [tf.where(allowed, total, tf.zeros_like(total)) for total in sums]

    @property
    def is_shared(self):
        """Bool: whether another process may go on from this state too.

        So it is if a checkpoint holds it, and in a process that was forked off.
        """
        return self._is_saved or self._process != os.getpid()

    @is_shared.setter
    def is_shared(self, is_saved):
        self._is_saved, self._process = is_saved, os.getpid()

    @property
    def nonfinite(self):
        """Int: examples so far whose gradient was not finite. Not private."""
        return int(self._array("nonfinite"))

    @property
    def draw_seed(self):
        """Tuple of two ints: the seed of the run's draws."""
        return tuple(int(part) for part in self._array("draw_seed"))

    @property
    def noise_seed(self):
        """int64 tensor [2]: the seed of the run's noise and views."""
        return self._held["noise_seed"]

    def step_seed(self):
        """int64 tensor [2]: the seed of the next update's noise and views, used by no other."""
        seed = tf.bitwise.bitwise_xor(self.noise_seed, self._held["branch"])
        return noise.fold_in(seed, self._held["updates"])

    def count_update(self, nonfinite, learning_rate):
        """Called by the private step, once an update.

        Two runs from one checkpoint may differ by a callback that changes the learning rate. From
        there on their weights do, and so must their noise: each change sets another branch.

        Args:
            nonfinite: Scalar tensor, the examples of the update whose gradient was not finite.
            learning_rate: Scalar float tensor, that of the update.
        """
        rate = tf.cast(tf.bitcast(tf.cast(learning_rate, "float32"), tf.int32), "int64")
        held = self._held
        stays = tf.logical_or(held["rate"] == _UNSET, held["rate"] == rate)
        other = noise.fold_in(held["branch"], rate)
        held["branch"].assign(tf.where(stays, held["branch"], other))
        held["rate"].assign(rate)
        held["updates"].assign_add(1)
        held["nonfinite"].assign_add(tf.cast(nonfinite, "int64"))

    def first_unused(self, name):
        """Int: the first step of the draws `name` that no update of this run has used."""
        self._settle()
        return self._used.get(name, 0)

    def begin_pass(self, name, first):
        """From here on every update uses one draw of `name`, from step `first` on."""
        self._settle()
        self._pass = (name, first, self.updates)

    def end_pass(self):
        """Updates from here on use other data."""
        self._settle()
        self._pass = None

    def learn(self, other):
        """Takes over which draws `other`, a run on the same weights or None, has used."""
        if other is None:
            return
        other._settle()
        for name, end in other._used.items():
            self._used[name] = max(self._used.get(name, 0), end)

    def state(self):
        """All of it as a dict of JSON values. Secret."""
        self._settle()
        held = {name: self._array(name).tolist() for name in _HELD}
        return {"number": self.number, "used": dict(self._used), **held}

    def restore(self, state):
        """Becomes the run whose `state()` this was: the same noise and draws from there on."""
        self.number = state["number"]
        for name in _HELD:
            self._held[name].assign(np.array(state[name], "int64"))
        self._used, self._pass = dict(state["used"]), None
        self.is_shared = False

    def _array(self, name):
        return value_of(self._held[name])

    def _settle(self):
        """Notes what the pass under way has used; draws that were only looked at are not used."""
        if self._pass is None:
            return
        name, first, updates = self._pass
        self._used[name] = max(self._used.get(name, 0), first + self.updates - updates)


def fresh_state(seed=None):
    """The `Run.state()` of a run that has made no update.

    Args:
        seed: Optional int, from which all seeds follow; None asks the operating system.
    """
    return {
        "number": secrets.randbits(52) | 1,
        "noise_seed": noise.make_seed(seed),
        "draw_seed": noise.make_seed(None if seed is None else _apart("draws", seed)),
        "branch": [0, 0],
        "rate": _UNSET,
        "updates": 0,
        "nonfinite": 0,
        "used": {},
    }


def common_state(entropy):
    """`fresh_state`, the same on all hosts.

    Args:
        entropy: Int of 128 random bits that all hosts share.
    """
    return {**fresh_state(entropy), "number": _apart("number", entropy) % 2**52 | 1}


def variable(value, dtype):
    """A `tf.Variable` that replicas update alike. Not Keras's, which an optimizer would track."""
    return tf.Variable(
        np.array(value, dtype),
        trainable=False,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def value_of(variable):
    """The value of a `tf.Variable`, also of one with a copy on each replica, as a NumPy array."""
    return tf.convert_to_tensor(variable).numpy()


def _apart(use, seed):
    """An int that follows from `seed`, and is unrelated to it and to those of other uses."""
    return int.from_bytes(hashlib.sha256(f"tfdpx {use} {seed}".encode()).digest(), "big")
