"""The page of a run: what was trained and promised, in one file that loads nothing."""

import base64
import html
import math
import os
import pathlib

from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.accounting.statement import rounded_up
from tfdpx.train.report import command_again
from tfdpx.train.report.record import readable

FILE = "report.html"
STATEMENT = "privacy_statement.txt"
CURVE, CONFUSION, WRONG = "learning_curve.png", "confusion_matrix.png", "wrong_predictions.png"

_NOT_COVERED = "The guarantee is for the training {unit}s, not for those that were measured on."
_PICTURES = {
    CURVE: ("Learning curve", ""),
    CONFUSION: ("Confusion matrix", _NOT_COVERED),
    WRONG: ("Wrong predictions", "Test images that are public: none was trained on."),
}
# Neither scripts nor the network, should an escape ever fail.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff;
  max-width: 46rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.1rem; font-weight: normal; color: #5b6875; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
.headline { font-size: 1.5rem; line-height: 1.3; margin: .3rem 0 1rem; }
.verdict { border-left: .3rem solid; padding: .4rem .8rem; margin: 1rem 0; }
.yes { border-color: #2b8a3e; background: #ebfbee; }
.no { border-color: #c92a2a; background: #fff5f5; }
.note { color: #5b6875; margin: .3rem 0; }
img { display: block; max-width: 100%; height: auto; }
pre { background: #f3f5f7; padding: .8rem; white-space: pre-wrap; margin: .3rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-top: 1px solid #dfe4e8; }
th { font-weight: normal; color: #5b6875; width: 40%; }
summary { cursor: pointer; color: #5b6875; margin: .5rem 0; }
"""
_MOST_CLASSES = 20


def write_page(folder: str | os.PathLike) -> None:
    """Writes `report.html`, whole or not at all, from what a finished run left in its folder.

    It reads `record.json`, `privacy_statement.txt` and pictures. It loads nothing: it has no
    scripts, and pictures are inside. What a user named is shown as text.

    Args:
        folder: Path of the folder.

    Raises:
        OSError: If the folder has no record: its run has not ended.
        ValueError: If the record is damaged.
    """
    folder = pathlib.Path(folder)
    record = records.read(folder / records.FILE)
    view = record.view()
    try:
        statement = (folder / STATEMENT).read_text(encoding="utf-8")
    except FileNotFoundError:  # Of a training without privacy.
        statement = record.statement()
    title = _title(record)
    parts = [
        f"<h1>{_escaped(title)}</h1>",
        f'<p class="headline">{_escaped(headline(record, view))}</p>',
        _verdict(record, view),
        _statement(statement),
        *(_picture(folder / name, record) for name in _PICTURES),
        _again(record, view),
        _table("Results", view),
        _table("Settings", record.settings | _classes(record)),
        _table("Versions", {"date": record.date, **record.versions}),
    ]
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )
    # A file's name may hold bytes that are no characters.
    files.write(folder / FILE, page.encode("utf-8", "backslashreplace"), mode=0o644)


def headline(record, view):
    """One sentence: what was measured, and what is promised to whose data.

    Args:
        record: `Record`.
        view: Dict, `record.view()`.
    """
    data, unit = record.data, record.unit
    whose = f"the {unit}s of {data.name}" if data else f"{unit}s that no record names"
    if data and data.num_examples:
        whose = f"{data.num_examples:,} {unit}s of {data.name}"
        if record.neighbours != "add_or_remove_one":
            whose = f"the {unit}s of {data.num_examples:,} people in {data.name}"
    if view["epsilon"] == math.inf:
        promised = f"trained without privacy on {whose}"
    elif not record.ledger.steps:
        promised = f"nothing was spent on {whose}"
    else:
        about = "about " * view["epsilon_is_approximate"]
        epsilon, delta = (float(rounded_up(view[name])) for name in ("epsilon", "delta"))
        promised = f"at {about}({epsilon:g}, {delta:g})-differential privacy for {whose}"
    return f"{_measured(view)}{promised}."


def _title(record):
    what = record.results.get("model") or record.results.get("method") or record.program
    return f"{what} on {record.data.name if record.data else 'unknown data'}"


def _measured(view):
    for name, text in (
        ("test_accuracy", "{:.1%} test accuracy, "),
        ("validation_accuracy", "{:.1%} accuracy on images held out, "),
        ("test_r2", "R² {:.3f} on test rows, "),
    ):
        if view.get(name) is not None:
            return text.format(view[name])
    return "Not measured, "


def _verdict(record, view):
    if view["releasable"]:
        text = "epsilon is finite and known, no seed was chosen, and no search is left unpaid."
        return f'<p class="verdict yes"><b>Releasable</b>: {text}</p>'
    return f'<p class="verdict no"><b>Not releasable</b>: {"; ".join(record.problems)}.</p>'


def _statement(text):
    """The claim, and all else below it, to be opened."""
    heading, *blocks = text.strip().split("\n\n")
    paragraphs = []
    for block in blocks:
        if "\n  " in block:  # Items, whose lines go on with two spaces.
            for item in block.replace("\n  ", " ").split("\n"):
                name, _, rest = item.partition(": ")
                paragraphs.append(f"<p><b>{_escaped(name)}</b>: {_escaped(rest)}</p>")
        else:
            paragraphs.append(f"<p>{_escaped(' '.join(block.split()))}</p>")
    if not blocks:
        return f"<h2>Privacy</h2>\n<p>{_escaped(' '.join(heading.split()))}</p>"
    claim, *rest = paragraphs
    lines = ["<h2>Privacy</h2>", claim, "<details><summary>The whole statement</summary>"]
    return "\n".join([*lines, f"<p>{_escaped(heading)}</p>", *rest, "</details>"])


def _picture(path, record):
    if not path.exists():
        return ""
    title, note = _PICTURES[path.name]
    note = f'<p class="note">{_escaped(note.format(unit=record.unit))}</p>\n' if note else ""
    inside = base64.b64encode(path.read_bytes()).decode()
    picture = f'<img alt="{title}" src="data:image/png;base64,{inside}">'
    return f"<h2>{title}</h2>\n{note}{picture}"


def _again(record, view):
    command = command_again.of(record)
    if command is None:
        return ""
    note = "Other random numbers, the same promise. Folders and files are named without their paths"
    note += ", and the seed is in no file." if view["seeded"] else "."
    return f'<h2>Make it again</h2>\n<pre>{_escaped(command)}</pre>\n<p class="note">{note}</p>'


def _classes(record):
    names = (record.inputs or {}).get("class_names") or ()
    if not names:
        return {}
    more = f" ... ({len(names):,})" if len(names) > _MOST_CLASSES else ""
    return {"classes": ", ".join(map(str, names[:_MOST_CLASSES])) + more}


def _table(title, values):
    rows = "\n".join(
        f"<tr><th>{_escaped(name.replace('_', ' '))}</th><td>{_escaped(_shown(value))}</td></tr>"
        for name, value in records.plain(values).items()
        if value not in (None, [], "")
    )
    return rows and f"<h2>{title}</h2>\n<table>\n{rows}\n</table>"


def _shown(value):
    return ", ".join(map(readable, value)) if isinstance(value, list) else readable(value)


def _escaped(text):
    return html.escape(str(text))
