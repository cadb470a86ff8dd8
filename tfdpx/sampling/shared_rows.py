"""Counts private fits in this process that share rows, and warns about their joint epsilon.

The ledger of an estimator of `tfdpx.sklearn` covers only its last `fit`. So this module counts the
fits of all estimators in this process. Rows are recognised by keyed digests. Digests and counts
stay in memory: they are neither pickled nor written to a file. A row is not recognised if the steps
of a pipeline before the estimator change the row, and do so differently in each fit.

A search of scikit-learn, for example `GridSearchCV`, is recognised by the copies that it makes. It
makes one copy of its estimator, called the base, and never fits the base. Each candidate is a copy
of the base. When the search ends, it drops the base.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfdpx._warnings import warn
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.statement import rounded_up
from tfdpx.sampling.repeated_rows import row_digests

# Each fit stores at most this number of digests, the smallest ones. So two fits on the same rows
# store the same digests.
_MOST_ROWS = 20_000
# A warning is repeated when the cost has grown by this factor, for example from two fits to four.
_GROWTH = 1.9
_lock = threading.RLock()  # Reentrant: a search may end while its thread counts a fit.


@dataclasses.dataclass(eq=False)
class _Fit:
    """A private fit.

    Attributes:
        runs: Tuple of `accountants.Run`, the updates and releases of the fit.
        delta: Float, the delta of the fit.
        said: Float, the total cost of fits in the last warning that included this fit, or 0.
        cost: Float, the privacy cost, which adds up over fits.
    """

    runs: tuple[accountants.Run, ...]
    delta: float
    said: float = 0.0

    def __post_init__(self):
        self.cost = math.fsum(  # About the square of mu in Gaussian differential privacy.
            steps * (noise**-2 if rate == 1 else accountants.typical_loss(noise, rate) ** 2)
            for noise, rate, steps in self.runs
        )


class _History(NamedTuple):
    """The history of a row: pairs (fit, number of the row's copies in it), and their total cost."""

    cost: float = 0.0
    fits: tuple[tuple[_Fit, int], ...] = ()


class _Rows(dict[int, _History]):
    """A dict from digests of rows to `_History`. Rows of the same fits share one `_History`."""

    def add(self, fit, rows):
        """Adds a fit to the histories of its rows, a list of pairs (digest, number of copies)."""
        added: dict[tuple, _History] = {}
        for row, times in rows:
            cost, fits = old = self.get(row, _NEW)
            key = id(old), times
            if key not in added:
                added[key] = _History(cost + times**2 * fit.cost, (*fits, (fit, times)))
            self[row] = added[key]

    def histories(self, rows):
        """Returns the different histories of some rows, sorted by cost, the largest first."""
        different = {id(self[row]): self[row] for row in rows}
        return sorted(different.values(), key=lambda history: -history.cost)


_NEW = _History()
_all_rows = _Rows()


def _is_news(history, growth=1.0):
    """Returns whether the cost of a history exceeds `growth` times the cost in the last warning."""
    return len(history.fits) > 1 and history.cost > growth * max(f.said for f, _ in history.fits)


def _remember(history):
    """Records that a warning states the cost of a history."""
    for fit, _ in history.fits:
        fit.said = history.cost


def _epsilon(history, growth=1.0, *, once=False):
    """Returns the epsilon and the delta of a row over all fits of its history.

    If a fit contains several copies of the row, epsilon protects all copies together, as in
    `tfdpx.accounting.group_epsilon`. With `once=True`, each fit counts as if it contained one copy.
    The number of steps of all fits is multiplied by `growth`.
    """
    steps: dict[tuple[float, float], float] = collections.Counter()
    for fit, times in history.fits:
        times = 1 if once else times
        for noise, rate, number in fit.runs:
            steps[noise / math.sqrt(times), rate] += growth * times * number
    delta = max(fit.delta for fit, _ in history.fits)
    runs = tuple((*run, math.ceil(number)) for run, number in sorted(steps.items()))
    return accountants.composed_epsilon(runs, delta), delta


def _text(history):
    """Returns the epsilon and delta of a history as a string."""
    (total, delta), (if_once, _) = _epsilon(history), _epsilon(history, once=True)
    often = f" ({rounded_up(if_once)} if equal rows in one fit are different people)"
    return f"epsilon={rounded_up(total)} at delta={delta:g}" + often * (total > if_once)


class Copies:
    """Keeps track of the copies of an estimator, and of the fits of these copies.

    Attributes:
        role: String. "new" at first. "search" if the estimator is the base of a search: one warning
            at the end of the search then covers all fits. "silent" if the caller states the cost of
            all fits, so no warning is needed. Otherwise "other".
    """

    def __init__(self, source: Any = lambda: None):
        self.source, self.role = source, "new"
        self.living: weakref.WeakSet = weakref.WeakSet()
        self.rows, self.has_sent = _Rows(), False

    def end(self) -> None:
        """Warns about the epsilon of a whole search, unless an earlier warning has stated it."""
        with _lock:
            text = self._sum() if self.rows else ""
            if self.has_sent:
                text += "Copies were sent to other processes, which tell the sums of their fits. "
            if text:
                warn(
                    f"{text}The scores that a search chooses by are exact: no epsilon covers them. "
                    "Choose on public rows, or compare few settings with one ledger for all folds: "
                    "`tfdpx.sklearn.cross_validate(estimator, X, y)`."
                )

    def with_others(self) -> str:
        """Returns a string, the epsilon and delta of the search and of other fits on its rows.

        The string is empty if there are no other fits.
        """
        with _lock:
            _, _, search, total = self._totals()
            return _text(total) if total.cost > search.cost else ""

    def _totals(self):
        """Returns four values.

        1. The list of the histories of the search's rows, over all fits in this process.
        2. A dict from each fit of the search to the largest number of copies of a row.
        3. The `_History` of the row with the largest cost, over the fits of the search.
        4. As 3, over all fits in this process.
        """
        near, every = (rows.histories(self.rows) for rows in (self.rows, _all_rows))
        times: dict[_Fit, int] = {}
        for fit, number in (pair for history in near for pair in history.fits):
            times[fit] = max(number, times.get(fit, 0))
        dearest = dict(near[0].fits)
        related = {fit for h in near if any(f in dearest for f, _ in h.fits) for fit, _ in h.fits}
        # A step of a pipeline may have changed the rows in the other fits. So all fits of the
        # search count as fits of these rows.
        others = tuple((fit, number) for fit, number in times.items() if fit not in related)
        cost = sum(number**2 * fit.cost for fit, number in others)
        sums = (_History(h[0].cost + cost, h[0].fits + others) for h in (near, every))
        return every, times, *sums

    def _sum(self):
        every, times, search, total = self._totals()
        if not _is_news(total):
            return ""
        for history in (*every, total):
            _remember(history)
        with_others = f", and {_text(total)} with other fits on these rows"
        count = f"{len(times)} private fit{'s' * (len(times) > 1)}"
        with_others *= total.cost > search.cost
        return f"This search made {count}: together {_text(search)}{with_others}. "


_copies: weakref.WeakKeyDictionary[Any, Copies] = weakref.WeakKeyDictionary()


def copies_of(estimator: Any) -> Copies:
    """Returns the `Copies` of an estimator."""
    return _copies.setdefault(estimator, Copies())


def on_use(estimator: Any) -> None:
    """Records that an estimator is used other than by copying it, so it is no base of a search."""
    if copies_of(estimator).role == "new":
        copies_of(estimator).role = "other"


def on_clone(estimator: Any, copy: Any) -> None:
    """Records that scikit-learn made `copy` from an estimator."""
    copies = copies_of(estimator)
    if copies.role == "new" and copies.source() is not None:
        copies.role = "search"
        weakref.finalize(estimator, copies.end)
    copies.living.add(copy)
    _copies[copy] = Copies(weakref.ref(estimator))


def on_pickle(estimator: Any) -> None:
    """Records that an estimator was pickled before its fit, probably for another process."""
    for copies, _ in _above(estimator):
        copies.has_sent = True


def on_fit(estimator: Any, arrays: Sequence[np.ndarray], ledger: Ledger) -> None:
    """Counts a private fit. Outside of a search, warns if earlier fits used the same rows.

    Args:
        estimator: The estimator.
        arrays: Arrays that together hold all rows, for example one for each column.
        ledger: `tfdpx.accounting.Ledger` of the fit, with a delta.
    """
    arrays = np.unique(row_digests(arrays), return_counts=True)
    rows = list(zip(*(array[:_MOST_ROWS].tolist() for array in arrays), strict=True))
    fit, search = _Fit(ledger.runs, ledger.delta), None
    with _lock:
        _all_rows.add(fit, rows)
        for copies, copy in _above(estimator):
            if copies.role == "silent" or set(copies.living) == {copy}:
                search = copies
            else:  # Another copy still exists, so this is not a search.
                copies.role = "other"
                copies.rows.clear()
        history = _all_rows.histories(row for row, _ in rows)[0]
        if search is not None:
            search.rows.add(fit, rows)
        elif _is_news(history, _GROWTH):
            _remember(history)
            warn(
                f"{len(history.fits)} private fits share rows: together {_text(history)} so far, "
                "and no ledger adds them up. The next warning comes above "
                f"epsilon={rounded_up(_epsilon(history, _GROWTH)[0])}. A ledger of two fits: "
                "`first.ledger_ + second.ledger_`."
            )


def _above(estimator):
    """Yields pairs: the `Copies` of a source, and the copy that was made from this source.

    The source of an estimator is the estimator that it was copied from. The first pair is for the
    source of `estimator`, the second for the source of this source, and so on. Sources that cannot
    be the base of a search are left out.
    """
    while (source := copies_of(estimator).source()) is not None:
        if copies_of(source).role in ("search", "silent"):
            yield copies_of(source), estimator
        estimator = source
