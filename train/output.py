"""Prints the output of the programs: a table for people, and a line of JSON for programs.

Names in a record of other people may hold control characters of terminals. They are shown
as escapes.
"""

import json
import textwrap

from rich import console, table
from rich.text import Text

from tfdpx.accounting.record import plain
from tfdpx.report.words import readable
from tfdpx.train.errors import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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
    rows = table.Table(title=cell(title), show_header=False)
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for key, value in record.items():
        rows.add_row(cell(key.replace("_", " ")), cell(plain(value)))
    console.Console(file=file).print(rows)


def print_record(record):
    """Prints the statement and the results of a `Record`."""
    print("\n".join(map(printable, record.statement().split("\n"))))
    for warning in record.results.get("warnings") or ():
        print(printable(f"Warning: {warning}"))
    print_table(record.view(), title=f"{record.results['model']} on {record.data.name}")


def print_paragraphs(paragraphs):
    """Prints strings as paragraphs of lines of at most 88 characters."""
    for text in paragraphs:
        text = printable(" ".join(text.split()))
        print(textwrap.fill(text, 88, subsequent_indent="  ", break_long_words=False))


def cell(value):
    """Returns a JSON value as the `Text` of a cell, because a name may look like markup."""
    return Text(printable(readable(value)))


def of_spreadsheet(text):
    """Returns a string for a CSV file, with an apostrophe first if spreadsheets would run it.

    Numbers stay as they are, because a spreadsheet only shows them.

    Args:
        text: String.
    """
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(_FORMULA) else text
    return text
