"""The results of a sweep: one row a run, and what they come to over the seeds."""

import csv
import statistics

from tfdpx import _files as files
from tfdpx.train.config import preset_lookup
from tfdpx.train.sweeps import grid, runs

# Columns that the settings of a run say and its report does not.
_SETTINGS = "learning_rate l2_norm_clip augmult ema_momentum optimizer validation".split()


def rows(results):
    """Returns a dict for each run: swept settings, seed, accuracy, then the rest.

    Args:
        results: What `runs.read_all` returned.
    """
    swept = names(results)
    found = []
    for result in results:
        settings, report = result["settings"], dict(result["report"])
        row = {name: result["point"].get(name, settings.get(name)) for name in swept}
        row |= {
            "seed": settings["seed"],
            "accuracy": runs.accuracy(report),
            "measured_on": "validation" if report["test_accuracy"] is None else "test",
        }
        for name in ("test_accuracy", "validation_accuracy", "workdir"):
            report.pop(name, None)
        found.append({**row, **{name: settings[name] for name in _SETTINGS}, **report, **row})
    order = lambda row: [_sortable(name, row[name]) for name in (*swept, "seed")]  # noqa: E731
    return sorted(found, key=order)


def names(results):
    """The settings that differ within the sweep: those of any run's point, in order."""
    return list(dict.fromkeys(name for result in results for name in result["point"]))


def write(found, path):
    """Writes rows as CSV, whole or not at all.

    Args:
        found: What `rows` returned.
        path: `pathlib.Path`.
    """
    columns = list(dict.fromkeys(name for row in found for name in row))
    with files.replacing(path, mode=0o644) as fresh, fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(found)


def summaries(found, swept):
    """Returns what each point came to over its seeds, in the order of the rows.

    Args:
        found: What `rows` returned.
        swept: Names of the settings that make a point.

    Returns:
        List of dicts: the settings `swept`, and `median`, `lowest`, `highest` and `runs`.
    """
    groups = {}
    for row in found:
        groups.setdefault(tuple(row[name] for name in swept), []).append(row["accuracy"])
    return [
        {
            **dict(zip(swept, values, strict=True)),
            "median": statistics.median(group),
            "lowest": min(group),
            "highest": max(group),
            "runs": len(group),
        }
        for values, group in groups.items()
    ]


def best(points):
    """The summary with the highest median; of equals, the one with the highest lowest accuracy."""
    return max(points, key=lambda point: (point["median"], point["lowest"]))


def _sortable(name, value):
    if name == grid.PRESET and value in preset_lookup.names():
        value = preset_lookup.names().index(value)  # Columns as in their table.
    return (value is not None, isinstance(value, str), value if value is not None else 0)
