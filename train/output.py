"""Prints the output of the programs: a table for people, and a line of JSON for programs."""

import json

from rich import console, table
from rich.text import Text

from tfdpx.accounting.record import plain

_MOST_ENTRIES = 20


def to_json(record):
    """Returns a dict as one line of strictly valid JSON.

    JSON has no infinities and no NaN: infinite numbers become the strings `"inf"` and `"-inf"`,
    NaN becomes `null`.

    Args:
        record: Dict of strings, booleans, None, Python numbers or numpy scalars, and of lists and
            dicts of these.
    """
    return json.dumps(plain(record), allow_nan=False)


def print_table(record, title, file=None):
    """Prints a dict as a table with a row for each entry.

    Args:
        record: Dict as for `to_json`.
        title: Heading.
        file: Where to print; None is the standard output.
    """
    # As `Text`, because the name of a file or folder may look like markup.
    rows = table.Table(title=Text(title), show_header=False)
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for key, value in record.items():
        rows.add_row(key.replace("_", " "), Text(readable(plain(value))))
    console.Console(file=file).print(rows)


def readable(value):
    """Returns a JSON value as a string for a table."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    if isinstance(value, dict):
        parts = [f"{name}: {readable(part)}" for name, part in value.items()]
        more = f", and {len(parts) - _MOST_ENTRIES} more" * (len(parts) > _MOST_ENTRIES)
        return ", ".join(parts[:_MOST_ENTRIES]) + more
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
