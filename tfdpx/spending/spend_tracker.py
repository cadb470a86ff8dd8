"""The account follows the weights: what was spent on a model, whoever trained it.

Each optimizer keeps a table with a row for the updates of one run, noise and sampling. The table is
saved with the optimizer by Keras and `tf.train.Checkpoint`, and the step itself adds to it, so each
file is true. What a file or another optimizer says is joined row by row, and the larger
count stays. Whoever loads a table continues as a run of its own, and so does a forked process: so
rows of one number are the same updates, seen earlier and later, and all others compose.
"""

import collections
import itertools
import os
import secrets
import weakref

import numpy as np
import tensorflow as tf

from tfdpx._keras.variables import value_of
from tfdpx._keras.variables import variable as shared_variable
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import EXAMPLE
from tfdpx.spending import ledger_rows
from tfdpx.spending.ledger_rows import LedgerKey

# id of a keras.Variable, which cannot be hashed -> accounts of the optimizers that trained it, as
# long as the variable lives.
_accounts = collections.defaultdict(set)

# Part of the number of every run of this process.
_process = secrets.randbits(52)


def _begin_process():
    global _process
    _process = secrets.randbits(52)


os.register_at_fork(after_in_child=_begin_process)


class SpendTracker:
    """What was spent on the weights that one optimizer trains.

    Args:
        state: The optimizer's `tfdpx.training._state.StepState`.
        noise_multiplier: Float, the optimizer's.
        unit: "example" or "user", whom updates clip.

    Attributes:
        facts: `tf.Variable` float64 [rows, 5]: run, noise multiplier, sampling probability (0
            where it is unknown), whether the sampling is the accounted one and of people, and
            whether a seed was given. A negative noise multiplier marks a row of no updates.
        steps: `tf.Variable` int64 [rows]: updates. These two are to be saved.
    """

    def __init__(self, state, noise_multiplier, unit=EXAMPLE):
        facts, steps = ledger_rows.table({})
        self.facts, self.steps = shared_variable(facts, "float64"), shared_variable(steps, "int64")
        # The row that updates count in; nothing to save.
        self._row = shared_variable(0, "int64")
        self._state, self._noise_multiplier, self._unit = state, float(noise_multiplier), unit
        self._rows, self._open = {}, None  # LedgerKey -> updates
        self._runs = set()  # Numbers of the runs that this optimizer has made.
        self._merged = float(secrets.randbits(52) | 1)
        self._counted = self._updates_at_write = state.updates
        self._written = {}
        self._warned = set()  # Rows of unseen origin.
        self._variables = []  # Weak references: the weights must not outlive their model.
        self.renew()

    @property
    def run(self):
        """Int below 2**52: names the run under way in ledgers. It is no secret."""
        return (self._random ^ _process) | 1

    def renew(self, random=None):
        """What is spent from here on is another run's.

        Args:
            random: Int that all hosts share, or None.
        """
        self._random = secrets.randbits(52) if random is None else random % 2**52 ^ _process
        if self._open is not None:
            facts = self._open
            self.open(*_arguments(facts))

    def made(self, run):
        """Whether this optimizer has made the updates of a run, named by its number."""
        return run in self._runs

    def open(self, sampling_probability, exact, seeded):
        """From here on updates spend what such batches cost.

        Args:
            sampling_probability: Float in (0, 1], or None where it is unknown.
            exact: Bool, whether the batches are drawn as the accountant assumes.
            seeded: Bool, whether somebody has given the seed of draws or noise.

        Returns:
            The arguments of the last call, to go back to them; None at first.
        """
        last = self._open
        facts = LedgerKey(
            float(self.run),
            self._noise_multiplier,
            float(sampling_probability or 0.0),
            ledger_rows.sampling_of(exact, self._unit),
            float(seeded),
        )
        if facts != last:
            if last is not None:
                self._collect()
            self._open = facts
            self._runs.add(self.run)
            self._rows.setdefault(facts, 0)
            self._write()
        return last and _arguments(last)

    @property
    def sampling_probability(self):
        """Float: of the updates to come; None where it is unknown."""
        return self._open.sampling_probability or None

    def others(self):
        """Int: the updates that other optimizers of these weights have made."""
        return sum(a.updates for a in self._others())

    @property
    def updates(self):
        """Int: the updates that this optimizer has made."""
        return self._state.updates

    def _others(self):
        found = itertools.chain.from_iterable(_accounts.get(id(v()), ()) for v in self._variables)
        return list({id(a): a for a in found if a is not self}.values())

    def count_update(self):
        """Called by the private step, once an update: keeps what is saved up to date."""
        self.steps.assign_add(tf.one_hot(self._row, ledger_rows.SIZE, dtype=tf.int64))

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
        spent_by(self, variables)

    def ledger(self):
        """All that was spent on the weights, a `tfdpx.accounting.Ledger`."""
        self.synchronize()
        return ledger_rows.ledger(self._rows)

    def warn_of_unseen(self):
        """Warns, once, where weights came from where no ledger could be seen."""
        self.synchronize()
        found = ledger_rows.unseen(self._rows) - self._warned
        if found and self._noise_multiplier:
            self._warned |= found
            warn(
                "Weights of this model came from where no ledger could be seen: a file without "
                "one, `set_weights`, or training with an ordinary optimizer. So epsilon is a lower "
                "bound, and `ledger.is_complete` is False. If no private data are in these "
                "weights, say `tfdpx.checks.public(model)`; if they were trained privately, load "
                "the `.keras` file of that model."
            )

    def synchronize(self):
        """Joins what was loaded, restored, or spent by others, and writes the result down."""
        self._collect()
        self._write()

    def _collect(self):
        self._settle()
        since = self._state.updates - self._updates_at_write
        saved = ledger_rows.read(value_of(self.facts), value_of(self.steps))
        # What was written, and what updates have added to it, is nothing new.
        known = collections.Counter(self._written)
        known[self._open] += max(since, 0)
        self._join({f: n for f, n in saved.items() if n > known[f]})
        for account in self._others():
            self._join(account.rows())

    def join_saved(self, facts, steps):
        """Joins a saved table, whose weights this optimizer trains from here on as another run.

        Args:
            facts: float64 array [rows, 5], as the attribute.
            steps: int64 array [rows], as the attribute.

        Raises:
            ValueError: If it is no such table.
        """
        self._settle()
        self._join(ledger_rows.read(np.asarray(facts), np.asarray(steps)))
        self.renew()

    def rows(self):
        """Dict of what is known to be spent here: updates by their facts."""
        self._settle()
        return self._rows

    def _settle(self):
        """Counts the updates since the last call in the row that is open."""
        updates = self._state.updates
        if updates > self._counted:
            self._rows[self._open] += updates - self._counted
            self._counted = updates

    def _join(self, rows):
        for facts, updates in rows.items():
            self._rows[facts] = max(self._rows.get(facts, 0), updates)

    def _write(self):
        rows = {f: n for f, n in self._rows.items() if n or f == self._open}
        if len(rows) > ledger_rows.SIZE:
            rows = self._fewer(rows)
        if len(rows) > ledger_rows.SIZE:
            raise RuntimeError(
                f"The ledger of these weights has {len(rows)} different entries of noise and "
                f"sampling, and room for {ledger_rows.SIZE}. Train them with fewer different "
                "settings."
            )
        facts, steps = ledger_rows.table(rows)
        self._written, self._updates_at_write = rows, self._state.updates
        self.facts.assign(facts)
        self.steps.assign(steps)
        self._row.assign(list(rows).index(self._open))

    def _fewer(self, rows):
        """`rows` with those of other runs at the same noise and sampling put into one of its own.

        Whoever knows some of them by another file counts these once more: never less than spent.
        """
        merged = collections.Counter()
        for facts, updates in rows.items():
            if facts.noise_multiplier >= 0:
                is_open = facts.run == self._open.run
                merged[facts if is_open else facts._replace(run=self._merged)] += updates
        if ledger_rows.unseen(rows):
            # Of a new number: nobody has vouched for all of them.
            merged.update(ledger_rows.of_unseen())
        return dict(merged)


def _arguments(facts):
    """Those of `SpendTracker.open`."""
    exact = ledger_rows.is_exact(facts)
    return facts.sampling_probability or None, exact, bool(facts.seeded)


def accounts_of(variable):
    """Set of the accounts whose updates, or saved ledgers, are in a `keras.Variable`."""
    return _accounts.get(id(variable), set())


def spent_by(account, variables):
    """What was spent on these weights is in `account` too, from here on.

    Args:
        account: An `SpendTracker` or a `tfdpx.spending.origins.Saved`.
        variables: List of `keras.Variable`.
    """
    for variable in variables:
        if id(variable) not in _accounts:
            weakref.finalize(variable, _accounts.pop, id(variable), None)
        _accounts[id(variable)].add(account)


def trained_by(account):
    """Set of the ids of the live variables that `spent_by` was called with for `account`."""
    return {key for key, accounts in _accounts.items() if account in accounts}
