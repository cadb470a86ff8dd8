"""The learning curve of a run, kept in a file so that a resumed run draws all of it."""

import json
import pathlib

import keras

from tfdpx import _files as files
from tfdpx.accounting.spent import NOTHING
from tfdpx.train.report.record import to_json
from tfdpx.training.callbacks import epsilon_spent, steps_taken
from tfdpx.training.session import after_save


class Curve(keras.callbacks.Callback):
    """Writes accuracy and epsilon after every Keras epoch, one JSON object a line.

    A row is written once a `Checkpoint` of the same `fit`, if there is one, holds its update.

    Args:
        path: File to write.
        plan: `tfdpx.PrivacyPlan` that says how much of the budget is spent.
        steps: Updates that the restored model has taken; later rows of the file are dropped.
        before: `Spent` on the same data before the run.

    Attributes:
        rows: List of dicts with `step` (model updates), `epsilon` (spent after them) and `accuracy`
            (on the validation data given to `fit`).
    """

    def __init__(self, path, plan, steps, before=NOTHING):
        super().__init__()
        self._path = pathlib.Path(path)
        self._plan, self._before = plan, before
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [{**row, "epsilon": float(row["epsilon"])} for row in map(json.loads, lines)]
        self.rows = [row for row in rows if row["step"] <= steps]

    def on_epoch_end(self, epoch, logs=None):
        """Appends a row; `logs` must hold `val_accuracy`."""
        del epoch
        steps = steps_taken(self.model.optimizer)
        self.rows.append(
            {
                "step": steps,
                "epsilon": epsilon_spent(self.model.optimizer, self._plan, self._before),
                "accuracy": float(logs["val_accuracy"]),
            }
        )
        after_save(self.model, self._write)

    def _write(self):
        lines = "".join(to_json(row) + "\n" for row in self.rows)
        files.write(self._path, lines.encode(), mode=0o644)
