"""The account follows the weights: what was spent on a model, whoever trained it.

Each optimizer keeps a table with a row for the updates of one run, noise and sampling. The table is
saved with the optimizer by Keras and `tf.train.Checkpoint`, and the step itself adds to it, so each
file tells the truth. But a user may assign to variables. So an optimizer's own rows are counted
apart, by its `Run`; what a file or another optimizer says is joined row by row, and the larger
count stays. Nothing that is assigned or loaded lowers the account.
"""

import collections
import itertools
import secrets
import weakref

import numpy as np
import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.run.state import value_of
from tfdpx.run.state import variable as shared_variable

_ROWS = 64

# id of a keras.Variable, which cannot be hashed -> accounts of the optimizers that trained it, as
# long as the variable lives.
_accounts = collections.defaultdict(set)

# What tells one row from another.
_Facts = collections.namedtuple("_Facts", "run noise_multiplier sampling_probability exact")


class Account:
    """What was spent on the weights that one optimizer trains.

    Args:
        run: The optimizer's `tfdpx.run.state.Run`.
        noise_multiplier: Float, the optimizer's.

    Attributes:
        facts: `tf.Variable` float64 [rows, 4]: run, noise multiplier, sampling probability (0
            where it is unknown), and whether the sampling is the accounted one.
        steps: `tf.Variable` int64 [rows]: updates. These two are to be saved.
    """

    def __init__(self, run, noise_multiplier):
        self.facts = shared_variable(np.zeros([_ROWS, 4]), "float64")
        self.steps = shared_variable(np.zeros([_ROWS]), "int64")
        # The row that updates count in; nothing to save.
        self._row = shared_variable(0, "int64")
        self._run, self._noise_multiplier = run, float(noise_multiplier)
        self._own, self._other = {}, {}  # _Facts -> updates
        self._open = None
        self._counted = run.updates
        self._most = {}  # Number of a run -> the updates that it was seen to make
        self._merged = float(secrets.randbits(52) | 1)
        self._written, self._updates_at_write = {}, run.updates
        self._variables = []  # Weak references: the weights must not outlive their model.

    @property
    def sampling_probability(self):
        """Float: that of the updates to come; None where it is unknown."""
        return self._open.sampling_probability or None

    @property
    def repeated(self):
        """Int: updates ahead that the run has made before, and that are not counted again."""
        return max(0, self._counted - self._run.updates)

    def open(self, sampling_probability, exact):
        """From here on updates spend what such batches cost.

        Args:
            sampling_probability: Float in (0, 1], or None where it is unknown.
            exact: Bool, whether the batches are drawn as the accountant assumes.

        Returns:
            The arguments of the last call, to go back to them; None at first.
        """
        before = self._open and (self._open.sampling_probability or None, bool(self._open.exact))
        facts = _Facts(
            float(self._run.number),
            self._noise_multiplier,
            float(sampling_probability or 0.0),
            float(exact),
        )
        if facts != self._open:
            self._settle()
            self._open = facts
            self._own.setdefault(facts, 0)
            self._write()
        return before

    def count_update(self):
        """Called by the private step, once an update: keeps what is saved up to date."""
        self.steps.assign_add(tf.one_hot(self._row, _ROWS, dtype=tf.int64))

    def follow(self, variables):
        """Joins what was spent on any of these weights, by whichever optimizer, now and later.

        Args:
            variables: List of `keras.Variable`.
        """
        known = {id(v()) for v in self._variables}
        self._variables += [weakref.ref(v) for v in variables if id(v) not in known]

    def variables(self):
        """List of the `keras.Variable`s that are followed and alive."""
        return [v() for v in self._variables if v() is not None]

    def trains(self, variables):
        """Tells other accounts that what is spent here is spent on these weights.

        Args:
            variables: List of `keras.Variable`, those that updates change.
        """
        _spent_by(self, variables)

    def ledger(self):
        """All that was spent on the weights, a `tfdpx.accounting.Ledger`."""
        self.synchronize()
        return Ledger(
            tuple(
                Entry(
                    noise_multiplier=facts.noise_multiplier,
                    sampling_probability=facts.sampling_probability or None,
                    steps=updates,
                    exact=bool(facts.exact),
                    run=int(facts.run),
                )
                for facts, updates in self._rows()
            )
        )

    def synchronize(self):
        """Joins what was loaded, assigned, or spent by others, and writes the result down.

        Returns:
            Bool: whether the table has more updates of this very run than it has made here. Then
            the weights are those of a later state of it, restored by `tf.train.Checkpoint`.
        """
        self._settle()
        since = self._run.updates - self._updates_at_write
        saved = _table(value_of(self.facts), value_of(self.steps))
        # What was written, and what updates have added to it, is nothing new.
        new = {f: n for f, n in saved.items() if n > self._written.get(f, 0) + max(since, 0)}
        self._join(new)
        others = itertools.chain.from_iterable(_accounts.get(id(v()), ()) for v in self._variables)
        for account in {id(a): a for a in others if a is not self}.values():
            account._settle()
            self._join({**account._other, **account._own})
            self._run.learn(account._run)
        self._write()
        return any(facts.run == self._run.number for facts in new)

    def join_saved(self, facts, steps):
        """Joins a saved table.

        Args:
            facts: float64 array [rows, 4], as the attribute.
            steps: int64 array [rows], as the attribute.

        Raises:
            ValueError: If it is no such table.
        """
        self._settle()
        self._join(_table(np.asarray(facts), np.asarray(steps)))
        self._write()

    def move(self):
        """Called once the run has become another: what it spends is counted from here on."""
        number = float(self._run.number)
        self._most[self._open.run] = self._counted
        rows = {**self._other, **self._own}
        self._own = {f: n for f, n in rows.items() if f.run == number}
        self._other = {f: n for f, n in rows.items() if f.run != number and n}
        # Steps that a run takes again, with the same draws and noise, cost nothing.
        self._counted = max(self._run.updates, self._most.get(number, 0))
        probability, exact = self._open.sampling_probability, self._open.exact
        self._open = None
        self.open(probability or None, exact)

    def _settle(self):
        """Counts the updates since the last call in the row that is open."""
        updates = self._run.updates
        if updates > self._counted:
            self._own[self._open] += updates - self._counted
            self._counted = updates

    def _join(self, rows):
        for facts, updates in rows.items():
            mine = self._own if facts in self._own else self._other
            mine[facts] = max(mine.get(facts, 0), updates)

    def _rows(self):
        return [(f, n) for f, n in {**self._own, **self._other}.items() if n]

    def _write(self):
        rows = {**self._own, **self._other}
        if len(rows) > _ROWS:
            rows = {**self._own, **self._merge(self._other)}
        if len(rows) > _ROWS:
            raise RuntimeError(
                f"The ledger of these weights has {len(rows)} different entries of noise and "
                f"sampling, and room for {_ROWS}. Train them with fewer different settings."
            )
        facts, steps = np.zeros([_ROWS, 4]), np.zeros([_ROWS], "int64")
        facts[: len(rows)], steps[: len(rows)] = list(rows), list(rows.values())
        self._written, self._updates_at_write = rows, self._run.updates
        self.facts.assign(facts)
        self.steps.assign(steps)
        self._row.assign(list(rows).index(self._open))

    def _merge(self, rows):
        """`rows` with those of different runs at the same noise and sampling put into one."""
        merged = collections.Counter()
        for facts, updates in rows.items():
            merged[facts._replace(run=self._merged)] += updates
        return merged


def pass_on(source, target):
    """What was spent on some variables was spent on others too, which get their values.

    Args:
        source: List of `keras.Variable`.
        target: List of `keras.Variable`, not yet in an optimizer.
    """
    for account in set().union(*(_accounts.get(id(variable), ()) for variable in source)):
        _spent_by(account, target)


class _Saved:
    """What a file or a ledger says was spent on weights with no tfdpx optimizer to take it."""

    def __init__(self, rows):
        self._own, self._other, self._run = {}, rows, None

    def _settle(self):
        pass


FACTS, STEPS = "ledger_facts", "ledger_steps"  # Names in files.


def _keep_saved(model, arrays):
    """Joins a saved ledger to whatever tfdpx optimizer the model has now or later."""
    if FACTS in arrays and STEPS in arrays:
        saved = _Saved(_table(arrays[FACTS], arrays[STEPS]))
        _spent_by(saved, model.trainable_variables or model.variables)


keras_hook.on_saved_optimizer(_keep_saved)


def attach(ledger, variables):
    """Joins a ledger to whatever tfdpx optimizer these weights have now or later.

    Args:
        ledger: `tfdpx.accounting.Ledger` whose entries name their runs.
        variables: List of `keras.Variable`.
    """
    rows = {
        _Facts(
            float(entry.run),
            entry.noise_multiplier,
            entry.sampling_probability or 0.0,
            float(entry.exact),
        ): entry.steps
        for entry in ledger.entries
    }
    _spent_by(_Saved(rows), variables)


def _spent_by(account, variables):
    for variable in variables:
        if id(variable) not in _accounts:
            weakref.finalize(variable, _accounts.pop, id(variable), None)
        _accounts[id(variable)].add(account)


def _table(facts, steps):
    """`{_Facts: updates}` of a saved table.

    Raises:
        ValueError: If it is none.
    """
    if facts.shape != (_ROWS, 4) or steps.shape != (_ROWS,):
        raise ValueError(
            f"A saved ledger has arrays of shapes {(_ROWS, 4)} and {(_ROWS,)}. Received: "
            f"{facts.shape} and {steps.shape}. The file is of another version of tfdpx."
        )
    rows = {}
    for fact, updates in zip(facts.tolist(), steps.tolist(), strict=True):
        if updates:
            fact = _Facts(*fact)
            if not (updates > 0 and fact.run > 0 and 0 <= fact.sampling_probability <= 1):
                raise ValueError(
                    f"Not a row of a ledger: {updates} updates of {fact}. The file is damaged, or "
                    "something was assigned to the optimizer's ledger."
                )
            rows[fact] = max(updates, rows.get(fact, 0))
    return rows
