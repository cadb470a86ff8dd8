"""What a finished run writes: model, record and statement, then pictures, and the page of all."""

import numpy as np

from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.sampling.examples import as_examples
from tfdpx.train.report import page, pictures
from tfdpx.train.report.record import print_table
from tfdpx.train.run import evaluation

_MOST_WRONG = 12


def write(record, model, data, measured, rows, workdir, public_test=False):
    """Writes everything to the working directory, pictures last, and prints statement and table.

    Args:
        record: `tfdpx.accounting.record.Record`, of which the model gets a copy.
        model: A `keras.Model` that was never compiled: a .keras file of a compiled model holds the
            optimizer, whatever `include_optimizer` says.
        data: `images.ImageData`.
        measured: `evaluation.Measured`.
        rows: The rows of `curve.Curve`. Without accuracy in them there is no learning curve.
        workdir: `pathlib.Path`.
        public_test: Bool, see `draw_measured`.
    """
    save_model(model, record, workdir)
    write_record(record, workdir)
    drawn = [workdir / page.CURVE, workdir / page.CONFUSION]
    rows = [row for row in rows if "accuracy" in row]
    if rows:
        pictures.learning_curve(rows, drawn[0], data.eval_split)
    else:
        drawn.pop(0).unlink(missing_ok=True)
    draw_measured(data, measured.labels, measured.predictions, workdir, public_test)
    pictures.write_to_tensorboard(
        drawn, workdir / "tensorboard" / "pictures", record.results["steps"]
    )
    page.write_page(workdir)


def draw_measured(data, labels, predictions, workdir, public_test=False):
    """Draws the confusion matrix and, of public test images alone, some that were taken wrong.

    Args:
        data: `images.ImageData`.
        labels: Integer labels of its examples to measure on.
        predictions: Predicted labels of these.
        workdir: `pathlib.Path`.
        public_test: Bool, see `evaluation.is_public`.
    """
    pictures.confusion_matrix(labels, predictions, data.class_names, workdir / page.CONFUSION)
    wrong = np.flatnonzero(np.not_equal(labels, predictions))
    if not evaluation.is_public(data, public_test) or not len(wrong):
        (workdir / page.WRONG).unlink(missing_ok=True)
        return
    rows = wrong[np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST_WRONG)).astype(int)]
    images, _, _ = as_examples(*data.eval_examples).batch(rows, len(rows))
    shown = (labels[rows], predictions[rows], data.class_names, workdir / page.WRONG)
    pictures.wrong_predictions(np.asarray(images), *shown)


def save_model(model, record, workdir):
    """Saves the model, with the record inside: there is no file of weights that says nothing."""
    with files.replacing(workdir / "model.keras", mode=0o644) as fresh:
        model.save(fresh)
        record.save(fresh)


def write_record(record, workdir):
    """Writes the statement, and then the record: that the run has ended. Prints both."""
    text = record.statement()
    files.write(workdir / page.STATEMENT, text.encode(), mode=0o644)
    record.save(workdir / records.FILE)
    print(text)
    print_table(record.view(), title=f"{record.results['model']} on {record.data.name}")
