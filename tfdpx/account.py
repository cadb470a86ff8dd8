"""The account: the privacy spent on a set of weights.

It follows the weights, because these are published: it is kept when a model is compiled again,
trained by another optimizer, saved, or copied by `copy_weights`. An account lists entries. Entries
of one run are the same updates, recorded earlier and later, so the larger count is kept; other runs
compose.

A variable is of known or of unknown origin (`tfdpx._keras.origins`). It is known if an initializer
of Keras has filled it after `import tfdpx`, or if its values came with a ledger. It becomes unknown
when values are loaded without a ledger, set by `set_weights`, or trained by an ordinary optimizer,
and known again by `tfdpx.checks.mark_public`. `variable.assign` cannot be detected.
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

# Layers with statistics of `private_adapt` that neither a model nor a plan has counted yet.
uncounted: weakref.WeakSet = weakref.WeakSet()

# Part of the number of every run of this process.
_process = secrets.randbits(52)


def _begin_process():
    global _process
    _process = secrets.randbits(52)


os.register_at_fork(after_in_child=_begin_process)


class _PrivacySpend:
    """Entries that no live optimizer adds to."""

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
        """Tuple of `Entry`."""
        return tuple(self._entries.values())


class Account(_PrivacySpend):
    """The entries of the weights that one optimizer trains.

    Args:
        state: The optimizer's `tfdpx.training.session.StepState`, which counts updates.
        noise_multiplier: Float, the optimizer's.
        unit: "example" or "user", the unit that updates clip.
    """

    def __init__(self, state, noise_multiplier, unit=EXAMPLE):
        super().__init__(Ledger())
        self.on_spent = lambda: None  # Called when others have spent on the weights it follows.
        self._state, self._noise_multiplier, self._unit = state, float(noise_multiplier), unit
        self._open = None  # The arguments of the entry in which updates are counted.
        self._counted = state.updates
        self._runs = set()
        # Marks, weakly: weights must not outlive their model.
        self._followed, self._trained = weakref.WeakSet(), weakref.WeakSet()
        self._models = weakref.WeakSet()  # Those that `follow` got: they may grow.
        self.restored = None  # The number of a `tf.train.Checkpoint` with a whole ledger.
        self._warned = False
        self._adapted = weakref.WeakSet()  # Layers with noisy statistics.
        self.renew()

    @property
    def run(self):
        """Int below 2**52 that names the current run in ledgers. It is no secret."""
        return (self._random ^ _process) | 1

    def renew(self, random=None):
        """Starts another run.

        Args:
            random: Int that all hosts share, or None.
        """
        self._random = secrets.randbits(52) if random is None else random % 2**52 ^ _process
        if self._open is not None:
            self.open(**{name: self._open[name] for name in _OPENED})

    def has_made(self, run):
        """Returns whether this optimizer has made the updates of the run with this number."""
        return run in self._runs

    def open(self, sampling_probability, poisson_sampled, seeded, shuffled=False):
        """Counts the next updates in an entry of such batches.

        Args:
            sampling_probability: Float in (0, 1], or None if unknown.
            poisson_sampled: Bool, whether the batches are drawn as the accountant assumes.
            seeded: Bool, whether the user chose a seed of draws or noise.
            shuffled: Bool, whether a plan's own sampler cuts the batches from permutations.

        Returns:
            Dict of the arguments of the last call; None at first.
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
        """Counts the updates after the last call in the open entry."""
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
                mark.is_known = False  # They are computed from weights of unknown origin.
        _tell_others(self, self._trained)

    def entries(self):
        """Returns a tuple of `Entry`, including the current updates."""
        self._settle()
        return super().entries()

    def follow(self, model):
        """Joins the past and future costs of the weights of a model, by any optimizer."""
        self._models.add(model)
        for layer in layer_internals.flatten_layers(model):
            uncounted.discard(layer)
            ledger = ledger_of_statistics(layer)
            if ledger is not None and ledger.entries:
                attach(ledger, model.weights)
                self._adapted.add(layer)
        for mark in map(mark_of, model.weights):
            mark.followers.add(self)
            self._followed.add(mark)

    def variables(self):
        """Returns the `keras.Variable`s that are followed and alive, a list."""
        return [v for mark in self._followed if (v := mark.owner()) is not None]

    def trains(self, variables):
        """Tells other accounts that the updates of this one count for these weights.

        Args:
            variables: List of `keras.Variable` that updates change.
        """
        for mark in map(mark_of, variables):
            mark.accounts.add(self)
            self._trained.add(mark)

    def arrays(self):
        """Returns a dict of the uint8 arrays that Keras saves with the optimizer."""
        adapted = {layer.name: _digest(layer) for layer in self._adapted if _is_declared(layer)}
        return arrays_of(self.ledger(), adapted)

    def join(self, ledger):
        """Joins a saved ledger of weights that this optimizer trains in a new run.

        Args:
            ledger: `tfdpx.accounting.Ledger`.
        """
        self._settle()
        self._join(ledger)
        if not ledger.is_complete:
            mark_unknown(self.variables())
        self.renew()
        self.on_spent()
        _tell_others(self, self._trained)

    def ledger(self):
        """Returns all that was spent on the weights, a `tfdpx.accounting.Ledger`."""
        self._settle()
        for model in list(self._models):  # `Sequential.add` keeps the optimizer.
            if any(mark_of(variable) not in self._followed for variable in model.weights):
                self.follow(model)
        for account in _accounts_of(self._followed) - {self}:
            self._join(Ledger(account.entries()))
        is_complete = _is_complete(self._followed)
        self._warned = self._warned and not is_complete
        return Ledger(self.entries(), is_complete)

    def warn_of_unknown(self, spent=()):
        """Warns once if the ledger may lack a part of the privacy loss.

        Args:
            spent: Tuple of the `Entry`s that the plan counts as spent before.
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
    """The ledger of an optimizer in files of `tf.train.Checkpoint`.

    Args:
        optimizer: The tfdpx optimizer.
    """

    def __init__(self, optimizer):
        super().__init__()
        self._optimizer = weakref.ref(optimizer)

    def serialize(self):
        """Returns the ledger as JSON."""
        return self._optimizer().account.ledger().to_json()

    def deserialize(self, string_value):
        """Joins a saved ledger; TensorFlow calls it before it restores any variable."""
        if not isinstance(string_value, bytes):
            raise ValueError(saved.OF_0_2)
        account = self._optimizer().account
        ledger = Ledger.from_json(tf.compat.as_str(string_value))
        account.join(ledger)
        account.restored = layer_internals.checkpoint_of(self) if ledger.is_complete else None


def copy_weights(source: keras.Model | keras.Layer, target: keras.Model | keras.Layer) -> None:
    """Copies weights together with their account: epsilon stays known.

    `target.set_weights(source.get_weights())` copies arrays without it, so the ledger of `target`
    becomes incomplete.

    Args:
        source: A built model or layer.
        target: A built model or layer. Its weights have the same shapes, in the same order.

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


def arrays_of(ledger, adapted=()):
    """Returns a dict of the uint8 arrays by which a file of Keras has a ledger.

    Args:
        ledger: `tfdpx.accounting.Ledger`.
        adapted: Dict from names of layers to the digests of their statistics.
    """
    texts = {saved.LEDGER: ledger.to_json(), saved.ADAPTED: json.dumps(dict(adapted))}
    return {name: np.frombuffer(text.encode(), "uint8") for name, text in texts.items()}


def attach(ledger, variables):
    """Adds a ledger to the accounts of weights.

    Args:
        ledger: `tfdpx.accounting.Ledger` with entries that name their runs.
        variables: List of `keras.Variable`.
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
    """Returns whether the initial values of all variables were seen being made by initializers.

    Args:
        variables: List of `keras.Variable`.
    """
    return all(mark.is_known and mark.is_initialized for mark in map(mark_of, variables))


def pass_on(source, target):
    """Copies accounts and origin from weights to others that get their values.

    Args:
        source: List of `keras.Variable`.
        target: List of `keras.Variable`.
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
    """Returns all that was spent on weights, with or without an optimizer.

    Args:
        variables: List of `keras.Variable`.

    Returns:
        `tfdpx.accounting.Ledger`.
    """
    marks = [mark_of(variable) for variable in variables]
    spent = [Ledger(a.entries(), **a.defaults) for a in _accounts_of(marks)]
    return sum(spent, Ledger((), _is_complete(marks)))


def declare_statistics(layer, ledger):
    """Declares the cost of the present statistics of a layer.

    Args:
        layer: A `keras.Layer` with an `adapt`.
        ledger: `tfdpx.accounting.Ledger`; empty if they are public.
    """
    mark_of(layer).statistics = ledger, layer_internals.adapted_statistics(layer)


def ledger_of_statistics(layer):
    """Returns the declared `Ledger` of a layer's statistics; None without one or if they changed.

    Args:
        layer: A `keras.Layer`.
    """
    ledger, values = mark_of(layer).statistics or (None, None)
    if ledger is None:
        return None
    present = step_context.eagerly(layer_internals.adapted_statistics, layer)
    same = values is not None and present is not None
    same = same and all(np.array_equal(a, b) for a, b in zip(values, present, strict=True))
    return ledger if same else None


def _is_declared(layer):
    return ledger_of_statistics(layer) is not None


def _digest(layer):
    """Returns a string that identifies the present statistics of a layer with an `adapt`."""
    arrays = step_context.eagerly(layer_internals.adapted_statistics, layer) or ()
    text = "".join(f"{array.dtype}{array.shape}{array.tolist()}" for array in arrays)
    return hashlib.sha256(text.encode()).hexdigest()


def _accounts_of(marks):
    return set().union(*(mark.accounts for mark in marks))


def _is_complete(marks):
    return all(mark.is_known for mark in marks if mark.owner() is not None)


def _tell_others(account, marks):
    """Tells optimizers that follow weights of this account that more was spent on these."""
    for other in set().union(*(mark.followers for mark in marks)) - {account}:
        step_context.eagerly(other.on_spent)  # A plan's `spent` joins while a step is traced.


def _loading(model, arrays):
    return functools.partial(_loaded, model, arrays, saved.read(arrays))


def _loaded(model, arrays, ledger, known):
    if ledger is None:
        return
    mark_known(known)
    # All: a file does not tell which were trained; some may be frozen or hold LoRA.
    attach(ledger, model.weights)  # Makes them unknown again if it is incomplete.
    adapted = saved.adapted(arrays)
    for layer in layer_internals.flatten_layers(model):
        # The name is not enough: a layer may have been adapted without noise.
        if layer.name in adapted and adapted[layer.name] == _digest(layer):
            declare_statistics(layer, ledger)  # It has the releases.


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
