"""Predicts the classes of images, or the target of rows of a table, with a trained model.

    python -m tfdpx.train.predict --model=RUN --images=PATH
    python -m tfdpx.train.predict --model=RUN --rows=NEW.csv

RUN is the working folder of a run of `tfdpx.train.classify`, or a .keras file that `classify`
wrote. PATH is an image, or a folder; subfolders are searched, too. The first command prints a
table, and writes a CSV file with the columns file, class and probability. With --all_classes the
file also has the probability of each class. The second command is for models of tables. It writes a
line for each row of a CSV or Parquet file.

If a text begins with =, +, -, @, a tab or a carriage return, a spreadsheet runs it as a formula. So
the CSV file has an apostrophe before such a text, unless the text is a number. Predictions for
private images and rows are private, too.
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import collections
import csv
import io
import pathlib

import numpy as np
from absl import flags

from tfdpx import _files
from tfdpx.report import measure
from tfdpx.tables import estimators
from tfdpx.train import start_from
from tfdpx.train.data import tables
from tfdpx.train.data.folder import SUFFIXES, check, find
from tfdpx.train.data.images import decode
from tfdpx.train.errors import UserError, in_one_line, start_program
from tfdpx.train.output import of_spreadsheet, print_rows, to_json

_BATCH_SIZE = 256
_MOST_ROWS = 50  # The largest number of rows to print.


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("model", None, "Working folder of a run, or a .keras file.", **common)
    flags.DEFINE_string("images", None, "An image, or a folder of images, at any depth.", **common)
    flags.DEFINE_string("rows", None, "A CSV or Parquet file with rows of a table.", **common)
    flags.DEFINE_string("csv", "predictions.csv", "File to write, or to replace.", **common)
    flags.DEFINE_bool("skip_broken", False, "Leave out broken images, and count them.", **common)
    flags.DEFINE_bool("all_classes", False, "Write the probability of every class.", **common)
    threshold = "For two classes: replaces the --threshold of the training."
    flags.DEFINE_float("threshold", None, threshold, 1e-9, 1 - 1e-9, **common)


def main(argv, values=flags.FLAGS):
    """Makes the predictions that the flags describe. A `UserError` is printed as one line."""
    with in_one_line("tfdpx.train.predict", argv):
        record = run(values)
    print(to_json(record), flush=True)


def run(values):
    """Predicts, prints the table, and writes the file. Returns the last line to print, a dict."""
    if not values.model or bool(values.images) == bool(values.rows):
        raise UserError(
            "Flags --model and one of --images and --rows must be given: --model=RUN "
            f"--images=PATH. Received: --model={values.model} --images={values.images} "
            f"--rows={values.rows}."
        )
    path = start_from.model_file(values.model, "model", (".keras",))
    csv_path = pathlib.Path(values.csv).expanduser()
    answer = (_of_rows if values.rows else _of_images)(path, values, csv_path)
    return {**answer, "model": path, "csv": str(csv_path)}


def _of_images(path, values, csv_path):
    takes = start_from.image_input(path)
    if values.threshold is not None:
        start_from.check_threshold(values.threshold, takes.class_names)
    folder = pathlib.Path(values.images).expanduser()
    files, left_out = _readable(folder, values.skip_broken)
    outputs = logits(start_from.read(path, "model"), takes, files)
    threshold = values.threshold or takes.threshold
    columns, lines = classified(outputs, takes.class_names, threshold, values.all_classes)
    rows = [[str(file), *line] for file, line in zip(files, lines, strict=True)]
    write(csv_path, ["file", "class", *columns], rows)
    if folder.is_dir():
        rows = [[str(f.relative_to(folder)), *row[1:]] for f, row in zip(files, rows, strict=True)]
    print_table(rows, csv_path)
    classes = dict(sorted(collections.Counter(name for name, *_ in lines).items()))
    return {"images": len(files), "left_out": left_out, "classes": classes}


def _of_rows(path, values, csv_path):
    recorded = start_from.recorded_inputs(path)
    if "columns" not in recorded:
        raise UserError(
            f"Flag --rows needs a model of a table, as classify --dataset=csv:PATH writes it. "
            f"Received: --model={path}."
        )
    names = recorded["class_names"]
    if values.threshold is not None:
        start_from.check_threshold(values.threshold, names)
    examples = tables.read_columns(values.rows, recorded["columns"])
    outputs = estimators.predict(start_from.read(path, "model"), examples)
    columns, rows = [], [[f"{value:.6g}"] for value in outputs[:, 0]]
    if names:
        threshold = values.threshold or recorded["threshold"]
        columns, rows = classified(outputs, names, threshold, values.all_classes)
    write(csv_path, [recorded["target"], *columns], rows)
    return {"rows": len(outputs)}


def logits(model, takes, files):
    """Returns the logits of the classes, float32 `[images, classes]`.

    Args:
        model: A `keras.Model` from uint8 images to logits.
        takes: `start_from.ImageInput`.
        files: List of `pathlib.Path` of images that can be read.
    """
    parts = []
    for start in range(0, len(files), _BATCH_SIZE):
        encoded = [file.read_bytes() for file in files[start : start + _BATCH_SIZE]]
        batch = np.stack([decode(image, takes.image_shape, takes.center_crop) for image in encoded])
        parts.append(np.asarray(model.predict_on_batch(batch), "float32"))
    return np.concatenate(parts)


def classified(outputs, class_names, threshold, all_classes=False):
    """Returns a table of predicted classes and their probabilities.

    Args:
        outputs: Logits `[n, classes]`.
        class_names: Names of the classes.
        threshold: Float, see `measure.predicted_classes`.
        all_classes: Bool, whether to add the probability of every class.

    Returns:
        Two lists: the names of the columns, and a list of strings for each row. A row has the
        predicted class, its probability and, with `all_classes`, the probabilities of all classes.
    """
    classes, rows = measure.predicted_classes(outputs, threshold), []
    for index, shares in zip(classes, measure.probabilities(outputs), strict=True):
        numbers = [shares[index], *(shares if all_classes else ())]
        rows.append([class_names[index], *(f"{share:.6f}" for share in numbers)])
    return ["probability", *(class_names if all_classes else ())], rows


def print_table(rows, csv_path):
    """Prints the first rows (file, class, probability), and the path of the full table."""
    shown = [[file, name, f"{float(share):.3f}"] for file, name, share, *_ in rows[:_MOST_ROWS]]
    print_rows(("file", "class", "probability"), shown)
    more = f"{len(rows) - _MOST_ROWS:,} more are" if len(rows) > _MOST_ROWS else "The same table is"
    print(f"{more} in {csv_path}.")


def write(path, columns, rows):
    """Writes a CSV file, completely or not at all.

    Args:
        path: `pathlib.Path`.
        columns: List of strings, the names of the columns.
        rows: List of rows, each a list of strings.

    Raises:
        UserError: If the file cannot be written.
    """
    content = io.StringIO(newline="")
    csv.writer(content).writerows([map(of_spreadsheet, row) for row in (columns, *rows)])
    try:
        # File names are written unchanged, even if they are not valid UTF-8.
        _files.write(path, content.getvalue().encode(errors="surrogateescape"), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={path}: {error}.") from error


def _readable(path, skip_broken):
    """Returns the readable images under a path, and the number of broken images left out."""
    if not path.exists():
        raise UserError(f"There is nothing at --images={path}. Name a folder or a file.")
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
    start_program(main)
