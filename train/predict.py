"""Predicts the classes of images, or the target of rows of a table, with a trained model.

    python -m tfdpx.train.predict --model=RUN --images=PATH
    python -m tfdpx.train.predict --model=RUN --rows=NEW.csv

RUN is the working folder of `tfdpx.train.classify`, or a .keras file that it wrote;
PATH is an image, or a folder to search at any depth. Prints a table and writes a CSV file with the
columns file, class and probability; with --all_classes also the probability of each class. The
second command is for models of tables, and writes a line for each row of a CSV or Parquet file.
A name that begins with =, +, -, @, a tab or a carriage return, and is no number, gets an apostrophe
in front: spreadsheets would run it as a formula. Predictions for private images and rows
are private.
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import collections
import csv
import io
import pathlib

import numpy as np
from absl import app, flags

from tfdpx import _files
from tfdpx.report import measure
from tfdpx.tables import estimators
from tfdpx.train import start_from
from tfdpx.train.data import tables
from tfdpx.train.data.folder import SUFFIXES, check, find
from tfdpx.train.data.images import decode
from tfdpx.train.errors import UserError, in_one_line, parse_flags
from tfdpx.train.output import of_spreadsheet, print_rows, to_json
from tfdpx.train.start_from import check_threshold

_BATCH_SIZE = 256
_MOST_ROWS = 50  # Rows of the table that is printed.


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("model", None, "Working folder of a run, or a .keras file.", **common)
    flags.DEFINE_string("images", None, "An image, or a folder to search at any depth.", **common)
    flags.DEFINE_string("rows", None, "A CSV or Parquet file of new rows of a table.", **common)
    flags.DEFINE_string("csv", "predictions.csv", "File to write, or to replace.", **common)
    flags.DEFINE_bool("skip_broken", False, "Leave out broken images, and count them.", **common)
    flags.DEFINE_bool("all_classes", False, "Write the probability of every class.", **common)
    threshold = "For two classes: replaces the --threshold that the training recorded."
    flags.DEFINE_float("threshold", None, threshold, 1e-9, 1 - 1e-9, **common)


def main(argv, values=flags.FLAGS):
    """Predicts as the flags ask; errors of the user become one line."""
    with in_one_line("tfdpx.train.predict", argv):
        record = run(values)
    print(to_json(record), flush=True)


def run(values):
    """Predicts, prints the table, writes the file, and returns the last line, a dict."""
    if not values.model or bool(values.images) == bool(values.rows):
        raise UserError(
            "Flags --model and one of --images and --rows must be given: --model=RUN "
            f"--images=PATH. Received: --model={values.model} --images={values.images} "
            f"--rows={values.rows}."
        )
    path = start_from.model_file(values.model, "model", (".keras",))
    if values.rows:
        asked = (values.all_classes, values.threshold)
        return predict_rows(path, values.rows, values.csv, *asked)
    takes = start_from.image_input(path)
    if values.threshold is not None:
        check_threshold(values.threshold, takes.class_names)
    folder, csv_path = (pathlib.Path(p).expanduser() for p in (values.images, values.csv))
    files, left_out = _readable(folder, values.skip_broken)
    outputs = logits(start_from.read(path, "model"), takes, files)
    classes = measure.predicted_classes(outputs, values.threshold or takes.threshold)
    names, shares = [takes.class_names[i] for i in classes], measure.probabilities(outputs)
    largest = shares[np.arange(len(files)), classes]
    write(csv_path, files, names, largest, shares, takes.class_names if values.all_classes else ())
    if folder.is_dir():
        files = [file.relative_to(folder) for file in files]
    print_table(files, names, largest, csv_path)
    return {
        "images": len(files),
        "left_out": left_out,
        "classes": dict(sorted(collections.Counter(names).items())),
        "model": path,
        "csv": str(csv_path),
    }


def logits(model, takes, files):
    """Returns the logits of the classes, float32 `[images, classes]`.

    Args:
        model: A `keras.Model` from uint8 images to logits.
        takes: `returned by `start_from.image_input``.
        files: List of `pathlib.Path` of images that can be read.
    """
    parts = []
    for start in range(0, len(files), _BATCH_SIZE):
        encoded = [file.read_bytes() for file in files[start : start + _BATCH_SIZE]]
        batch = np.stack([decode(image, takes.image_shape, takes.center_crop) for image in encoded])
        parts.append(np.asarray(model.predict_on_batch(batch), "float32"))
    return np.concatenate(parts)


def print_table(files, names, shares, csv_path):
    """Prints file, class and probability of the first images, and the path of the full table."""
    rows = list(zip(map(str, files), names, [f"{share:.3f}" for share in shares], strict=True))
    print_rows(("file", "class", "probability"), rows[:_MOST_ROWS])
    more = f"{len(files) - _MOST_ROWS:,} more are" if len(files) > _MOST_ROWS else "The same is"
    print(f"{more} in {csv_path}.")


def write(path, files, names, predicted, shares, class_names=()):
    """Writes the CSV file of images, completely or not at all.

    Args:
        path: `pathlib.Path`.
        files: List of `pathlib.Path`.
        names: List of the names of the predicted classes.
        predicted: Probabilities of these, `[images]`.
        shares: Probabilities `[images, classes]`.
        class_names: Names of the classes, to write a column for each; empty by default.

    Raises:
        UserError: If the file cannot be written.
    """
    lines = [["file", "class", "probability", *map(of_spreadsheet, class_names)]]
    for file, name, share, row in zip(files, names, predicted, shares, strict=True):
        columns = [share, *(row if class_names else ())]
        texts = map(of_spreadsheet, (str(file), name))
        lines.append([*texts, *(f"{share:.6f}" for share in columns)])
    _write_lines(path, lines)


def predict_rows(model_path, rows_path, csv_path, all_classes=False, threshold=None):
    """Predicts the rows of a file, and writes a CSV file with a line for each row, in order.

    Args:
        model_path: String, a .keras file.
        rows_path: String, a CSV or Parquet file with the columns that the model was trained on.
        csv_path: String, the file to write.
        all_classes: Bool, whether to write the probability of every class.
        threshold: Float, see `measure.predicted_classes`; None for the recorded threshold.

    Returns:
        Dict for the last line of the output.

    Raises:
        UserError: If the model is not for a table, or a column is missing or of another kind.
    """
    recorded = start_from.recorded_inputs(model_path)
    if "columns" not in recorded:
        raise UserError(
            f"Flag --rows needs a model of a table, as classify --dataset=csv:PATH writes it. "
            f"Received: --model={model_path}."
        )
    if threshold is not None:
        check_threshold(threshold, recorded["class_names"])
    columns = tables.read_columns(rows_path, recorded["columns"])
    outputs = estimators.predict(start_from.read(model_path, "model"), columns)
    names = [of_spreadsheet(name) for name in recorded["class_names"]]
    lines = [[of_spreadsheet(recorded["target"])]]
    if names:
        lines[0] += ["probability", *(names if all_classes else ())]
        classes = measure.predicted_classes(outputs, threshold or recorded["threshold"])
        for index, shares in zip(classes, measure.probabilities(outputs), strict=True):
            columns = [shares[index], *(shares if all_classes else ())]
            lines.append([names[index], *(f"{share:.6f}" for share in columns)])
    else:
        lines += [[f"{value:.6g}"] for value in outputs[:, 0]]
    _write_lines(pathlib.Path(csv_path).expanduser(), lines)
    return {"rows": len(outputs), "model": model_path, "csv": csv_path}


def _write_lines(path, lines):
    """Writes lists of texts as a CSV file."""
    content = io.StringIO(newline="")
    csv.writer(content).writerows(lines)
    try:
        # Names of files are written unchanged, even if they are not UTF-8.
        _files.write(path, content.getvalue().encode(errors="surrogateescape"), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={path}: {error}.") from error


def _readable(path, skip_broken):
    """Returns the images under a path, and the number of broken ones that were left out."""
    if not path.exists():
        raise UserError(f"There is nothing at --images={path}.")
    files, folder = (find(path)[0], path) if path.is_dir() else ([path], path.parent)
    readable, broken = check(files, folder, f"--images={path}", skip_broken)
    if not readable:
        raise UserError(
            f"There is no image that can be read under --images={path}. Suffixes are "
            f"{', '.join(SUFFIXES)}. Broken: {len(broken)}."
        )
    return [image.file for image in readable], len(broken)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=parse_flags)
