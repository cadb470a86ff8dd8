"""What a run found: a table for people and one line of JSON for programs."""

import json
import math
import os

from rich import console, table


def to_json(record):
    """Returns a dict as one line of strictly valid JSON.

    JSON has no infinities and no NaN: infinite numbers become the strings `"inf"` and `"-inf"`,
    NaN becomes `null`.

    Args:
        record: Dict of strings, booleans, None, Python numbers or numpy scalars, and of lists and
            dicts of these.
    """
    return json.dumps(_plain(record), allow_nan=False)


def write(record, path, indent=None):
    """Writes a dict as a file of JSON, whole or not at all.

    Args:
        record: Dict as for `to_json`.
        path: `pathlib.Path`.
        indent: Spaces to indent by, for people; None for one line.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(_plain(record), allow_nan=False, indent=indent) + "\n")
    os.replace(fresh, path)


def print_table(record, title, file=None):
    """Prints a dict as a table with a row for each entry.

    Args:
        record: Dict as for `to_json`.
        title: Heading.
        file: Where to print; `None` is the standard output.
    """
    rows = table.Table(title=title, show_header=False)
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for key, value in record.items():
        rows.add_row(key.replace("_", " "), _readable(_plain(value)))
    console.Console(file=file).print(rows)


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):  # numpy scalars
        value = value.item()
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def _readable(value):
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
