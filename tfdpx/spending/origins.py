"""Where weights come from: the ledgers that go with their values, and values that have none.

Whatever gives weights values and can be seen is: files, `get_weights` and `set_weights`, training
with an ordinary optimizer. Values whose ledger is known bring it along. All others make the
ledger incomplete, until somebody vouches for them. Fresh initial weights have nothing to bring.

What cannot be seen: `variable.assign`, a loop of one's own with an ordinary optimizer, and
`tf.train.Checkpoint` without the optimizer.
"""

import collections
import functools
import hashlib
import weakref

import keras
import numpy as np

from tfdpx._keras import hook
from tfdpx.spending import ledger_rows
from tfdpx.spending.spend_tracker import accounts_of, spent_by, trained_by

# id of an array that `get_weights` gave -> its `_Known`, as long as the array lives.
_given_out = {}

# A weak reference to the array, the digest of what was in it, the rows of the ledger of its weight
# at the time, and the rows of the scalars of the same call by digest: nothing refers weakly to a
# NumPy scalar.
_Known = collections.namedtuple("_Known", "array digest rows scalars")


class Saved:
    """What is known to be in values of weights, with no tfdpx optimizer to keep it.

    Args:
        rows: Dict of `tfdpx.spending.ledger_rows`.
    """

    updates = 0

    def __init__(self, rows):
        self._rows = dict(rows)

    def rows(self):
        """The rows, a dict, to read and to add to."""
        return self._rows

    def synchronize(self):
        """Nothing to do: no file holds it."""

    def put_on(self, variables):
        """Joins it to the ledger of these weights, in the place of what it holds already."""
        for variable in variables:
            for other in [a for a in accounts_of(variable) if isinstance(a, Saved)]:
                if other.is_covered_by(self):
                    accounts_of(variable).discard(other)
            spent_by(self, [variable])

    def is_covered_by(self, other):
        """Whether `other` says all that this does."""
        return all(other.rows().get(facts, 0) >= n for facts, n in self._rows.items())


class _Unseen(Saved):
    """That the present values of weights came from where no ledger could be seen."""

    def __init__(self):
        super().__init__(ledger_rows.of_unseen())

    def is_covered_by(self, other):
        """Whether the values are others now, of unseen origin too."""
        return isinstance(other, _Unseen) or super().is_covered_by(other)


def attach(ledger, variables):
    """Joins a ledger to whatever tfdpx optimizer these weights have now or later.

    Args:
        ledger: `tfdpx.accounting.Ledger` whose entries name their runs.
        variables: List of `keras.Variable`.
    """
    Saved(ledger_rows.of(ledger)).put_on(variables)


def pass_on(source, target):
    """What was spent on some variables was spent on others too, which get their values.

    Args:
        source: List of `keras.Variable`.
        target: List of `keras.Variable`, not yet in an optimizer.
    """
    for account in set().union(*map(accounts_of, source)):
        spent_by(account, target)


def vouch(layer):
    """Somebody vouches for the values of unseen origin in a layer or model, as they are now.

    Rows that may be of other weights too, since these came or were trained together with others,
    are left alone.

    Args:
        layer: A `keras.Layer`.
    """
    ids = {id(variable) for variable in layer.variables}
    for account in _accounts_in(layer):
        if trained_by(account) <= ids:
            ledger_rows.vouch(account.rows())
    _write_down(layer)


def _loaded(model, arrays):
    names = ledger_rows.FACTS, ledger_rows.STEPS
    if arrays is None or not all(name in arrays for name in names):
        _changed(model, model.weights)
    else:
        saved = Saved(ledger_rows.read(*(arrays[name] for name in names)))
        # All: a file does not say which trained; some may be frozen since, or hold merged LoRA.
        saved.put_on(model.variables)
        _write_down(model)


def _changed(layer, variables):
    if variables:
        _Unseen().put_on(variables)
    _write_down(layer)


def _write_down(layer):
    """Has `tf.train.Checkpoint` save what is new: it takes the tables as they are."""
    for account in _accounts_in(layer):
        account.synchronize()


def _accounts_in(layer):
    """Set of the accounts of a layer's weights, and of its optimizer if it is a private one."""
    own = getattr(getattr(layer, "optimizer", None), "spend_tracker", None)
    return set().union(*map(accounts_of, layer.variables), {own} - {None})


def got(layer, arrays):
    """Remembers what was spent on arrays that hold the weights of a layer.

    Args:
        layer: `keras.Layer`, whose ledger covers them.
        arrays: List of arrays, in the order of `layer.weights`.
    """
    snapshots, scalars = {}, {}  # Most weights of a model have the same accounts.
    for variable, array in zip(layer.weights, arrays, strict=True):
        accounts = frozenset(accounts_of(variable))
        if accounts not in snapshots:
            snapshots[accounts] = _joined(accounts)
        if isinstance(array, np.ndarray):
            alive = weakref.ref(array, functools.partial(_forget, id(array)))
            known = _Known(alive, _digest(array), snapshots[accounts], scalars)
            _given_out[id(array)] = known
        else:
            scalars[_digest(array)] = snapshots[accounts]


def _forget(key, _):
    _given_out.pop(key, None)


def _put(layer, values):
    unseen, known = [], {}  # Weights by the id of the rows that go with their values.
    for variable, rows in zip(layer.weights, _rows_with(values), strict=True):
        if rows is None:
            unseen.append(variable)
        elif not Saved(rows).is_covered_by(Saved(_joined(accounts_of(variable)))):
            known.setdefault(id(rows), (rows, []))[1].append(variable)
    for rows, variables in known.values():
        Saved(rows).put_on(variables)
    _changed(layer, unseen)


def _replaced(old, new):
    known = {id(variable) for variable in old}
    pass_on(old, [variable for variable in new if id(variable) not in known])


def _rows_with(values):
    """For each value that `set_weights` took the rows that go with it; None if it is unknown."""
    found = [_given_out.get(id(value)) for value in values]
    found = [
        known if known and known.digest == _digest(value) else None
        for known, value in zip(found, values, strict=True)
    ]
    scalars = {}
    for known in filter(None, found):
        scalars.update(known.scalars)
    for known, value in zip(found, values, strict=True):
        if isinstance(value, keras.Variable):
            yield _joined(accounts_of(value))
        elif isinstance(value, np.generic):
            yield scalars.get(_digest(value))
        else:
            yield known and known.rows


def _joined(accounts):
    rows = {}
    for account in accounts:
        for facts, updates in account.rows().items():
            rows[facts] = max(updates, rows.get(facts, 0))
    return rows


def _digest(array):
    # The fastest of `hashlib`: whoever wants to deceive need not look for two arrays of one digest.
    content = np.ascontiguousarray(array).reshape(-1).view("uint8")
    return hashlib.sha1(content, usedforsecurity=False).digest()


hook.watch_weights(loaded=_loaded, changed=_changed, got=got, put=_put, replaced=_replaced)
