"""What finished runs have spent on one data set together: one statement for all of them."""

import dataclasses
import io
import math
import os
import pathlib
import re
import textwrap
import zipfile
import zlib

import h5py
import numpy as np

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import Record
from tfdpx.accounting.samplings import Sampling
from tfdpx.accounting.spent import NOTHING, Spent
from tfdpx.accounting.statement import rounded_up
from tfdpx.run import ledger_rows
from tfdpx.train.config.errors import UserError

_UNFINISHED = "checkpoint"


@dataclasses.dataclass(frozen=True)
class Run:
    """A record, and the file that it was read from.

    Args:
        path: `pathlib.Path`.
        record: `Record`.
    """

    path: pathlib.Path
    record: Record

    @property
    def about(self):
        """String, a line on it."""
        record = self.record
        data = record.data.name if record.data else "data that the file does not name"
        what = record.results.get("model") or record.results.get("method") or "weights"
        entries = [(entry, "") for entry in record.spent.ledger.entries]
        entries += [
            (entry, f", the best of {each.mean_runs:g} runs on average")
            for each in record.spent.selected
            for entry in each.ledger.entries
        ]
        spent = "; ".join(
            f"{entry.steps} updates or releases at noise multiplier {entry.noise_multiplier:.4g} "
            f"and sampling probability {entry.sampling_probability or math.nan:.4g}{more}"
            for entry, more in entries
        )
        searched = ""
        if not record.is_search_paid:
            searched = f"; searched by {record.searched}, which no epsilon covers"
        return f"{record.program}, {what} on {data}, {record.sampling} sampling: {spent}{searched}"


def read(path):
    """The runs of a working folder, of all folders and `.keras` files in it, or of one file.

    Args:
        path: String: a folder, a `record.json`, a `.keras` file, or a file of `Ledger.save`.

    Returns:
        List of `Run`.

    Raises:
        UserError: If nothing there says what was spent, or a run is not finished.
    """
    path = pathlib.Path(path).expanduser()
    try:
        if path.is_file():
            return [Run(path, _of_file(path))]
        told, unfinished = _below(path)
        found = [Run(file, _of_file(file)) for file in told]
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"Received: --workdir={path}. {error}") from error
    for folder in unfinished:
        if folder.parent not in {file.parent for file in told if file.name == records.FILE}:
            raise UserError(
                f"The run in {folder.parent} is not finished, and only its checkpoint knows what it"
                " has spent: finish it with --resume, or restore its model and read "
                f"`model.optimizer.ledger`. Received: --workdir={path}."
            )
    if not found:
        raise UserError(
            f"Nothing in {path} says what was spent: it holds no {records.FILE}, and is neither a "
            f".keras file nor one of a ledger. Received: --workdir={path}. Name the folder of a "
            "finished run."
        )
    return found


def _below(path):
    """Files that tell of runs in a folder, links followed, and folders of checkpoints: sorted."""
    told, unfinished, walked = [], [], set()
    for parent, folders, names in os.walk(path, onerror=_refuse, followlinks=True):
        folder, there = pathlib.Path(parent), os.path.realpath(parent)
        if there in walked:  # A link that leads back.
            folders.clear()
            continue
        walked.add(there)
        unfinished += [folder / _UNFINISHED] * (_UNFINISHED in folders)
        folders[:] = [name for name in folders if name != _UNFINISHED]
        # The model of a run tells what its record does.
        own = "model.keras" if records.FILE in names else None
        told += [
            folder / name
            for name in names
            if name == records.FILE or (name.endswith(".keras") and name != own)
        ]
    return sorted(told), sorted(unfinished)


def _refuse(error):
    if not isinstance(error, FileNotFoundError):
        raise error


def _of_file(path):
    if path.suffix == ".keras":
        record = records.read(path)
        if record is not None:
            return record
        ledger = _ledger_in(path)
    elif path.name == records.FILE or b'"tfdpx.Record/' in path.read_bytes()[:100]:
        return records.read(path)
    else:
        ledger = Ledger.load(path)
    return Record("a file of a ledger", None, Spent(ledger), None)


def _ledger_in(path):
    """The `Ledger` that Keras saved with a private optimizer, read without Keras."""
    with zipfile.ZipFile(path) as archive:
        weights = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(weights) as file:
        saved = file.get("optimizer/vars", {})
        if ledger_rows.FACTS not in saved:
            raise ValueError(
                "The file holds neither the record of a run nor a private optimizer, so nobody "
                "knows what its weights have spent. Save the compiled model, with its optimizer."
            )
        facts, steps = (np.array(saved[name]) for name in (ledger_rows.FACTS, ledger_rows.STEPS))
    return ledger_rows.ledger(ledger_rows.read(facts, steps))


@dataclasses.dataclass(frozen=True)
class Total:
    """What several runs on the same data have spent together.

    Their Gaussian updates compose; the best of a random number of runs adds its own epsilon and
    delta. What several files tell of counts once. Where a run was shuffled, neighbours are those of
    shuffling for all: for Poisson samples and full batches an example that is emptied costs what
    one that is removed does.

    Args:
        runs: Tuple of `Run`.
        delta: Float for the updates, or None for that of the records.
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
            if len(deltas) > 1 or (not deltas and self.spent.ledger.entries and self._has_noise):
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
    def _has_noise(self):
        return all(entry.noise_multiplier for entry in self.spent.ledger.entries)

    @property
    def spent(self):
        """`Spent` of all, shuffled batches as they were drawn, and behind their weights."""
        found = [run.record for run in self.runs]
        data = [record.data for record in found if record.data]
        behind = [
            seen.spent
            for record in found
            for seen in record.seen
            if not record.counts(seen) and any(_share(seen.data, each) for each in data)
        ]
        return sum([*(record.judged_as_drawn() for record in found), *behind], NOTHING)

    @property
    def num_examples(self):
        """Int, or a list where the runs took different parts; None where no run says it."""
        known = {run.record.data.num_examples for run in self.runs if run.record.data} - {None}
        return sorted(known) if len(known) > 1 else next(iter(known), None)

    @property
    def neighbours(self):
        """Which data sets are neighbours."""
        return "zero_out" if self._is_shuffled else "add_or_remove_one"

    @property
    def _is_shuffled(self):
        return any(run.record.is_shuffled for run in self.runs)

    @property
    def is_approximate(self):
        """Bool: whether any batches were drawn in a way that no accountant here judges."""
        return any(
            not entry.exact
            for run in self.runs
            if not run.record.is_shuffled
            for entry in run.record.spent.ledger.entries
        )

    @property
    def epsilon(self):
        """Float, of all at the total delta.

        Raises:
            ValueError: If a sampling probability is unknown.
        """
        return self.spent.epsilon(self.delta)

    @property
    def _problems(self):
        """Why nothing of it is to be released, sentences."""
        spent = self.spent
        if spent.is_seeded:
            yield "A run had a seed that somebody chose, and who knows it can remove the noise."
        if not spent.is_complete:
            yield "Weights came from where no ledger could be seen: what they had spent is unknown."
        if not all(run.record.is_search_paid for run in self.runs):
            yield "Arguments were searched on the same data, which no epsilon covers."

    def record(self):
        """Dict of JSON values."""
        spent = self.epsilon
        try:
            by_rdp = self.spent.epsilon(self.delta, "rdp")
        except ValueError:  # It cannot resolve so small a loss.
            by_rdp = None
        return {
            "solved": "epsilon",
            "runs": len(self.runs),
            "dataset": next((run.record.data.name for run in self.runs if run.record.data), None),
            "num_examples": self.num_examples,
            "steps": self.spent.steps,
            "delta": self.spent.total_delta(self.delta),
            "epsilon": spent,
            "epsilon_pld": spent,
            "epsilon_rdp": by_rdp,
            "neighbours": self.neighbours,
            "epsilon_is_approximate": self.is_approximate,
            "releasable": spent < math.inf and not list(self._problems),
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
        if not self.spent.steps:
            problems = [f"Not releasable: {problem}" for problem in self._problems]
            return "\n".join([*lines, "", "No record tells of an update on these data.", *problems])
        about = "about " if self.is_approximate else ""
        lines += [
            "",
            f"All together are {about}({rounded_up(spent)}, "
            f"{self.spent.total_delta(self.delta):.6g})-differentially private under "
            f"{_NEIGHBOURS[self.neighbours]}: by privacy loss distributions of dp_accounting. The "
            "number of examples is public. What several of these files tell of counts once. Their "
            "digests find accidents and are no signature.",
        ]
        if self._is_shuffled:
            lines.append(f"For shuffled batches this is {Sampling('shuffle').about}.")
        if self.is_approximate:
            lines.append(
                "Some batches were not drawn by a plan, so nobody knows their sampling: they count "
                "as if they were Poisson samples, which no theorem covers."
            )
        if self.spent.selected:
            lines.append("The best of several runs adds its own epsilon and delta (RDP).")
        if any(run.record.data is None for run in self.runs):
            lines.append("A file names no data: what it tells of counts as if on the same.")
        lines += [f"Not releasable: {problem}" for problem in self._problems]
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
    "zero_out": "emptying the place of one example",
}
