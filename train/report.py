"""Writes the files of a run: model, record, statement, learning curve, pictures, page and card."""

import contextlib
import json
import math
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf

from tfdpx import _files as files
from tfdpx._keras import model_internals
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import EMPTY
from tfdpx.checks.callbacks import is_covered
from tfdpx.sampling.examples import as_examples
from tfdpx.train import model_card, pictures
from tfdpx.train.errors import DiskError, printable
from tfdpx.train.output import print_table, to_json
from tfdpx.train.page import ATTACK, CALIBRATION, CONFUSION, CURVE, FILE, WRONG, page, pictures_of
from tfdpx.training.callbacks import epsilon_spent, steps_taken
from tfdpx.training.session import after_save

STATEMENT = "privacy_statement.txt"
_MOST_WRONG = 12


@contextlib.contextmanager
def _after_the_record(folder):
    """Context manager for pictures and page, in which an error of the disk names the remedy."""
    try:
        yield
    except DiskError:
        raise
    except (OSError, tf.errors.OpError) as error:
        raise DiskError(
            f"The page {os.fspath(folder / FILE)!r} or a picture could not be written: {error}. "
            "Model, record and statement were saved before and are whole. Make room, and write the "
            f'page by `python -c "from tfdpx.train import report; report.write_page('
            f'{os.fspath(folder)!r})"`.'
        ) from error


class Curve(keras.callbacks.Callback):
    """Writes a line of JSON after every Keras epoch: epsilon and, on public examples, accuracy.

    The file stores the rows for a resumed run. A row is written after a `Checkpoint` of the same
    `fit`, if there is one, has saved its update.

    Args:
        path: Path of the file to write.
        plan: `tfdpx.PrivacyPlan`, from which epsilon is computed.
        steps: Int, the updates of the restored model; later rows of the file are dropped.
        before: `Ledger` of earlier trainings on the same data.

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
    """Writes model, statement and record, then pictures and page, and prints the statement.

    Args:
        record: `tfdpx.accounting.record.Record`. The model file has a copy.
        model: A `keras.Model` that was never compiled, because a .keras file of a compiled model
            holds the optimizer, even with `include_optimizer=False`.
        data: `images.ImageData`.
        measured: `measure.Measured`.
        rows: The rows of `Curve`. The learning curve is drawn only if they have an accuracy.
        workdir: `pathlib.Path`.
    """
    save_model(model, record, workdir)
    write_record(record, workdir)
    print_record(record)
    with _after_the_record(workdir):
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
    """Prints warnings, and draws the confusion matrix and, for two classes, the calibration.

    If the examples are public, also draws wrong predictions, and precision and recall by threshold.

    Args:
        measured: `measure.Measured`. Nothing is drawn for a regression or without examples.
        workdir: `pathlib.Path`.
        data: `images.ImageData` of the examples; None without images.

    Returns:
        List of the paths of the confusion matrix and the calibration.
    """
    for warning in measured.warnings():
        print(f"Warning: {warning}")
    labels, predictions, names = measured.targets, measured.predictions, measured.class_names
    if not len(names) or not len(labels):
        return []
    drawn = [workdir / CONFUSION]
    with _after_the_record(workdir):
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
    """Writes the statement, and then the record, which marks the run as ended."""
    files.write(workdir / STATEMENT, record.statement().encode(), mode=0o644)
    record.save(workdir / records.FILE)


def print_record(record):
    """Prints the statement and the results of a record."""
    print("\n".join(map(printable, record.statement().split("\n"))))
    print_table(record.view(), title=f"{record.results['model']} on {record.data.name}")


def write_page(folder: str | os.PathLike) -> None:
    """Writes `attack.png`, `report.html` and `model_card.md` from the record of a finished run.

    Args:
        folder: Path of the folder with `record.json` and pictures.

    Raises:
        OSError: If the folder has no record because its run is unfinished, or the page cannot be
            written, for example because the disk is full.
        ValueError: If the record is damaged.
    """
    folder = pathlib.Path(folder)
    record = records.read(folder / records.FILE)
    bounds = record.attack_bounds()
    with _after_the_record(folder):
        if bounds and record.ledger.steps and record.epsilon < math.inf:
            pictures.attack_curve({"no attack is above": bounds}, folder / ATTACK)
        files.write(folder / FILE, page(record, pictures_of(folder)), mode=0o644)
        # The name of a file may have bytes that are not characters.
        card = model_card.text(record).encode("utf-8", "backslashreplace")
        files.write(folder / model_card.FILE, card, mode=0o644)
