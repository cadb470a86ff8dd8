"""The private fits of this process that share rows, and the epsilon that they have spent together.

Estimators count their fits here, because each `fit` has a ledger of its own. Rows are recognised by
keyed digests, which stay in memory like all counts: nothing is pickled or written to a file. Rows
that a step before the estimator changes differently in each fit are not recognised.

A search of scikit-learn is recognised by the lives of copies. It makes a copy of its estimator that
it does not use, copies this for one candidate after the other, and drops it at its end.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tfdpx._warnings import warn
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.statement import rounded_up
from tfdpx.sampling.repeated_rows import row_digests

# Of one fit: those with the smallest digests, so that fits on the same rows keep the same ones.
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

    fits: tuple[tuple[_Fit, int], ...] = ()
    cost: float = 0.0
    cost_if_once: float = 0.0


class _Rows(dict[int, _History]):
    """A table from the digests of rows to their histories. Rows with the same fits share one."""

    def add(self, fit, rows):
        """Adds a fit to rows, a list of pairs of a digest and the number of times."""
        added: dict[tuple, _History] = {}
        for row, times in rows:
            old = self.get(row, _NEW)
            key = id(old), times
            if key not in added:
                costs = old.cost + times**2 * fit.cost, old.cost_if_once + fit.cost
                added[key] = _History((*old.fits, (fit, times)), *costs)
            self[row] = added[key]

    def histories(self, rows: Iterable[int]) -> list[_History]:
        """Returns the different histories of rows."""
        return list({id(self[row]): self[row] for row in rows}.values())


_NEW = _History()
_all_rows = _Rows()


class Search:
    """The fits of copies of one estimator, which are added up at its end.

    Args:
        is_told: Bool, whether the caller tells the sum.
    """

    def __init__(self, is_told: bool = False):
        self.is_told = is_told
        self.copies: weakref.WeakSet = weakref.WeakSet()
        self.has_sent = False  # Whether a copy was pickled, as for another process.
        self.rows = _Rows()

    def end(self) -> None:
        """Warns of the sum, unless it has been said."""
        with _lock:
            text = self._sum() if self.rows else ""
            if self.has_sent:
                text += (
                    "Copies of the estimator were sent to other processes. Nothing here counts "
                    "their fits; each process prints its own sum. "
                )
            if text:
                warn(
                    f"{text}The scores that a search chooses by are exact: no epsilon covers them. "
                    "Choose on public rows, or compare few settings by "
                    "`tfdpx.sklearn.cross_validate`, which has one ledger for all folds."
                )

    def _sum(self):
        own = self.rows.histories(self.rows)
        times: dict[_Fit, int] = collections.defaultdict(int)
        for fit, number in (pair for history in own for pair in history.fits):
            times[fit] = max(times[fit], number)
        dearest = dict(max(own, key=operator.attrgetter("cost")).fits)
        related = {fit for h in own if any(f in dearest for f, _ in h.fits) for fit, _ in h.fits}
        # A step of a pipeline may have changed the rows of the others, so these count as shared.
        others = tuple((fit, number) for fit, number in times.items() if fit not in related)
        fits = _Sum(_all_rows.histories(self.rows), others)
        if not fits.is_news(1.0, times):
            return ""
        of_search, count = _Sum(own, others), len(times)
        others_too = f", and {fits} with other fits on these rows" * (fits.cost > of_search.cost)
        made = f"This search made {count} private fit{'s' * (count > 1)}"
        return f"{made}: together {of_search}{others_too}. "


class _Sum:
    """The sum of the fits of the dearest row.

    Args:
        histories: List of `_History`.
        others: Further pairs of a fit and a number of times.
    """

    def __init__(self, histories, others=()):
        self._most, self._widest = (
            max(histories, key=operator.attrgetter(cost)).fits + others
            for cost in ("cost", "cost_if_once")
        )
        self.fits = {fit for fit, _ in self._most + self._widest}
        self.cost = sum(times**2 * fit.cost for fit, times in self._most)
        self._delta = max(fit.delta for fit in self.fits)

    def is_news(self, growth, others=()):
        """Returns whether it has grown since it was said, and is now."""
        said = growth * max(fit.said for fit in self.fits)
        if len(self.fits) < 2 or self.cost <= said:
            return False
        for fit in self.fits.union(others):
            fit.said = self.cost
        return True

    def epsilon(self, growth=1.0):
        """Returns the epsilon, or that of a cost that has grown."""
        return _epsilon(self._most, self._delta, growth)

    def __str__(self):
        total = self.epsilon()
        if_once = _epsilon([(fit, 1) for fit, _ in self._widest], self._delta, 1.0)
        text = f"epsilon={rounded_up(total)} at delta={self._delta:g}"
        if total > if_once:
            text += f" ({rounded_up(if_once)} if equal rows in one fit are different people)"
        return text


def _epsilon(fits, delta, growth):
    """Returns the epsilon of fits for a row that each has a number of times.

    Noise is a sum of equal parts, one for each time, as in `tfdpx.accounting.group_epsilon`.
    """
    runs: dict[tuple[float, float], int] = collections.Counter()
    for fit, times in fits:
        for noise, rate, steps in fit.runs:
            runs[noise / math.sqrt(times), rate] += times * steps
    grown = ((*run, math.ceil(growth * number)) for run, number in sorted(runs.items()))
    return accountants.composed_epsilon(tuple(grown), delta)


@dataclasses.dataclass
class Lineage:
    """The origin of an estimator, and the search whose fits its copies make.

    Attributes:
        source: Returns the estimator that it was cloned from, or None.
        is_used: Bool, whether it was asked for anything but copies.
        search: A `Search`, or None.
    """

    source: Callable[[], Any] = lambda: None
    is_used: bool = False
    search: Search | None = None


_lineages: weakref.WeakKeyDictionary[Any, Lineage] = weakref.WeakKeyDictionary()


def lineage_of(estimator: Any) -> Lineage:
    """Returns the `Lineage` of an estimator."""
    return _lineages.setdefault(estimator, Lineage())


def on_clone(source: Any, copy: Any) -> None:
    """Records that scikit-learn cloned an estimator."""
    lineage = lineage_of(source)
    if lineage.search is None and not lineage.is_used and lineage.source() is not None:
        lineage.search = Search()
        weakref.finalize(source, lineage.search.end)
    if lineage.search is not None:
        lineage.search.copies.add(copy)
    _lineages[copy] = Lineage(weakref.ref(source))


def on_pickle(estimator: Any) -> None:
    """Records that an estimator was pickled before its fit."""
    for lineage, _ in _searches_of(estimator):
        lineage.search.has_sent = True


def on_fit(estimator: Any, x: np.ndarray, ledger: Ledger) -> None:
    """Counts a private fit. Outside of a search it warns of the sum with earlier fits.

    Args:
        estimator: The estimator.
        x: Array of all rows.
        ledger: `tfdpx.accounting.Ledger` of the fit, with a delta.
    """
    digests, times = np.unique(row_digests([x]), return_counts=True)
    digests, times = digests[:_MOST_ROWS].tolist(), times[:_MOST_ROWS].tolist()
    rows = list(zip(digests, times, strict=True))
    fit = _Fit(ledger.runs, ledger.delta)
    with _lock:
        _all_rows.add(fit, rows)
        search = None
        for lineage, copy in _searches_of(estimator):
            if lineage.search.is_told or set(lineage.search.copies) == {copy}:
                search = lineage.search
            else:  # A search does not keep copies of its base, so this is no search.
                lineage.search.rows.clear()
                lineage.search, lineage.is_used = None, True
        if search is not None:
            search.rows.add(fit, rows)
            return
        fits = _Sum(_all_rows.histories(digests))
        if fits.is_news(_GROWTH):
            warn(
                f"{len(fits.fits)} private fits share rows: together {fits} so far, and no ledger "
                "adds them up. The next warning comes above "
                f"epsilon={rounded_up(fits.epsilon(_GROWTH))}."
            )


def _searches_of(estimator) -> Iterator[tuple[Any, Any]]:
    """Yields the lineages with a search above an estimator, and the copy that leads to it."""
    copy = estimator
    while (source := lineage_of(copy).source()) is not None:
        if lineage_of(source).search is not None:
            yield lineage_of(source), copy
        copy = source
