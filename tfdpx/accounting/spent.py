"""What was spent on which data set, by one run or by several."""

from __future__ import annotations

import dataclasses
import math
import secrets
from typing import cast

from tfdpx.accounting import selection
from tfdpx.accounting.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class Data:
    """Which data set was trained on; nothing that follows from what its examples hold.

    Args:
        name: String, for people; no path.
        num_examples: Optional int.
        identifier: Random string that is kept with the data, or None: a public name says it all.
    """

    name: str
    num_examples: int | None = None
    identifier: str | None = None


@dataclasses.dataclass(frozen=True)
class Selected:
    """The best of a random number of private runs, paid for (`tfdpx.accounting.selection`).

    Args:
        ledger: `Ledger` of what each run released, its noisy score included.
        mean_runs: Float > 1.
        delta: Float in (0, 1).
        run: Int that names it, so that it counts once however many files hold it.
    """

    ledger: Ledger
    mean_runs: float
    delta: float
    run: int = dataclasses.field(default_factory=lambda: secrets.randbits(52) | 1)

    @property
    def epsilon(self) -> float:
        """Float, at `delta`."""
        return selection.selection_epsilon(self.ledger.entries, self.delta, self.mean_runs)

    @property
    def about(self) -> str:
        """A sentence on what was released, and what it cost."""
        releases = " and ".join(
            f"{entry.steps} updates or releases at noise_multiplier = {entry.noise_multiplier:.6g} "
            f"and sampling_probability = {entry.sampling_probability:.6g}"
            for entry in self.ledger.entries
        )
        return (
            f"The best of a random number of runs, {self.mean_runs:g} on average, each of "
            f"{releases}: epsilon {self.epsilon:.6g} at delta {self.delta:g} for all of them."
        )


@dataclasses.dataclass(frozen=True)
class Spent:
    """What was spent on one data set.

    Args:
        ledger: `Ledger` of noisy updates and releases, whose losses compose.
        selected: Tuple of `Selected`. Each adds its epsilon and its delta to the others'.
    """

    ledger: Ledger = Ledger()
    selected: tuple[Selected, ...] = ()

    def __add__(self, other: Spent) -> Spent:
        """Both on the same data; what both hold counts once."""
        return Spent(
            self.ledger + other.ledger, tuple(dict.fromkeys(self.selected + other.selected))
        )

    def epsilon(self, delta: float | None, accountant: str = "pld") -> float:
        """Epsilon at `total_delta(delta)`, under adding or removing one example.

        Args:
            delta: Float in (0, 1), for the ledger; None if it is empty or has no noise.
            accountant: As of `Ledger.epsilon`, for the ledger.
        """
        if any(entry.noise_multiplier == 0 for entry in self.ledger.entries):
            return math.inf
        spent = float(sum(each.epsilon for each in self.selected))
        if not self.ledger.entries:
            return spent
        return self.ledger.composed_epsilon(cast(float, delta), accountant) + spent

    def total_delta(self, delta: float | None) -> float | None:
        """Float, or None where nothing has a delta."""
        parts = [each.delta for each in self.selected]
        if delta is not None and (self.ledger.entries or not parts):
            parts.append(delta)
        return sum(parts) if parts else None

    @property
    def steps(self) -> int:
        """Int: noisy updates and releases; of a selection, those of one run."""
        return self.ledger.steps + sum(each.ledger.steps for each in self.selected)

    @property
    def is_seeded(self) -> bool:
        """Whether somebody has given the seed of draws or noise."""
        return any(ledger.is_seeded for ledger in self._ledgers)

    @property
    def is_complete(self) -> bool:
        """Whether all that was spent is known."""
        return all(ledger.is_complete for ledger in self._ledgers)

    @property
    def _ledgers(self) -> list[Ledger]:
        return [self.ledger, *(each.ledger for each in self.selected)]


NOTHING = Spent()


@dataclasses.dataclass(frozen=True)
class Seen:
    """A training behind weights or features that a run started from.

    Args:
        data: `Data` that it was on.
        spent: `Spent` on these; an entry without noise where nothing was private.
        delta: Float in (0, 1) that its own record names, or None.
    """

    data: Data
    spent: Spent
    delta: float | None = None

    @property
    def epsilon(self) -> float:
        """Float, at `delta`."""
        return self.spent.epsilon(self.delta)
