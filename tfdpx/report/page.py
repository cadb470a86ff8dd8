"""Makes the page of a run from its record and pictures, for readers outside of machine learning.

The page is one file that includes the pictures and the whole record. It loads no other file and
runs no script.
"""

from __future__ import annotations

import base64
import html
import os
import pathlib
import re

from tfdpx.accounting.record import Record, plain
from tfdpx.report import words

FILE = "report.html"
CURVE, CONFUSION, WRONG = "learning_curve.png", "confusion_matrix.png", "wrong_predictions.png"
CALIBRATION, ATTACK = "calibration.png", "attack.png"

_TITLES = {
    ATTACK: "The limit on every attack, and guessing",
    CONFUSION: "How often each class was taken for another",
    CALIBRATION: "Predicted probabilities and observed shares",
    WRONG: "Wrong predictions, on public test images",
    CURVE: "Accuracy during the training",
}
_MOST_CLASSES = 20
_RECORD = re.compile(rb'<pre id="record">(.*?)</pre>', re.DOTALL)


def page(record: Record, pictures: dict[str, bytes]) -> bytes:
    """Returns the page of a run as HTML, which depends only on the record and the pictures.

    Args:
        record: `tfdpx.accounting.record.Record`.
        pictures: Dict from names of files to the bytes of PNG files, see `pictures_of`.
    """
    names = (record.inputs or {}).get("class_names") or []
    classes = {"classes": names[:_MOST_CLASSES], "number of classes": len(names) or None}
    tables = {
        "Results": record.view(),
        "Settings": record.settings | classes,
        "Versions": {"date": record.date, **record.versions},
    }
    # Names that a user chose are escaped. In case this ever fails, the page's policy also forbids
    # scripts and network access.
    text = words.template("page.html", finalize=None, autoescape=True).render(
        record=record,
        tables=plain(tables),
        pictures=[
            (name, title, base64.b64encode(pictures[name]).decode())
            for name, title in _TITLES.items()
            if name in pictures
        ],
    )
    # The name of a file may have bytes that are not valid characters.
    return text.encode("utf-8", "backslashreplace")


def pictures_of(folder: str | os.PathLike) -> dict[str, bytes]:
    """Returns the pictures for the page from a run's folder: a dict from file names to bytes."""
    paths = (pathlib.Path(folder) / name for name in _TITLES)
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def take_apart(content: bytes) -> tuple[bytes, dict[str, bytes], bytes]:
    """Splits a page into three parts: its record as JSON, a dict of its pictures, and the rest.

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
        ValueError: If the page has no record, or the record was edited.
    """
    return Record.from_json(take_apart(content)[0])
