"""Clips each example at its most recently measured norm, for an `IndividualAccountant`.

The norms are functions of the private data, one an example. So, like the seeds of a run, they are
in no variable that Keras or `tf.train.Checkpoint` saves; `tfdpx.callbacks.Checkpoint` alone writes
them.
"""

import keras
import numpy as np
import tensorflow as tf

from tfdpx import mechanism
from tfdpx._keras.variables import value_of
from tfdpx._keras.variables import variable as shared_variable
from tfdpx.account import attach
from tfdpx.training import replicas
from tfdpx.training.clip_policy import ClipPolicy, planned

_ARRAYS = ("levels", "since", "counts", "steps", "refreshes")


class IndividualClip(ClipPolicy):
    """Holds each example's norm when it was last seen, and how many steps it was clipped at which.

    A level n, from 1 on, is the n-th of the accountant's fractions of the clip. What an example was
    clipped at is counted when its level may change; until then it is known from the step since.

    Args:
        accountant: `tfdpx.accounting.IndividualAccountant`; reads its account here from now on.
        account: The optimizer's `tfdpx.account.Account`.
        l2_norm_clip: Float, C, of which each clip is a fraction.
    """

    def __init__(self, accountant, account, l2_norm_clip):
        super().__init__(l2_norm_clip)
        self._accountant = accountant
        accountant.attach(self)
        self.refreshes_per_epoch = accountant.refreshes_per_epoch
        self.plan, self._account = accountant.plan, account
        self._fractions = accountant.fractions
        # Not above what is accounted, so that the clip is not.
        exact = self._fractions.astype("float32")
        below = np.where(exact > self._fractions, np.nextafter(exact, np.float32(0)), exact)
        self._clips = tf.constant(below)
        self._count, count = self.plan.num_examples, self.plan.num_examples + 1
        # The last row is for absent examples. No int32, which TensorFlow keeps off GPUs; counts
        # are small integers.
        worst = len(self._fractions)
        self._held = {
            "levels": shared_variable(np.full([count], worst), "int64"),
            "since": shared_variable(np.zeros([count]), "int64"),
            "counts": shared_variable(np.zeros([count, worst]), "float32"),
            "steps": shared_variable(0, "int64"),
            "refreshes": shared_variable(0, "int64"),
        }
        self._examples = None  # The fingerprint of what the ids are of.

    def check_data(self, data):
        """Raises ValueError unless a plan made these batches, of the same examples as before."""
        draws = planned(data)
        if draws is None:
            raise ValueError(
                "Individual accounting must know which example is which, and `fit` was given other "
                "data than `plan.batches(...)` made, or batches that were changed. Give it "
                "`plan.batches(x, y, optimizer=model.optimizer)` as it is."
            )
        self._check_examples(draws.examples.fingerprint())

    def dataset(self, draws):
        """Batches with the ids of their rows as a fourth part, int32 [rows]."""
        return draws.with_ids

    def split(self, data, session):
        """The batch as Keras knows it, and the ids.

        Args:
            data: `(x, y, sample_weight, ids)`.
            session: The `tfdpx.training.session.Session` under way, or None.

        Raises:
            ValueError: If it has no ids, or `fit` did not see to them.
        """
        drawn = session is not None and session.draws is not None
        if not drawn or not isinstance(data, tuple) or len(data) != 4:
            raise ValueError(
                "Individual accounting must know which examples a batch holds. Received: a batch "
                "without ids. Train with `model.fit(plan.batches(x, y))` or "
                "`tfdpx.distributed.fit`, and not by `train_on_batch` or `train_step`."
            )
        return data[:3], data[3]

    def fractions_of(self, ids: tf.Tensor) -> tf.Tensor:
        """float32 [n]: the fraction of C that examples, int32 [n], are clipped at."""
        return tf.gather(self._clips, tf.gather(self._held["levels"], ids) - 1)

    def of_rows(self, ids, count):
        """Pair of float32 [B], the fractions, and int32 [B], the number of each row."""
        return self.fractions_of(ids), tf.range(count)

    def specs(self, count):
        """Of the fractions."""
        return (tf.TensorSpec([count], tf.float32),)

    def whole(self, count):
        """Fractions of one."""
        return (tf.ones([count]),)

    def clips(self, of_rows, update):
        """The fractions."""
        return of_rows[:1]

    def factors(self, squared_norms, present, batch_size, *clips):
        """`mechanism.clip_factors` at the fractions."""
        clip = self.l2_norm_clip
        return mechanism.clip_factors(squared_norms, present, clip, batch_size, *clips)

    def measured(self, squared_norms, present, of_rows, clips, count):
        """float32 [count]: norms over C, at most 1, each at the number of its row."""
        norms = tf.where(present, self.over_clip(squared_norms), 0.0)
        return tf.scatter_nd(of_rows[1][:, tf.newaxis], norms, [count])

    def over_clip(self, squared_norms: tf.Tensor) -> tf.Tensor:
        """float32 [n]: norms over C, at most 1."""
        norms = tf.sqrt(squared_norms) / self.l2_norm_clip
        # Of a gradient that is not finite nothing is known but that it may be long.
        return tf.where(tf.math.is_finite(norms), tf.minimum(norms, 1.0), 1.0)

    def nothing_measured(self, count):
        """Zeros."""
        return tf.zeros([count])

    def to_share(self, ids, present, measured, context):
        """One tensor of ids, presence and norms, in which each replica has its own columns."""
        rows = [tf.cast(ids, "float32"), tf.cast(present, "float32"), measured]
        return [replicas.beside_others(tf.stack(rows), context)]

    def learn(self, shared):
        """Charges the examples of an update, then learns their norms."""
        ids, present, norms = tf.unstack(shared)
        self.count_update(tf.cast(ids, "int32"), present > 0, norms)

    def count_update(self, ids, present, norms):
        """Charges the examples for an update, then learns their norms.

        Args:
            ids: int32 tensor [n].
            present: bool [n]; the ids of other rows mean nothing.
            norms: float32 [n], finite, over the clip.
        """
        step = tf.convert_to_tensor(self._held["steps"])
        self._learn(ids, present, norms, step + 1)
        self._held["steps"].assign_add(1)

    def refresh(self, ids, present, norms):
        """Learns norms between two updates; arguments as of `count_update`."""
        self._learn(ids, present, norms, tf.convert_to_tensor(self._held["steps"]))

    def _learn(self, ids, present, norms, upto):
        """Counts the steps before `upto` at the levels so far, and changes these."""
        held = self._held
        rows = tf.where(present, tf.cast(ids, "int64"), self._count)
        levels = tf.gather(held["levels"], rows)
        steps = upto - tf.gather(held["since"], rows)
        places = tf.stack([rows, levels - 1], axis=1)
        _scatter(held["counts"], "add", places, tf.cast(steps, "float32"))
        _scatter(held["since"], "update", rows[:, tf.newaxis], tf.fill(tf.shape(rows), upto))
        # The least level whose clip is not below the norm.
        found = 1 + tf.searchsorted(self._clips, norms, side="left", out_type=tf.int64)
        found = tf.minimum(found, len(self._fractions))
        _scatter(held["levels"], "update", rows[:, tf.newaxis], found)

    def refresh_is_due(self):
        """Whether a refresh is; then it counts as done."""
        if not self.refreshes_per_epoch:
            return False
        steps, done = int(self._array("steps")), int(self._array("refreshes"))
        due = int(steps * self.plan.sampling_probability * self.refreshes_per_epoch + 1e-9)
        self._held["refreshes"].assign(due)
        return due > done

    def counts(self):
        """int64 array [num_examples, levels]: the steps that each was clipped at each level."""
        counts = self._array("counts")[: self._count].astype("int64")
        levels, since = (self._array(name)[: self._count] for name in ("levels", "since"))
        counts[np.arange(self._count), levels - 1] += int(self._array("steps")) - since
        return counts

    def fractions(self):
        """float64 array [num_examples]: the fraction of the clip that each is clipped at now."""
        return self._fractions[self._array("levels")[: self._count] - 1]

    def ledger(self):
        """All that was spent on the weights."""
        return self._account.ledger()

    def spend(self, ledger):
        """Adds a ledger to the ledger of the weights."""
        attach(ledger, self._account.variables())

    def state(self):
        """All of it as a dict of arrays. Private."""
        return {"examples": np.array(self._examples or ""), **{n: self._array(n) for n in _ARRAYS}}

    def restore(self, state):
        """Continues from a `state()`.

        Raises:
            ValueError: If it is of other examples or another rounding.
        """
        for name in _ARRAYS:
            if name not in state or state[name].shape != self._held[name].shape:
                raise ValueError(
                    f"The saved norms of individual accounting lack {name!r} of shape "
                    f"{tuple(self._held[name].shape)}. Go on with the accountant that saved them."
                )
        self._check_examples(str(state["examples"]))
        for name in _ARRAYS:
            self._held[name].assign(state[name])

    def arguments(self):
        """The clip, and the argument `individual`."""
        individual = keras.saving.serialize_keras_object(self._accountant)
        return {"l2_norm_clip": self.l2_norm_clip, "individual": individual}

    def _check_examples(self, fingerprint):
        if self._examples not in (None, fingerprint):
            raise ValueError(
                "These batches are of other examples, or in another order, than those that this "
                "IndividualAccountant has followed: the norm of one would be taken for another's. "
                "Train on the same arrays, or compile with a new optimizer and accountant."
            )
        self._examples = fingerprint

    def _array(self, name):
        return value_of(self._held[name])


def _scatter(variable, kind, places, values):
    """Adds `values` [n] to a variable at `places` [n, rank], or puts them there."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        getattr(variable, f"scatter_nd_{kind}")(places, values)
        return
    # These, with a copy on each replica, know no scatter.
    function = tf.tensor_scatter_nd_add if kind == "add" else tf.tensor_scatter_nd_update
    variable.assign(function(tf.convert_to_tensor(variable), places, values))
