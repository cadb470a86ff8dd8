"""Prints the output of the programs: a table for people, and a line of JSON for programs.

A record from another person may contain control characters of terminals, for example in a name.
They are printed as escapes.
"""

import json
import math
import textwrap

from rich import console, table
from rich.text import Text

from tfdpx.accounting.ledger import USER
from tfdpx.accounting.record import plain
from tfdpx.accounting.statement import rounded_up
from tfdpx.report import words
from tfdpx.train.errors import printable

_UNBROKEN = 12  # In tables, words shorter than this are never broken into two lines.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def to_json(record):
    """Returns a dict as one line of strictly valid JSON.

    JSON has no infinite numbers and no NaN. Here infinite numbers become the strings `"inf"` and
    `"-inf"`, and NaN becomes `null`.

    Args:
        record: Dict of strings, booleans, None, Python numbers or numpy scalars, and of lists and
            dicts of these.
    """
    return json.dumps(plain(record), allow_nan=False)


def print_table(record, title):
    """Prints a dict as a table with a row for each entry.

    Args:
        record: Dict as for `to_json`.
        title: String, the heading of the table.
    """
    rows = table.Table(title=cell(title), show_header=False)
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for key, value in record.items():
        rows.add_row(cell(key.replace("_", " ")), cell(plain(value)))
    console.Console().print(rows)


def print_record(record):
    """Prints the statement and the results of a `Record`."""
    print("\n".join(map(printable, words.statement(record).split("\n"))))
    for warning in record.results.get("warnings") or ():
        print(printable(f"Warning: {warning}"))
    print_table(record.view(), title=f"{record.results['model']} on {words.data_name(record)}")


def print_rows(names, rows, title=None):
    """Prints lists of JSON values as the rows of a table.

    Args:
        names: Strings, the names of the columns.
        rows: Lists of JSON values.
        title: String, the heading of the table; or None.
    """
    shown = table.Table(title=title and cell(title))
    for number, name in enumerate(names):
        texts = [name, *(words.readable(row[number]) for row in rows)]
        longest = max((len(word) for text in texts for word in text.split()), default=0)
        shown.add_column(cell(name), overflow="fold", min_width=min(longest, _UNBROKEN))
    for row in rows:
        shown.add_row(*map(cell, row))
    console.Console().print(shown)


def print_paragraphs(paragraphs):
    """Prints strings as paragraphs. A line has at most 88 characters."""
    for text in paragraphs:
        text = printable(" ".join(text.split()))
        print(textwrap.fill(text, 88, subsequent_indent="  ", break_long_words=False))


def print_attack_bounds(bounds, neighbours):
    """Prints bounds on attacks, rounded up, as a table and a sentence.

    Args:
        bounds: `tfdpx.accounting.AttackBounds`, or None if no bounds are known.
        neighbours: String, the kind of neighbouring data sets for which the bounds hold.

    Returns:
        Dict with one entry, `attack_bounds`: a dict of the bounds, or None if none are known.
    """
    who = "person" if bounds and bounds.unit == USER else "example"
    values = bounds and bounds.to_dict()
    if bounds:
        label = "recognised, if {:g}% of absent ones are taken for present"
        recognised = values["true_positive_rate"].items()
        rows = {label.format(100 * float(rate)): _percent(one) for rate, one in recognised}
        mu = rounded_up(values["mu"]) if values["mu"] < math.inf else "infinite"
        rows |= {
            "right guesses (50% by guessing)": _percent(values["right_guesses"]),
            "AUC (0.5 by guessing)": rounded_up(values["auc"], 3),
            "advantage": rounded_up(values["advantage"], 3),
            f"mu, at every delta from {values['mu_from_delta']:g}": mu,
        }
        print_table(rows, title=f"attacks on one {who}, at most")
    print_paragraphs([words.say("attack_on", bounds, who, neighbours), ""])
    return {"attack_bounds": values}


def _percent(share):
    return f"{rounded_up(100 * share, 3)}%"


def cell(value):
    """Returns a JSON value as a rich `Text`, in which nothing is read as markup."""
    return Text(printable(words.readable(value)))


def of_spreadsheet(text):
    """Returns a string for a CSV file, with an apostrophe in front if it could be a formula.

    A spreadsheet would run such a text. Numbers stay unchanged, even if they begin with a sign.

    Args:
        text: String.
    """
    try:
        float(text)
    except ValueError:
        return f"'{text}" if text.startswith(_FORMULA) else text
    return text
