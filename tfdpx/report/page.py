"""Makes the page of a run from its record and pictures, for readers outside of machine learning.

It is one file that includes the pictures and the whole record. It loads and runs nothing.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import os
import pathlib
import re
import string

from tfdpx.accounting.record import Record, plain
from tfdpx.report import words

FILE = "report.html"
CURVE, CONFUSION, WRONG = "learning_curve.png", "confusion_matrix.png", "wrong_predictions.png"
CALIBRATION, ATTACK = "calibration.png", "attack.png"

_MEASURED = {
    CONFUSION: "How often each class was taken for another",
    CALIBRATION: "Predicted probabilities and observed shares",
    WRONG: "Wrong predictions, on public test images",
    CURVE: "Accuracy during the training",
}
_TITLES = {ATTACK: "The limit on every attack, and guessing", **_MEASURED}
_MOST_CLASSES = 20
# The policy forbids scripts and network access, in case an escape ever fails.
_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2733; background: #fff;
  max-width: 46rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; font-weight: normal; line-height: 1.3; margin: .3rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
h3 { font-size: 1rem; font-weight: normal; margin: 1.2rem 0 .3rem; }
.warning { border-left: .3rem solid #c92a2a; background: #fff5f5; padding: .4rem .8rem; }
.note { border-left: .3rem solid #868e96; background: #f3f5f7; padding: .4rem .8rem; }
.title, th, summary { color: #5b6875; margin: .3rem 0; font-weight: normal; }
img { max-width: 100%; }
pre { background: #f3f5f7; padding: .8rem; white-space: pre-wrap; margin: .3rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-top: 1px solid #dfe4e8; }
</style>
</head>
<body>
<p class="title">$title</p>
$body
</body>
</html>
""")
_RECORD = re.compile(rb'<pre id="record">(.*?)</pre>', re.DOTALL)


def page(record: Record, pictures: dict[str, bytes]) -> bytes:
    """Returns the page of a run. It is a function of the record and the pictures.

    Names that a user chose are escaped.

    Args:
        record: `tfdpx.accounting.record.Record`.
        pictures: Dict from names of files to the bytes of PNG files, see `pictures_of`.
    """
    record = dataclasses.replace(record, weights=None)  # Only the model file has their digest.
    view = record.view()
    protected, caution = words.protected(record)
    warnings = [f"Warning: {text}" for text in record.results.get("warnings") or ()]
    warnings += words.reasons_against_release(record)
    exact = record.results.get("not_protected")
    names = (record.inputs or {}).get("class_names") or []
    classes = {"classes": names[:_MOST_CLASSES], "number of classes": len(names) or None}
    parts = [
        *(f'<p class="warning"><b>{_escaped(warning)}</b></p>' for warning in warnings),
        f"<h1>{_escaped(protected)}</h1>",
        f'<p class="note">{_escaped(caution)}</p>',
        "<h2>Protected from what</h2>",
        f"<p>{_escaped(words.attack(record))}</p>",
        *_picture(pictures, ATTACK, _TITLES[ATTACK]),
        "<h2>Measured</h2>",
        f"<p>{_escaped(words.measured(record))}</p>",
        *([f'<p class="note">Caution: {_escaped(exact)}</p>'] if exact else []),
        *(part for name, title in _MEASURED.items() for part in _picture(pictures, name, title)),
        "<h2>What undoes this, or is not protected</h2>\n<ul>",
        *(f"<li>{_escaped(text)}</li>" for text in words.limits(record)),
        "</ul>\n<h2>How to check this</h2>",
        f"<p>{_escaped(words.check(record))}</p>",
        "<h2>For specialists</h2>",
        _fold("The statement", f"<pre>{_escaped(record.statement())}</pre>"),
        _fold("Results", _table(view)),
        _fold("Settings", _table(record.settings | classes)),
        _fold("Versions", _table({"date": record.date, **record.versions})),
    ]
    content = _escaped(record.to_json().decode())
    parts.append(_fold("The record", f'<pre id="record">{content}</pre>'))
    model = view.get("model") or view.get("method") or record.program
    title = _escaped(f"Privacy of a model trained on {words.data_name(record)} ({model})")
    text = _PAGE.substitute(title=title, body="\n".join(parts))
    # The name of a file may have bytes that are not characters.
    return text.encode("utf-8", "backslashreplace")


def pictures_of(folder: str | os.PathLike) -> dict[str, bytes]:
    """Returns the pictures in a run's folder that its page shows, a dict from names to bytes."""
    paths = (pathlib.Path(folder) / name for name in _TITLES)
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def take_apart(content: bytes) -> tuple[bytes, dict[str, bytes], bytes]:
    """Returns the record in a page as JSON, its pictures by name, and the page without the record.

    Args:
        content: Bytes of the page.

    Raises:
        ValueError: If the page has no record.
    """
    match = _RECORD.search(content)
    if match is None:
        raise ValueError("The page holds no record: tfdpx did not make it, or an older version.")
    shown = {
        name: re.search(rf'<img alt="{title}" src="data:image/png;base64,(.*?)">'.encode(), content)
        for name, title in _TITLES.items()
    }
    pictures = {name: base64.b64decode(image[1]) for name, image in shown.items() if image}
    record = html.unescape(match[1].decode("utf-8", "replace")).encode()
    return record, pictures, content[: match.start()] + content[match.end() :]


def record_in(content: bytes) -> Record:
    """Returns the record inside a page.

    Args:
        content: Bytes of the page.

    Raises:
        ValueError: If there is no record, or it was edited.
    """
    return Record.from_json(take_apart(content)[0])


def _picture(pictures, name, title):
    """Returns a list with a picture and its title; an empty list if there is no picture."""
    if name not in pictures:
        return []
    pixels = base64.b64encode(pictures[name]).decode()
    return [f'<h3>{title}</h3>\n<img alt="{title}" src="data:image/png;base64,{pixels}">']


def _fold(title, content):
    return f"<details><summary>{title}</summary>\n{content}\n</details>"


def _table(values):
    rows = "\n".join(
        f"<tr><th>{_escaped(k.replace('_', ' '))}</th><td>{_escaped(words.readable(v))}</td></tr>"
        for k, v in plain(values).items()
        if v not in (None, [], "")
    )
    return f"<table>\n{rows}\n</table>"


def _escaped(text):
    return html.escape(str(text))
