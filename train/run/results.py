"""What a finished run writes: the model, its record, the statement, and then the pictures."""

from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.train.report import pictures
from tfdpx.train.report.record import print_table


def write(record, model, data, measured, rows, workdir):
    """Writes everything to the working directory, pictures last, and prints statement and table.

    Args:
        record: `tfdpx.accounting.record.Record`, of which the model gets a copy.
        model: A `keras.Model` that was never compiled: a .keras file of a compiled model holds the
            optimizer, whatever `include_optimizer` says.
        data: `loading.ImageData`.
        measured: `evaluation.Measured`.
        rows: Those of `curve.Curve`.
        workdir: `pathlib.Path`.
    """
    save_model(model, record, workdir)
    write_record(record, workdir)
    names = ("learning_curve.png", "confusion_matrix.png")
    pictures.learning_curve(rows, workdir / names[0], data.eval_split)
    pictures.confusion_matrix(
        measured.labels, measured.predictions, data.class_names, workdir / names[1]
    )
    pictures.write_to_tensorboard(
        [workdir / name for name in names],
        workdir / "tensorboard" / "pictures",
        record.results["steps"],
    )


def save_model(model, record, workdir):
    """Saves the model, with the record inside: there is no file of weights that says nothing."""
    with files.replacing(workdir / "model.keras", mode=0o644) as fresh:
        model.save(fresh)
        record.save(fresh)


def write_record(record, workdir):
    """Writes the statement, and then the record: that the run has ended. Prints both."""
    text = record.statement()
    files.write(workdir / "privacy_statement.txt", text.encode(), mode=0o644)
    record.save(workdir / records.FILE)
    print(text)
    print_table(record.view(), title=f"{record.results['model']} on {record.data.name}")
