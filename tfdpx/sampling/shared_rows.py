"""The private fits of this process that share rows, and the epsilon that they have spent together.

Estimators count their fits here, because a ledger is about one `fit`. Rows are recognised by keyed
digests, which stay in memory like all counts: nothing is pickled or written to a file. Rows that a
step before the estimator changes differently in each fit are not recognised.

A search of scikit-learn is recognised by the lives of copies. It makes a copy of its estimator that
it does not use, copies this for one candidate after the other, and drops it at its end.
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

# Of one fit: the smallest digests. Fits on the same rows keep the same ones.
_MOST_ROWS = 20_000
# A sum is said again when its cost has grown this much, as from two fits to four.
_GROWTH = 1.9
_lock = threading.RLock()  # A search may end while the same thread counts a fit.


@dataclasses.dataclass(eq=False)
class _Fit:
    """A private fit, and the cost of the last sum with it that was said."""

    runs: tuple[accountants.Run, ...]
    delta: float
    said: float = 0.0

    def __post_init__(self):
        self.cost = math.fsum(  # About a squared mu of Gaussian differential privacy.
            steps * (noise**-2 if rate == 1 else accountants.typical_loss(noise, rate) ** 2)
            for noise, rate, steps in self.runs
        )


class _History(NamedTuple):
    """The fits of a row, each with the number of times that it has the row, and their cost."""

    cost: float = 0.0
    fits: tuple[tuple[_Fit, int], ...] = ()


class _Rows(dict[int, _History]):
    """A table from the digests of rows to their histories. Rows with the same fits share one."""

    def add(self, fit, rows):
        """Adds a fit to rows, a list of pairs of a digest and the number of times."""
        added: dict[tuple, _History] = {}
        for row, times in rows:
            cost, fits = old = self.get(row, _NEW)
            key = id(old), times
            if key not in added:
                added[key] = _History(cost + times**2 * fit.cost, (*fits, (fit, times)))
            self[row] = added[key]

    def histories(self, rows):
        """Returns the different histories of rows, the dearest first."""
        different = {id(self[row]): self[row] for row in rows}
        return sorted(different.values(), key=lambda history: -history.cost)


_NEW = _History()
_all_rows = _Rows()


def _is_news(history, growth=1.0):
    """Returns whether the cost of several fits has grown since it was said."""
    return len(history.fits) > 1 and history.cost > growth * max(f.said for f, _ in history.fits)


def _remember(history):
    """Records that a sum is said."""
    for fit, _ in history.fits:
        fit.said = history.cost


def _epsilon(history, growth=1.0, *, once=False):
    """Returns the epsilon of a row, which a fit may contain several times, and its delta.

    Noise counts as a sum of equal parts, one for each copy, as in `tfdpx.accounting.group_epsilon`.
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
    """Returns the epsilon for a row as text."""
    (total, delta), (if_once, _) = _epsilon(history), _epsilon(history, once=True)
    often = f" ({rounded_up(if_once)} if equal rows in one fit are different people)"
    return f"epsilon={rounded_up(total)} at delta={delta:g}" + often * (total > if_once)


class Copies:
    """The copies of an estimator and their fits.

    Attributes:
        role: "search" if the estimator is the base of a search, which tells the sum of all fits;
            "silent" if the caller does; otherwise "new", or "other" once it is in use.
    """

    def __init__(self, source: Any = lambda: None):
        self.source, self.role = source, "new"
        self.living: weakref.WeakSet = weakref.WeakSet()
        self.rows, self.has_sent = _Rows(), False

    def end(self) -> None:
        """Warns of the sum of a search, unless it has been said."""
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

    def _sum(self):
        near, every = (rows.histories(self.rows) for rows in (self.rows, _all_rows))
        times: dict[_Fit, int] = {}
        for fit, number in (pair for history in near for pair in history.fits):
            times[fit] = max(number, times.get(fit, 0))
        dearest = dict(near[0].fits)
        related = {fit for h in near if any(f in dearest for f, _ in h.fits) for fit, _ in h.fits}
        # A step of a pipeline may have changed the rows of the others, so these count as shared.
        others = tuple((fit, number) for fit, number in times.items() if fit not in related)
        cost = sum(number**2 * fit.cost for fit, number in others)
        search, total = (_History(h[0].cost + cost, h[0].fits + others) for h in (near, every))
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
    """Records that scikit-learn asked an estimator for more than a copy."""
    if copies_of(estimator).role == "new":
        copies_of(estimator).role = "other"


def on_clone(estimator: Any, copy: Any) -> None:
    """Records a copy by scikit-learn."""
    copies = copies_of(estimator)
    if copies.role == "new" and copies.source() is not None:
        copies.role = "search"
        weakref.finalize(estimator, copies.end)
    copies.living.add(copy)
    _copies[copy] = Copies(weakref.ref(estimator))


def on_pickle(estimator: Any) -> None:
    """Records that an estimator is pickled before its fit, as for another process."""
    for copies, _ in _above(estimator):
        copies.has_sent = True


def on_fit(estimator: Any, arrays: Sequence[np.ndarray], ledger: Ledger) -> None:
    """Counts a private fit. Outside of a search it warns of the sum with earlier fits.

    Args:
        estimator: The estimator.
        arrays: Arrays of all rows, for example one for each column.
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
            else:  # A search keeps no copy of its base.
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
    """Yields the `Copies` above an estimator that may be of a search, and its copy in them."""
    while (source := copies_of(estimator).source()) is not None:
        if copies_of(source).role in ("search", "silent"):
            yield copies_of(source), estimator
        estimator = source
