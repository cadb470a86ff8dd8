"""Finished runs side by side: the settings that differ, accuracy and epsilon."""

import dataclasses
from typing import Any

from rich import console, table
from rich.text import Text

from tfdpx.accounting import record as records
from tfdpx.accounting.record import plain
from tfdpx.train.accounts import recorded_runs
from tfdpx.train.errors import UserError
from tfdpx.train.output import readable

_MEASURED = ("test", "validation")
# Of results that have the name of a setting.
_LABELS = {"epsilon": "epsilon spent", "steps": "updates made"}


@dataclasses.dataclass(frozen=True)
class ComparedRun:
    """A finished run, as it is to be compared.

    Args:
        name: String, by which it differs from the others: the end of its path.
        settings: Dict of JSON values: what was asked for.
        results: Dict of JSON values: what came of it. `accuracy` is None where none was measured.
    """

    name: str
    settings: dict[str, Any]
    results: dict[str, Any]


def read(paths, delta=None):
    """The runs at `paths`, in their order, each once.

    Args:
        paths: Strings, as of `recorded_runs.read`.
        delta: Optional float in (0, 1), at which all epsilons are.

    Returns:
        List of `ComparedRun`, two at least.

    Raises:
        UserError: If a path has no whole record, or there are fewer than two runs.
    """
    runs = [run for path in paths for run in recorded_runs.read(path, "compare", all_spent=False)]
    found = {run.path.resolve(): run.record for run in runs}
    if len(found) < 2:
        raise UserError(
            f"Flag --compare takes two runs at least. Received: --compare={','.join(paths)}, which "
            "is one. Name another run: --compare=A,B."
        )
    return [
        ComparedRun(name, _settings(record), _results(record, delta))
        for name, record in zip(_names(list(found)), found.values(), strict=True)
    ]


def _settings(record):
    data = record.data and record.data.name
    return plain({"program": record.program, "dataset": data, **record.settings})


def _results(record, delta):
    results = record.results
    measured = [name for name in _MEASURED if results.get(f"{name}_accuracy") is not None]
    measured_on = measured[0] if measured else None
    delta = record.delta if delta is None else delta
    return plain(
        {
            "accuracy": results.get(f"{measured_on}_accuracy"),
            "measured_on": measured_on,
            "epsilon": record.ledger.composed_epsilon(delta, record.accountant),
            "delta": record.ledger.total_delta(delta),
            "accountant": record.accountant,
            "noise_multiplier": results.get("noise_multiplier"),
            "steps": record.ledger.steps,
            "epsilon_is_approximate": record.is_approximate,
            "releasable": record.is_releasable,
        }
    )


def _names(files):
    """The shortest ends of paths by which the files differ."""
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
