"""What finished runs have spent on one data set together: one statement for all of them."""

import dataclasses
import math
import re
import textwrap

from tfdpx.accounting.groups import Sampling
from tfdpx.accounting.ledger import EXAMPLE, SELECTION, Ledger
from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import rounded_up
from tfdpx.train.errors import UserError


@dataclasses.dataclass(frozen=True)
class CombinedRuns:
    """What several runs on the same data have spent together.

    Their Gaussian updates compose; the best of a random number of runs adds its own epsilon and
    delta. What several files hold counts once. Where a run was shuffled, neighbours are those of
    shuffling for all: for Poisson samples and full batches an example that is emptied costs what
    one that is removed does.

    Args:
        runs: Tuple of `RecordedRun`.
        delta: Float for the updates, or None for the records' own.
        same_data: Bool, the user's word that all were on the same data.

    Raises:
        UserError: If the records are for different deltas or different data.
    """

    runs: tuple
    delta: float | None = None
    same_data: bool = False

    def __post_init__(self):
        deltas = {run.record.delta for run in self.runs} - {None}
        if self.delta is None:
            if len(deltas) > 1 or (not deltas and self._needs_delta):
                found = ", ".join(f"{delta:g}" for delta in sorted(deltas)) or "none"
                raise UserError(f"Give --delta: the runs have no one delta. Found: {found}.")
            object.__setattr__(self, "delta", next(iter(deltas), None))
        data = [run.record.data for run in self.runs if run.record.data]
        other = next((each for each in data if not _same(each, data[0])), None)
        if other is not None and not self.same_data:
            raise UserError(
                f"These runs are not of one data set: {data[0].name} and {other.name} "
                "have different identifiers. Give a statement for each; or, if the same people are "
                "in both, --same_data, which adds up what all have spent."
            )

    @property
    def _needs_delta(self):
        ledger = self.ledger
        return ledger.has_noise and any(e.kind != SELECTION for e in ledger.entries)

    @property
    def ledger(self):
        """`Ledger` of all, shuffled batches as they were drawn, and behind their weights."""
        found = [run.record for run in self.runs]
        data = [record.data for record in found if record.data]
        behind = [
            seen.ledger
            for record in found
            for seen in record.seen
            if not record.counts(seen) and any(_share(seen.data, each) for each in data)
        ]
        return sum([*(record.ledger_as_drawn() for record in found), *behind], Ledger())

    @property
    def num_examples(self):
        """Int, or a list where the runs took different parts; None where no run says it."""
        known = {run.record.data.num_examples for run in self.runs if run.record.data} - {None}
        return sorted(known) if len(known) > 1 else next(iter(known), None)

    @property
    def neighbours(self):
        """Which data sets are neighbours."""
        if self._is_shuffled:
            return "zero_out"
        of_users = self.ledger.unit != EXAMPLE
        return "add_or_remove_user" if of_users else "add_or_remove_one"

    @property
    def _is_shuffled(self):
        return any(run.record.is_shuffled for run in self.runs)

    @property
    def epsilon(self):
        """Float, of all at the total delta.

        Raises:
            ValueError: If a sampling probability is unknown.
        """
        return self.ledger.composed_epsilon(self.delta)

    @property
    def _problems(self):
        """Reasons not to release anything, each once."""
        together = Record("account", None, self.ledger, self.delta)
        records = [*(run.record for run in self.runs), together]
        return list(dict.fromkeys(problem for each in records for problem in each.problems))

    def record(self):
        """Dict of JSON values."""
        spent = self.epsilon
        try:
            by_rdp = self.ledger.composed_epsilon(self.delta, "rdp")
        except ValueError:  # It cannot resolve so small a loss.
            by_rdp = None
        return {
            "solved": "epsilon",
            "runs": len(self.runs),
            "dataset": next((run.record.data.name for run in self.runs if run.record.data), None),
            "num_examples": self.num_examples,
            "steps": self.ledger.steps,
            "delta": self.ledger.total_delta(self.delta),
            "epsilon": spent,
            "epsilon_pld": spent,
            "epsilon_rdp": by_rdp,
            "neighbours": self.neighbours,
            "epsilon_is_approximate": self.ledger.is_approximate,
            "releasable": spent < math.inf and not self._problems,
        }

    def statement(self):
        """The guarantee of all runs together, in words."""
        spent = self.epsilon
        lines = ["What was done to the data:"]
        lines += [f"- {run.path}: {run.about}." for run in self.runs]
        if spent == math.inf:
            return "\n".join(
                [*lines, "", "Without noise there is no privacy: epsilon is infinite."]
            )
        if not self.ledger.steps:
            problems = [f"Not releasable: {problem}." for problem in self._problems]
            return "\n".join([*lines, "", "No record has an update on these data.", *problems])
        about = "about " if self.ledger.is_approximate else ""
        lines += [
            "",
            f"All together are {about}({rounded_up(spent)}, "
            f"{self.ledger.total_delta(self.delta):.6g})-differentially private under "
            f"{_NEIGHBOURS[self.neighbours]}: by privacy loss distributions of dp_accounting. The "
            "number of examples is public. What several of these files tell of counts once. Their "
            "digests find accidents and are no signature.",
        ]
        if self._is_shuffled:
            lines.append(f"For shuffled batches this is {Sampling('shuffle').about}.")
        if self.ledger.is_approximate:
            lines.append(
                "Some batches were not drawn by a plan, so nobody knows their sampling: they count "
                "as if they were Poisson samples, which no theorem covers."
            )
        if self.ledger.selections:
            lines.append("The best of several runs adds its own epsilon and delta (RDP).")
        if any(run.record.data is None for run in self.runs):
            lines.append("A file names no data: its updates count as if on the same data.")
        lines += [f"Not releasable: {problem}." for problem in self._problems]
        return "\n".join(
            textwrap.fill(line, 88, subsequent_indent="  ", break_long_words=False)
            for line in lines
        )


def _same(one, other):
    """Whether two `Data` may share examples: parts of one public data set count as all of it."""
    if one.identifier is not None or other.identifier is not None:
        return one.identifier == other.identifier
    first, second = (re.split("[:/]", each.name)[0] for each in (one, other))
    return first == second


def _share(one, other):
    """Whether two `Data` may share examples, and parts of one data set each other's."""
    parts = [re.fullmatch(r".+:(\d+)-(\d+)", each.name) for each in (one, other)]
    first, second = ((int(part[1]), int(part[2])) if part else (0, math.inf) for part in parts)
    return _same(one, other) and first[0] <= second[1] and second[0] <= first[1]


_NEIGHBOURS = {
    "add_or_remove_one": "adding or removing one example",
    "add_or_remove_user": "adding or removing all examples of one person",
    "zero_out": "emptying the place of one example",
}
