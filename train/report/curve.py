"""The learning curve of a run, kept in a file so that a resumed run draws all of it."""

import json
import pathlib

import keras

from tfdpx import _files as files
from tfdpx._keras import model_internals
from tfdpx.accounting.ledger import EMPTY
from tfdpx.checks.callbacks import is_covered
from tfdpx.train.report.record import to_json
from tfdpx.training.callbacks import epsilon_spent, steps_taken
from tfdpx.training.session import after_save


class Curve(keras.callbacks.Callback):
    """Writes epsilon and, on public examples, accuracy after every Keras epoch as a line of JSON.

    A row is written once a `Checkpoint` of the same `fit`, if there is one, holds its update.

    Args:
        path: File to write.
        plan: `tfdpx.PrivacyPlan` that says how much of the budget is spent.
        steps: Updates that the restored model has taken; later rows of the file are dropped.
        before: `Ledger` of the same data before the run.

    Attributes:
        rows: List of dicts with `step` (model updates), `epsilon` (spent after them) and, if the
            optimizer has `public_validation=True` or no noise, `accuracy` (on the validation data
            given to `fit`).
    """

    def __init__(self, path, plan, steps, before=EMPTY):
        super().__init__()
        self._path = pathlib.Path(path)
        self._plan, self._before = plan, before
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [{**row, "epsilon": float(row["epsilon"])} for row in map(json.loads, lines)]
        self.rows = [row for row in rows if row["step"] <= steps]

    def on_epoch_end(self, epoch, logs=None):
        """Appends a row; `logs` must hold `val_accuracy`."""
        del epoch
        optimizer = self.model.optimizer
        row = {
            "step": steps_taken(optimizer),
            "epsilon": epsilon_spent(optimizer, self._plan, self._before),
        }
        if is_covered("val_accuracy", model_internals.innermost(optimizer)):
            row["accuracy"] = float(logs["val_accuracy"])
        self.rows.append(row)
        after_save(self.model, self._write)

    def _write(self):
        lines = "".join(to_json(row) + "\n" for row in self.rows)
        files.write(self._path, lines.encode(), mode=0o644)
