"""The rows that a ledger is kept in: one for the updates of one run, noise and sampling.

A row of no updates says that values came from where no ledger could be seen, and another one, of
the same number, that somebody has vouched for them. Such rows are joined, saved and passed on as
all others are, so a ledger stays incomplete wherever the weights go.
"""

import collections
import secrets

import numpy as np

from tfdpx.accounting.ledger import EXAMPLE, USER, Entry, Ledger

SIZE = 64  # Of a table, as it is saved.
FACTS, STEPS = "ledger_facts", "ledger_steps"  # Names of its two arrays in files.

# What distinguishes rows; a dict of rows has the updates by their facts.
LedgerKey = collections.namedtuple(
    "LedgerKey", "run noise_multiplier sampling_probability sampling seeded"
)
_EXACT, _USERS = 1, 2  # Bits of `sampling`.
COLUMNS = len(LedgerKey._fields)

# In the place of a noise multiplier, in rows of no updates.
_UNSEEN, _VOUCHED = -1.0, -2.0


def of(ledger):
    """The rows, a dict, of a `tfdpx.accounting.Ledger` whose entries name their runs."""
    rows = {} if ledger.is_complete else of_unseen()
    for entry in ledger.entries:
        probability = entry.sampling_probability or 0.0
        flags = sampling_of(entry.poisson_sampled, entry.unit), float(entry.seeded)
        facts = LedgerKey(float(entry.run), entry.noise_multiplier, probability, *flags)
        rows[facts] = entry.steps
    return rows


def ledger(rows):
    """The `tfdpx.accounting.Ledger` of rows, a dict."""
    entries = tuple(
        Entry(
            noise_multiplier=facts.noise_multiplier,
            sampling_probability=facts.sampling_probability or None,
            steps=updates,
            poisson_sampled=is_exact(facts),
            run=int(facts.run),
            seeded=bool(facts.seeded),
            unit=USER if int(facts.sampling) & _USERS else EXAMPLE,
        )
        for facts, updates in rows.items()
        if updates and facts.noise_multiplier >= 0
    )
    return Ledger(entries, is_complete=not unseen(rows))


def sampling_of(exact, unit):
    """Float: the `sampling` of a row, of the `exact` and the `unit` of an `Entry`."""
    return float(_EXACT * bool(exact) + _USERS * (unit == USER))


def is_exact(facts):
    """Bool: whether the batches of a row are drawn as the accountant assumes."""
    return bool(int(facts.sampling) & _EXACT)


def of_unseen():
    """The rows, a dict, that say once that values came from where no ledger could be seen."""
    return {LedgerKey(float(secrets.randbits(52) | 1), _UNSEEN, 0.0, 0.0, 0.0): 1}


def unseen(rows):
    """Set of the facts in `rows` of values of unseen origin that nobody has vouched for."""
    return {
        facts
        for facts in rows
        if facts.noise_multiplier == _UNSEEN
        and facts._replace(noise_multiplier=_VOUCHED) not in rows
    }


def vouch(rows):
    """Adds to `rows` that somebody vouches for all values of unseen origin in it."""
    rows.update({facts._replace(noise_multiplier=_VOUCHED): 1 for facts in unseen(rows)})


def table(rows):
    """The rows, at most `SIZE`, as two arrays: float64 [SIZE, COLUMNS] and int64 [SIZE]."""
    facts, steps = np.zeros([SIZE, COLUMNS]), np.zeros([SIZE], "int64")
    if rows:
        facts[: len(rows)], steps[: len(rows)] = list(rows), list(rows.values())
    return facts, steps


def read(facts, steps):
    """The rows, a dict, of a saved `table`.

    Raises:
        ValueError: If it is none.
    """
    if facts.shape == (SIZE, COLUMNS - 1):  # Before version 0.2 nobody kept whether it was seeded.
        facts = np.pad(facts, [(0, 0), (0, 1)])
    if facts.shape != (SIZE, COLUMNS) or steps.shape != (SIZE,):
        raise ValueError(
            f"A saved ledger has arrays of shapes {(SIZE, COLUMNS)} and {(SIZE,)}. Received: "
            f"{facts.shape} and {steps.shape}. The file is of another version of tfdpx."
        )
    rows = {}
    for fact, updates in zip(facts.tolist(), steps.tolist(), strict=True):
        if updates:
            fact = LedgerKey(*fact)
            known = fact.sampling in range(_EXACT + _USERS + 1)
            if not (known and updates > 0 and fact.run > 0 and 0 <= fact.sampling_probability <= 1):
                raise ValueError(
                    f"Not a row of a ledger: {updates} updates of {fact}. The file is damaged, or "
                    "something was assigned to the optimizer's ledger."
                )
            rows[fact] = max(updates, rows.get(fact, 0))
    return rows
