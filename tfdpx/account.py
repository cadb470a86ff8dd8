"""The account: records the privacy that has been spent on a set of weights.

An account belongs to weights, not to an optimizer, because the weights are published. The account
survives when a model is compiled again, trained by another optimizer, saved, or copied by
`copy_weights`. An account lists entries of a `tfdpx.accounting.Ledger`. Of two entries of the same
run, one was recorded later and includes the updates of the other. So only the entry with more
updates remains. Entries of different runs are composed to one epsilon.

Each variable carries a mark that tells whether the origin of its values is known
(`tfdpx._keras.origins`). The origin is known if an initializer of Keras filled the variable after
`import tfdpx`, or if the values came with a ledger. The origin becomes unknown if values are loaded
without a ledger, set by `set_weights`, or trained by an ordinary optimizer.
`tfdpx.checks.mark_public` makes the origin known again. tfdpx cannot detect `variable.assign`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import secrets
import weakref

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import hook, layer_internals, model_internals, step_context
from tfdpx._keras.origins import mark_known, mark_of, mark_unknown
from tfdpx._warnings import warn
from tfdpx.accounting import saved
from tfdpx.accounting.ledger import EXAMPLE, Entry, Ledger

# Layers adapted by `private_adapt` that neither a model's account nor a plan includes yet.
uncounted: weakref.WeakSet = weakref.WeakSet()

# Random bits of this process. With these, a forked process has other run numbers than its parent.
_process = secrets.randbits(52)


def _begin_process():
    global _process
    _process = secrets.randbits(52)


os.register_at_fork(after_in_child=_begin_process)


class _PrivacySpend:
    """Entries of a ledger that was loaded or copied, to which no optimizer adds updates."""

    def __init__(self, ledger):
        self._entries = {}
        self.defaults = {"delta": ledger.delta, "num_examples": ledger.num_examples}
        self._join(ledger)

    def _join(self, ledger):
        for entry in ledger.entries:
            earlier = self._entries.get(entry.key)
            if earlier is None or earlier.steps < entry.steps:
                self._entries[entry.key] = entry

    def entries(self):
        """Returns a tuple of `Entry`."""
        return tuple(self._entries.values())


class Account(_PrivacySpend):
    """The account of the weights that one optimizer trains. Every update adds to it.

    Args:
        state: The optimizer's `tfdpx.training.session.StepState`, which counts updates.
        noise_multiplier: Float, the noise multiplier of the optimizer.
        unit: "example" or "user": an update clips the gradient of each example, or of each user.
    """

    def __init__(self, state, noise_multiplier, unit=EXAMPLE):
        super().__init__(Ledger())
        self.on_spent = lambda: None  # Called when another account has spent on the same weights.
        self._state, self._noise_multiplier, self._unit = state, float(noise_multiplier), unit
        self._open = None  # The arguments of the entry in which updates are counted.
        self._counted = state.updates
        self._runs = set()
        # Weak references to marks: an account must not keep the weights of a deleted model alive.
        self._followed, self._trained = weakref.WeakSet(), weakref.WeakSet()
        self._models = weakref.WeakSet()  # Models passed to `follow`. They may get more layers.
        self.restored = None  # Identifies the last `tf.train.Checkpoint` with a complete ledger.
        self._warned = False
        self._adapted = weakref.WeakSet()  # Layers with statistics of `private_adapt`.
        self.renew()

    @property
    def run(self):
        """Int below 2**52 that identifies the current run in ledgers. It is not secret."""
        return (self._random ^ _process) | 1

    def renew(self, random=None):
        """Starts a new run, with a new number.

        Args:
            random: Int that all hosts share, to give them the same run number; None on one host.
        """
        self._random = secrets.randbits(52) if random is None else random % 2**52 ^ _process
        if self._open is not None:
            self.open(**{name: self._open[name] for name in _OPENED})

    def has_made(self, run):
        """Returns whether this optimizer made the updates of the run with the number `run`."""
        return run in self._runs

    def open(self, sampling_probability, poisson_sampled, seeded, shuffled=False):
        """Begins the entry of the ledger in which the next updates are counted.

        Args:
            sampling_probability: Float in (0, 1], the probability that an example is in a batch;
                None if unknown.
            poisson_sampled: Bool, whether each example is drawn independently, as the accountant
                assumes.
            seeded: Bool, whether the user chose the seed of the batches or the noise.
            shuffled: Bool, whether the batches are parts of a permutation that tfdpx drew.

        Returns:
            Dict of the arguments of the previous call of this method; None at the first call.
        """
        self._settle()
        last, self._open = (
            self._open,
            dict(
                noise_multiplier=self._noise_multiplier,
                sampling_probability=sampling_probability,
                poisson_sampled=bool(poisson_sampled),
                run=self.run,
                seeded=bool(seeded),
                shuffled=bool(shuffled),
                unit=self._unit,
            ),
        )
        self._runs.add(self.run)
        return last and {name: last[name] for name in _OPENED}

    def _settle(self):
        """Adds the updates since the last call of this method to the entry that `open` began."""
        new_updates = self._state.updates - self._counted
        if new_updates <= 0:
            return
        entry = Entry(**self._open, steps=new_updates)
        if (earlier := self._entries.get(entry.key)) is not None:
            entry = dataclasses.replace(entry, steps=earlier.steps + new_updates)
        self._entries[entry.key] = entry
        self._counted += new_updates
        if not _is_complete(self._followed):
            for mark in self._trained:
                mark.is_known = False  # Updates were computed from weights of unknown origin.
        _tell_others(self, self._trained)

    def entries(self):
        """Returns a tuple of `Entry`, with all updates until now."""
        self._settle()
        return super().entries()

    def follow(self, model):
        """Makes the ledger include all past and future spending of any optimizer on `model`."""
        self._models.add(model)
        for mark in map(mark_of, model.weights):
            mark.followers.add(self)
            self._followed.add(mark)
        for layer in layer_internals.flatten_layers(model):
            uncounted.discard(layer)
            ledger = ledger_of_statistics(layer)
            if ledger is not None and ledger.entries:
                # This may read the ledger of this account, so the loop over weights comes first.
                attach(ledger, model.weights)
                self._adapted.add(layer)

    def variables(self):
        """Returns a list of the weights of models passed to `follow`, if they still exist."""
        return [v for mark in self._followed if (v := mark.owner()) is not None]

    def trains(self, variables):
        """Records that this optimizer changes `variables`, so its updates count for them, too.

        Args:
            variables: List of `keras.Variable`.
        """
        for mark in map(mark_of, variables):
            mark.accounts.add(self)
            self._trained.add(mark)

    def arrays(self):
        """Returns a dict of uint8 arrays that hold the ledger in a file of Keras."""
        adapted = {layer.name: _digest(layer) for layer in self._adapted if _is_declared(layer)}
        return arrays_of(self.ledger(), adapted)

    def join(self, ledger):
        """Adds a saved ledger of the weights and starts a new run.

        Args:
            ledger: `tfdpx.accounting.Ledger`, the privacy spent before on the weights.
        """
        self._settle()
        self._join(ledger)
        if not ledger.is_complete:
            mark_unknown(self.variables())
        self.renew()
        self.on_spent()
        _tell_others(self, self._trained)

    def ledger(self):
        """Returns the `tfdpx.accounting.Ledger` of all that has been spent on the weights."""
        self._settle()
        for model in list(self._models):  # `Sequential.add` may have added weights to a model.
            if any(mark_of(variable) not in self._followed for variable in model.weights):
                self.follow(model)
        for account in _accounts_of(self._followed) - {self}:
            self._join(Ledger(account.entries()))
        is_complete = _is_complete(self._followed)
        self._warned = self._warned and not is_complete
        return Ledger(self.entries(), is_complete)

    def warn_of_unknown(self, spent=()):
        """Warns if the ledger may lack a part of the privacy loss; each cause gives one warning.

        Args:
            spent: Tuple of `Entry`, the earlier costs that the plan already includes.
        """
        runs = {entry.run for entry in (*spent, *self.entries())}
        for layer in list(uncounted):
            uncounted.discard(layer)
            if not runs.issuperset(entry.run for entry in mark_of(layer).statistics[0].entries):
                warn(
                    f"Layer '{layer.name}' was adapted by `tfdpx.private_adapt`, but neither the "
                    "model nor the plan counts it. If the data went through it, pass its ledger to "
                    "the plan: `PrivacyPlan(..., spent=ledger)`."
                )
        if not self.ledger().is_complete and self._noise_multiplier and not self._warned:
            self._warned = True
            path = min(v.path for v in self.variables() if not mark_of(v).is_known)
            warn(
                f"Weights of this model, such as '{path}', came from a source without a ledger: "
                "a file without one, `set_weights`, training with an ordinary optimizer, an "
                "initializer of your own, or a model that was made before `import tfdpx`. So "
                "epsilon is a lower bound, and `ledger.is_complete` is False. Import tfdpx first, "
                "and make the model again. If no private data are in these weights, call "
                "`tfdpx.checks.mark_public(model)`; if they were trained privately, load the "
                "`.keras` file of that model, or copy them by `tfdpx.copy_weights`."
            )


_OPENED = ("sampling_probability", "poisson_sampled", "seeded", "shuffled")


class SavedLedger(tf.train.experimental.PythonState):
    """Saves and restores the ledger of an optimizer with `tf.train.Checkpoint`.

    Args:
        optimizer: An optimizer of tfdpx.
    """

    def __init__(self, optimizer):
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def serialize(self):
        """Returns the ledger as a string of JSON."""
        return self._optimizer().account.ledger().to_json()

    def deserialize(self, string_value):
        """Adds a saved ledger to the account.

        TensorFlow calls this method before it restores any variable.

        Args:
            string_value: Bytes, as `serialize` returned them.

        Raises:
            ValueError: If the ledger was saved by tfdpx 0.2.
        """
        if not isinstance(string_value, bytes):
            raise ValueError(saved.OF_0_2)
        account = self._optimizer().account
        ledger = Ledger.from_json(tf.compat.as_str(string_value))
        account.join(ledger)
        account.restored = layer_internals.checkpoint_of(self) if ledger.is_complete else None


def copy_weights(source: keras.Model | keras.Layer, target: keras.Model | keras.Layer) -> None:
    """Copies weights together with their account, so epsilon is still known for the copy.

    In contrast, `target.set_weights(source.get_weights())` copies only the values. The ledger of
    `target` is then incomplete. The account includes statistics that `private_adapt` released.

    Args:
        source: A built model or layer.
        target: A built model or layer with weights of the same shapes, in the same order.

    Raises:
        ValueError: If the shapes of the weights differ.

    Example:
    >>> import keras
    >>> source, target = keras.layers.Dense(2), keras.layers.Dense(2)
    >>> source.build([None, 3]); target.build([None, 3])
    >>> copy_weights(source, target)
    """
    shapes = [[tuple(v.shape) for v in layer.weights] for layer in (source, target)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "Arguments `source` and `target` must have weights of the same shapes. Received: "
            f"{shapes[0]} and {shapes[1]}. Build both for the same inputs."
        )
    for variable, other in zip(source.weights, target.weights, strict=True):
        other.assign(variable)
    pass_on(source.weights, target.weights)
    layers = map(layer_internals.flatten_layers, (source, target))
    for layer, copy in zip(*layers, strict=False):
        if isinstance(copy, keras.layers.Normalization) and copy.built:
            copy.finalize_state()  # It computes with copies of its weights.
        ledger, both = ledger_of_statistics(layer), (layer, copy)
        if ledger is not None and _are_equal(*map(layer_internals.adapted_statistics, both)):
            declare_statistics(copy, ledger)


def arrays_of(ledger, adapted=()):
    """Returns a dict of uint8 arrays that hold a ledger in a file of Keras.

    Args:
        ledger: `tfdpx.accounting.Ledger`.
        adapted: Dict from the names of layers with noisy statistics to the digests of these
            statistics. The ledger includes the cost of the statistics.
    """
    texts = {saved.LEDGER: ledger.to_json(), saved.ADAPTED: json.dumps(dict(adapted))}
    return {name: np.frombuffer(text.encode(), "uint8") for name, text in texts.items()}


def attach(ledger, variables):
    """Adds a ledger to the accounts of weights.

    Args:
        ledger: `tfdpx.accounting.Ledger` with a run number in each entry.
        variables: List of `keras.Variable`, the weights.
    """
    spent = _PrivacySpend(ledger)
    for mark in map(mark_of, variables):
        for other in [account for account in mark.accounts if type(account) is _PrivacySpend]:
            if (ledger + Ledger(other.entries())).entries == ledger.entries:
                mark.accounts.discard(other)
        if ledger.entries:
            mark.accounts.add(spent)
        if not ledger.is_complete:
            mark.is_known = False
    if ledger.entries:
        _tell_others(spent, map(mark_of, variables))


def are_initialized(variables):
    """Returns whether initializers of Keras filled all variables after `import tfdpx`.

    Args:
        variables: List of `keras.Variable`.
    """
    return all(mark.is_known and mark.is_initialized for mark in map(mark_of, variables))


def pass_on(source, target):
    """Copies the accounts and the origin of some weights to others that get the same values.

    Args:
        source: List of `keras.Variable`, the weights that are copied.
        target: List of `keras.Variable`, the copies.
    """
    marks = [mark_of(variable) for variable in source]
    accounts, is_known = _accounts_of(marks), _is_complete(marks)
    is_initialized = are_initialized(source)
    for mark in map(mark_of, target):
        mark.accounts |= accounts
        mark.is_known, mark.is_initialized = is_known, is_initialized
    for account in accounts:
        _tell_others(account, map(mark_of, target))


def ledger_of(variables):
    """Returns the ledger of all that was spent on weights, which may have no optimizer.

    Args:
        variables: List of `keras.Variable`, the weights.

    Returns:
        `tfdpx.accounting.Ledger`.
    """
    marks = [mark_of(variable) for variable in variables]
    spent = [Ledger(a.entries(), **a.defaults) for a in _accounts_of(marks)]
    return sum(spent, Ledger((), _is_complete(marks)))


def declare_statistics(layer, ledger):
    """Records the privacy cost of the present statistics of a preprocessing layer.

    Args:
        layer: A `keras.Layer` with an `adapt` method, for example `keras.layers.Normalization`.
        ledger: `tfdpx.accounting.Ledger`, the cost; empty if the statistics are public.
    """
    mark_of(layer).statistics = ledger, layer_internals.adapted_statistics(layer)


def ledger_of_statistics(layer):
    """Returns the `Ledger` that `declare_statistics` recorded for the statistics of a layer.

    Args:
        layer: A `keras.Layer`.

    Returns:
        `tfdpx.accounting.Ledger`. None if no ledger was recorded, or if the statistics have changed
        since then.
    """
    ledger, values = mark_of(layer).statistics or (None, None)
    if ledger is None:
        return None
    present = step_context.eagerly(layer_internals.adapted_statistics, layer)
    return ledger if _are_equal(values, present) else None


def _are_equal(statistics, others):
    """Returns whether two results of `adapted_statistics` are equal, and neither is None."""
    if statistics is None or others is None or len(statistics) != len(others):
        return False
    return all(map(np.array_equal, statistics, others))


def _is_declared(layer):
    return ledger_of_statistics(layer) is not None


def _digest(layer):
    """Returns the SHA-256 hash of the present statistics of a layer as a hexadecimal string."""
    arrays = step_context.eagerly(layer_internals.adapted_statistics, layer) or ()
    text = "".join(f"{array.dtype}{array.shape}{array.tolist()}" for array in arrays)
    return hashlib.sha256(text.encode()).hexdigest()


def _accounts_of(marks):
    return set().union(*(mark.accounts for mark in marks))


def _is_complete(marks):
    return all(mark.is_known for mark in marks if mark.owner() is not None)


def _tell_others(account, marks):
    """Tells all other accounts of the weights with these marks that `account` has spent more."""
    for other in set().union(*(mark.followers for mark in marks)) - {account}:
        # With a plan's `spent=`, this runs while a step is traced.
        step_context.eagerly(other.on_spent)


def _loading(model, arrays):
    return functools.partial(_loaded, model, arrays, saved.read(arrays))


def _loaded(model, arrays, ledger, known):
    if ledger is None:
        return
    mark_known(known)
    # All weights get the ledger, even frozen ones: the file does not tell which were trained.
    attach(ledger, model.weights)  # Their origin becomes unknown if the ledger is incomplete.
    adapted = saved.adapted(arrays)
    for layer in layer_internals.flatten_layers(model):
        # Names are not enough: a layer of the same name may have been adapted without noise.
        if layer.name in adapted and adapted[layer.name] == _digest(layer):
            declare_statistics(layer, ledger)  # The ledger includes the cost of the statistics.


def _set(layer, values):
    optimizer = model_internals.innermost(getattr(layer, "optimizer", None))
    session = getattr(optimizer, "session", None)
    best = () if session is None else session.best_weights()
    if not any(values is weights for weights in best):
        mark_unknown(layer.weights)


def _replaced(old, new):
    old_ids = {id(variable) for variable in old}
    pass_on(old, [variable for variable in new if id(variable) not in old_ids])


hook.watch_weights(_loading, _set, _replaced)
