"""The report of a run: model, record, statement, learning curve, pictures, and a page of them all.

`report.html` is one file. It loads nothing and runs nothing; pictures are inside.
"""

import base64
import dataclasses
import html
import json
import math
import os
import pathlib
import shlex
import string

import keras
import numpy as np
import tensorflow as tf

from tfdpx import _files as files
from tfdpx._keras import model_internals
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import EMPTY
from tfdpx.accounting.statement import rounded_up
from tfdpx.checks.callbacks import is_covered
from tfdpx.sampling.examples import as_examples
from tfdpx.train import pictures, presets, settings
from tfdpx.train.output import print_table, readable, to_json
from tfdpx.train.settings import OF_FILE, PRIVACY
from tfdpx.training.callbacks import epsilon_spent, steps_taken
from tfdpx.training.session import after_save

FILE = "report.html"
STATEMENT = "privacy_statement.txt"
CURVE, CONFUSION, WRONG = "learning_curve.png", "confusion_matrix.png", "wrong_predictions.png"
CALIBRATION = "calibration.png"

_PICTURES = {  # Title and note.
    CURVE: ("Learning curve", ""),
    CONFUSION: ("Confusion matrix", "The guarantee does not cover the examples measured on."),
    CALIBRATION: ("Calibration", "The guarantee does not cover the examples measured on."),
    WRONG: ("Wrong predictions", "Test images that are public: none was trained on."),
}
_MEASURED = {
    "test_accuracy": "{:.1%} test accuracy{}",
    "validation_accuracy": "{:.1%} accuracy on images held out{}",
    "test_r2": "R² {:.3f} on test rows",
}
_MOST_CLASSES, _MOST_WRONG = 20, 12
# Settings that a command always names.
_ALWAYS = ("dataset", *PRIVACY, "delta")
# The policy allows neither scripts nor the network, should an escape ever fail.
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
.verdict { border-left: .3rem solid; padding: .4rem .8rem; }
.yes { border-color: #2b8a3e; background: #ebfbee; }
.no { border-color: #c92a2a; background: #fff5f5; }
.note, th, summary { color: #5b6875; margin: .3rem 0; font-weight: normal; }
img { max-width: 100%; }
pre { background: #f3f5f7; padding: .8rem; white-space: pre-wrap; margin: .3rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0;
  border-top: 1px solid #dfe4e8; }
</style>
</head>
<body>
<p class="note">$title</p>
$body
</body>
</html>
""")


class Curve(keras.callbacks.Callback):
    """Writes epsilon and, on public examples, accuracy after every Keras epoch as a line of JSON.

    The file keeps the rows for a resumed run. A row is written once a `Checkpoint` of the same
    `fit`, if there is one, holds its update.

    Args:
        path: File to write.
        plan: `tfdpx.PrivacyPlan` for the epsilon that is spent.
        steps: Updates that the restored model has taken; later rows of the file are dropped.
        before: `Ledger` of the same data before the run.

    Attributes:
        rows: List of dicts with `step` (model updates), `epsilon` (spent after them) and, if the
            optimizer has `public_validation=True` or no noise, `accuracy` and, of two classes,
            `auc` (on the validation data given to `fit`).
    """

    def __init__(self, path, plan, steps, before=EMPTY):
        super().__init__()
        self._path, self._plan, self._before = pathlib.Path(path), plan, before
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [{**row, "epsilon": float(row["epsilon"])} for row in map(json.loads, lines)]
        self.rows = [row for row in rows if row["step"] <= steps]

    def on_epoch_end(self, epoch, logs=None):
        """Appends a row; `logs` must hold `val_accuracy`."""
        del epoch
        optimizer = self.model.optimizer
        epsilon = epsilon_spent(optimizer, self._plan, self._before)
        row = {"step": steps_taken(optimizer), "epsilon": epsilon}
        if is_covered("val_accuracy", model_internals.innermost(optimizer)):
            shown = {"accuracy": "val_accuracy", "auc": "val_auc"}.items()
            row |= {name: float(logs[key]) for name, key in shown if key in logs}
        self.rows.append(row)
        after_save(self.model, self._write)

    def _write(self):
        lines = "".join(to_json(row) + "\n" for row in self.rows)
        files.write(self._path, lines.encode(), mode=0o644)


def write(record, model, data, measured, rows, workdir):
    """Writes model, statement and record, then the pictures and the page, and prints the first.

    Args:
        record: `tfdpx.accounting.record.Record`. The model file holds a copy.
        model: A `keras.Model` that was never compiled, because a .keras file of a compiled model
            holds the optimizer, even with `include_optimizer=False`.
        data: `images.ImageData`.
        measured: `measure.Measured`.
        rows: The rows of `Curve`. Without accuracy in them there is no learning curve.
        workdir: `pathlib.Path`.
    """
    save_model(model, record, workdir)
    write_record(record, workdir)
    drawn = draw_metrics(measured, workdir, data)
    rows = [row for row in rows if "accuracy" in row]
    if rows:
        base_rate = record.results[f"{data.eval_split}_base_rate"]
        pictures.learning_curve(rows, workdir / CURVE, data.eval_split, base_rate)
        drawn.append(workdir / CURVE)
    with tf.summary.create_file_writer(str(workdir / "tensorboard" / "pictures")).as_default():
        for path in drawn:
            pixels = tf.io.decode_png(path.read_bytes(), channels=3)
            tf.summary.image(path.stem, pixels[None], step=record.results["steps"])
    write_page(workdir)


def draw_metrics(measured, workdir, data=None):
    """Prints warnings, draws the confusion matrix and, of two classes, the calibration.

    Of public examples alone also some wrong predictions, and precision and recall by threshold.

    Args:
        measured: `measure.Measured`. Nothing is drawn of a regression or without examples.
        workdir: `pathlib.Path`.
        data: `images.ImageData` that was measured on; None without images.

    Returns:
        List of the paths of the first two.
    """
    for warning in measured.warnings():
        print(f"Warning: {warning}")
    labels, predictions, names = measured.targets, measured.predictions, measured.class_names
    if not len(names) or not len(labels):
        return []
    drawn = [workdir / CONFUSION]
    pictures.confusion_matrix(labels, predictions, names, drawn[0])
    if len(names) == 2 and np.isfinite(measured.margins).all():
        drawn.append(workdir / CALIBRATION)
        shown = (names[1], drawn[1], measured.is_public)
        pictures.reliability(labels, measured.positive, *shown)
    wrong = np.flatnonzero(np.not_equal(labels, predictions))
    if data is not None and measured.is_public and len(wrong):
        rows = wrong[np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST_WRONG)).astype(int)]
        images, _, _ = as_examples(*data.eval_examples).batch(rows, len(rows))
        shown = (labels[rows], predictions[rows], names, workdir / WRONG)
        pictures.wrong_predictions(np.asarray(images), *shown)
    return drawn


def save_model(model, record, workdir):
    """Saves the model with the record inside, so that no weights exist without their record."""
    with files.replacing(workdir / "model.keras", mode=0o644) as fresh:
        model.save(fresh)
        record.save(fresh)


def write_record(record, workdir):
    """Writes the statement, and then the record, which marks the run as ended. Prints both."""
    statement = record.statement()
    files.write(workdir / STATEMENT, statement.encode(), mode=0o644)
    record.save(workdir / records.FILE)
    print(statement)
    print_table(record.view(), title=f"{record.results['model']} on {record.data.name}")


def write_page(folder: str | os.PathLike) -> None:
    """Writes `report.html`, whole or not at all, from the files of a finished run in its folder.

    Names that a user chose are shown as text.

    Args:
        folder: Path of the folder with `record.json`, `privacy_statement.txt` and pictures.

    Raises:
        OSError: If the folder has no record, because its run has not ended.
        ValueError: If the record is damaged.
    """
    folder = pathlib.Path(folder)
    record = records.read(folder / records.FILE)
    view, path = record.view(), folder / STATEMENT
    # A training without privacy leaves no statement.
    statement = path.read_text(encoding="utf-8") if path.exists() else record.statement()
    claim = statement.split("\n\n")[:2][-1]  # Below a heading, if there is more.
    if record.is_releasable:
        verdict = '<p class="verdict yes"><b>Releasable</b>: epsilon is finite and known, no seed '
        verdict += "was chosen, and no search is left unpaid.</p>"
    else:
        problems = "; ".join(record.problems)
        verdict = f'<p class="verdict no"><b>Not releasable</b>: {problems}.</p>'
    warnings = (f'<p class="verdict no"><b>{_escaped(w)}</b></p>' for w in view.get("warnings", ()))
    not_protected = view.get("not_protected") or ""
    parts = [
        *warnings,
        f"<h1>{_escaped(headline(record, view))}</h1>",
        f'<p class="note">{_escaped(not_protected)}</p>',
        verdict,
        f"<h2>Privacy</h2>\n<p>{_escaped(claim)}</p>",
        f"<details><summary>The whole statement</summary>\n<pre>{_escaped(statement)}</pre>",
        "</details>",
    ]
    for name, (title, note) in _PICTURES.items():
        if (folder / name).exists():
            pixels = base64.b64encode((folder / name).read_bytes()).decode()
            picture = f'<img alt="{title}" src="data:image/png;base64,{pixels}">'
            note = note if name == WRONG else not_protected or note
            parts.append(f'<h2>{title}</h2>\n<p class="note">{_escaped(note)}</p>\n{picture}')
    if command := command_again(record):
        note = "Other random numbers, the same guarantee. Paths and the seed are in no file."
        parts.append(f"<h2>Make it again</h2>\n<pre>{_escaped(command)}</pre>")
        parts.append(f'<p class="note">{note}</p>')
    names = (record.inputs or {}).get("class_names") or []
    classes = {"classes": names[:_MOST_CLASSES], "number of classes": len(names) or None}
    parts += [
        _table("Results", view),
        _table("Settings", record.settings | classes),
        _table("Versions", {"date": record.date, **record.versions}),
    ]
    model = view.get("model") or view.get("method") or record.program
    title = f"{model} on {record.data.name if record.data else 'unknown data'}"
    page = _PAGE.substitute(title=_escaped(title), body="\n".join(parts))
    # The name of a file may hold bytes that are no characters.
    files.write(folder / FILE, page.encode("utf-8", "backslashreplace"), mode=0o644)


def headline(record, view):
    """Returns one sentence with the accuracy and the guarantee.

    Args:
        record: `Record`.
        view: Dict, `record.view()`.
    """
    if view["epsilon"] == math.inf:
        guarantee = "trained without privacy on"
    elif not record.ledger.steps:
        guarantee = "nothing was spent on"
    else:
        epsilon, delta = (float(rounded_up(view[name])) for name in ("epsilon", "delta"))
        about = "about " * record.is_approximate
        guarantee = f"at {about}({epsilon:g}, {delta:g})-differential privacy for"
    data = record.data.name if record.data else "unknown data"
    for name, text in _MEASURED.items():
        if view.get(name) is not None:
            text = text.format(view[name], _beside(view, name.partition("_")[0]))
            return f"{text}, {guarantee} the {record.unit}s of {data}."
    return f"Not measured, {guarantee} the {record.unit}s of {data}."


def _beside(view, split):
    """Returns the interval of an accuracy and the base rate in brackets, if they are recorded."""
    if view.get(f"{split}_accuracy_interval") is None:
        return ""
    low, high = view[f"{split}_accuracy_interval"]
    rate, name = view[f"{split}_base_rate"], view[f"{split}_most_frequent_class"]
    return f' (95% interval {100 * low:.1f} to {100 * high:.1f}; {rate:.1%} are "{name}")'


def command_again(record):
    """Returns the command that trains the same again, a flag a line; None if there is none.

    A record has neither the seed nor paths, so files and folders are named by their ends. No
    command repeats a search.
    """
    if record.searched or record.program not in ("classify", "pretrain"):
        return None
    recorded = records.plain(record.settings)
    usual = _defaults(settings.RunSettings)
    if record.program == "classify":
        usual = _defaults(settings.Settings) | _usual_settings(recorded)
        recorded = {name: recorded.get(name) for name in usual}  # The record of a head has more.
    lines = [f"tfdpx {record.program}"]
    for name, value in recorded.items():
        is_asked = value != usual.get(name) or (value and name in _ALWAYS)
        if is_asked and value not in (None, [], OF_FILE):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            text = text.lower() if isinstance(value, bool) else text
            lines.append(f"--{name}={shlex.quote(text)}")
    return " \\\n  ".join(lines)


def _defaults(kind):
    return {field.name: field.default for field in dataclasses.fields(kind)}


def _usual_settings(recorded):
    """Returns the settings that data and budget alone give a run of `classify`, a dict."""
    dataset = recorded.get("dataset")  # A folder of features may have none.
    kind = settings.kind_of(dataset, recorded.get("head"))
    if kind != settings.IMAGES:
        return presets.OF_KIND[kind]
    preset = presets.default_for(dataset)
    usual = presets.values_of(preset, recorded["epsilon"])
    return usual if recorded["private"] else usual | {"noise_multiplier": 0, "l2_norm_clip": "inf"}


def _table(title, values):
    rows = "\n".join(
        f"<tr><th>{_escaped(name.replace('_', ' '))}</th><td>{_escaped(readable(value))}</td></tr>"
        for name, value in records.plain(values).items()
        if value not in (None, [], "")
    )
    return f"<h2>{title}</h2>\n<table>\n{rows}\n</table>"


def _escaped(text):
    return html.escape(str(text))
