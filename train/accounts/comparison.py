"""Finished runs side by side: the settings that differ, accuracy and epsilon."""

import dataclasses
import pathlib

from rich import console, table
from rich.text import Text

from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record, plain
from tfdpx.train.config.errors import UserError
from tfdpx.train.report.record import readable

_MEASURED = ("test", "validation")
# Of results that have the name of a setting.
_LABELS = {"epsilon": "epsilon spent", "steps": "updates made"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, as it is to be compared.

    Args:
        name: String, by which it differs from the others: the end of its path.
        record: `Record`.
        delta: Float in (0, 1) for its ledger, or None for its own.
    """

    name: str
    record: Record
    delta: float | None = None

    @property
    def settings(self):
        """Dict of JSON values: what was asked for."""
        data = self.record.data
        given = {name: plain(value) for name, value in self.record.settings.items()}
        return {"program": self.record.program, "dataset": data and data.name, **given}

    @property
    def results(self):
        """Dict of JSON values: what came of it. `accuracy` is None where none was measured."""
        record, told = self.record, self.record.results
        measured = [n for n in _MEASURED if told.get(f"{n}_accuracy") is not None]
        measured_on = measured[0] if measured else None
        delta = record.delta if self.delta is None else self.delta
        return plain(
            {
                "accuracy": told.get(f"{measured_on}_accuracy"),
                "measured_on": measured_on,
                "epsilon": record.spent.epsilon(delta, record.accountant),
                "delta": record.spent.total_delta(delta),
                "accountant": record.accountant,
                "noise_multiplier": told.get("noise_multiplier"),
                "steps": record.spent.steps,
                "epsilon_is_approximate": record.is_approximate,
                "releasable": record.is_releasable,
            }
        )


def read(paths, delta=None):
    """The runs at `paths`, in their order, each once.

    Args:
        paths: Strings: folders of runs, or folders of these, `record.json` or `.keras` files.
        delta: Optional float in (0, 1), at which all epsilons are.

    Returns:
        List of `Run`, two at least.

    Raises:
        UserError: If a path has no whole record, or there are fewer than two runs.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(pathlib.Path(path))))
    if len(files) < 2:
        raise UserError(
            f"Flag --compare takes two runs at least. Received: --compare={','.join(paths)}, which "
            f"{'is one' if files else 'is none'}. Name another run: --compare=A,B."
        )
    found = []
    for name, file in zip(_names(files), files, strict=True):
        try:
            record = records.read(file)
        except (OSError, ValueError) as error:
            raise UserError(f"Flag --compare: {error}") from error
        if record is None:
            raise UserError(
                f"{file} holds no record of a run: Keras has saved it again, or another program. "
                "Name the folder of the run."
            )
        found.append(Run(name, record, delta))
    return found


def _files(path):
    """The files of records that a path means, resolved and sorted."""
    path = path.expanduser().resolve()
    if path.is_file():
        return [path]
    own = path / records.FILE
    if own.is_file():
        return [own]
    below = sorted(path.rglob(records.FILE))
    if not below:
        remedy = "Name the folder of a finished run, or its record.json."
        if (path / "checkpoint").is_dir():
            remedy = "It is not finished: end it with --resume."
        raise UserError(f"No {records.FILE} is in {path}, so nobody knows that run. {remedy}")
    return below


def _names(files):
    """The shortest ends of paths that tell the files apart."""
    parts = [(f.parent if f.name == records.FILE else f).parts for f in files]
    depth = 1
    while len({each[-depth:] for each in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["/".join(each[-depth:]) for each in parts]


def differing(runs):
    """Dict from the settings that differ to their values, one a run; None where a run has none."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    rows = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: row for name, row in rows.items() if any(each != row[0] for each in row)}


def print_tables(runs):
    """Prints what differs and what came of it, a column a run."""
    settings, results = differing(runs), [run.results for run in runs]
    found = table.Table(title="settings that differ, and results")
    found.add_column("", style="bold")
    for run in runs:
        found.add_column(Text(run.name), overflow="fold")
    for name, values in settings.items():
        found.add_row(name.replace("_", " "), *(Text(readable(each)) for each in values))
    found.add_section()
    for name in results[0]:
        values = [readable(result[name]) for result in results]
        found.add_row(_LABELS.get(name, name.replace("_", " ")), *map(Text, values))
    console.Console().print(found)
    if not settings:
        print("No recorded setting differs: seeds and noise are in no record.")
    if len({result["delta"] for result in results if result["epsilon"] != "inf"}) > 1:
        print("The epsilons are at different deltas: --delta=D compares all at one.")
    if any(result["epsilon"] != "inf" for result in results):
        print(
            "Each epsilon is of its run alone. Whoever chooses among runs on the same data has "
            "spent what all of them spent: --workdir=A,B,... adds it up."
        )


def points(runs):
    """What a picture shows: the runs with an accuracy, and what these were measured on.

    Returns:
        Pair of a list of tuples of a name, an epsilon and an accuracy, floats, and a string.
    """
    found = [(run.name, run.results) for run in runs]
    found = [(name, each) for name, each in found if each["accuracy"] is not None]
    measured_on = " and ".join(sorted({each["measured_on"] for _, each in found}))
    return [(name, float(each["epsilon"]), each["accuracy"]) for name, each in found], measured_on


def as_record(runs):
    """Dict of JSON values: the last line of the program."""
    settings = differing(runs)
    return {
        "differing": list(settings),
        "runs": [
            {
                "name": run.name,
                **run.results,
                "settings": {name: values[place] for name, values in settings.items()},
            }
            for place, run in enumerate(runs)
        ],
    }
