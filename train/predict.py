"""Says what a trained model makes of images, or of rows of a table.

    python -m tfdpx.train.predict --model=RUN --images=PATH
    python -m tfdpx.train.predict --model=RUN --rows=NEW.csv

RUN is the working folder of `tfdpx.train.classify` (or `pretrain`), or a .keras file that it wrote;
PATH an image, or a folder that is searched at any depth. Prints a table and writes a CSV file with
the columns file, class, probability; with --all_classes also the probability of each class. Of a
model of a table the second writes a line for each row of a CSV or Parquet file. What is printed or
written of private images and rows is private.
"""

import collections
import csv
import io
import pathlib

import keras
import numpy as np
from absl import app, flags
from rich import console, table, text

from tfdpx import _files
from tfdpx.train.data.folder import SUFFIXES, Files, check, find
from tfdpx.train.data.images import Images
from tfdpx.train.errors import UserError, in_one_line, printable
from tfdpx.train.report.record import to_json
from tfdpx.train.run import finetuning, image_input

_BATCH_SIZE = 256
_MOST_ROWS = 50  # Of the table that is printed.


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("model", None, "Working folder of a run, or a .keras file.", **common)
    flags.DEFINE_string("images", None, "An image, or a folder of images at any depth.", **common)
    flags.DEFINE_string("rows", None, "A CSV or Parquet file of new rows of a table.", **common)
    flags.DEFINE_string(
        "csv", "predictions.csv", "File to write; an earlier one is replaced.", **common
    )
    flags.DEFINE_bool(
        "skip_broken", False, "Leave out images that cannot be read, and count them.", **common
    )
    flags.DEFINE_bool("all_classes", False, "Write the probability of every class.", **common)


def main(argv, values=flags.FLAGS):
    """Does what the flags describe; errors of the user become one line."""
    with in_one_line("tfdpx.train.predict", argv):
        record = run(values)
    print(to_json(record), flush=True)


def run(values):
    """Predicts, prints the table, writes the file, and returns what the last line says, a dict."""
    if not values.model or bool(values.images) == bool(values.rows):
        raise UserError(
            "Flags --model and one of --images and --rows must be given: --model=RUN "
            f"--images=PATH. Received: --model={values.model} --images={values.images} "
            f"--rows={values.rows}."
        )
    path = finetuning.model_file(values.model, "model", (".keras",))
    if values.rows:
        from tfdpx.train.tables import prediction  # On the call: images need no pyarrow.

        return prediction.run_on(path, values.rows, values.csv, values.all_classes)
    takes = image_input.read(path)
    folder, csv_path = (pathlib.Path(p).expanduser() for p in (values.images, values.csv))
    files, left_out = _readable(folder, values.skip_broken)
    found = probabilities(finetuning.read(path, "model"), takes, files)
    names = [takes.class_names[index] for index in found.argmax(axis=1)]
    write(csv_path, files, names, found, takes.class_names if values.all_classes else ())
    print_table(_below(folder, files), names, found.max(axis=1), csv_path)
    return {
        "images": len(files),
        "left_out": left_out,
        "classes": dict(sorted(collections.Counter(names).items())),
        "model": path,
        "csv": str(csv_path),
    }


def probabilities(model, takes, files):
    """Probabilities of the classes, float32 `[images, classes]`.

    Args:
        model: A `keras.Model` from uint8 images to logits.
        takes: `image_input.ImageInput`.
        files: List of `pathlib.Path`, each of an image that can be read.
    """
    records = Files([(file, 0) for file in files])
    images = Images(records, range(len(files)), takes.image_shape, 0, 1, takes.center_crop)
    found = []
    for start in range(0, len(files), _BATCH_SIZE):
        rows = range(start, min(start + _BATCH_SIZE, len(files)))
        batch = np.stack([image for image, _ in images.__getitems__(rows)])
        logits = np.asarray(model.predict_on_batch(batch), "float32")
        found.append(np.asarray(keras.ops.softmax(logits)))
    return np.concatenate(found)


def print_table(files, names, shares, csv_path):
    """Prints file, class and probability of the first images, and where the others are."""
    rows = table.Table()
    for title in ("file", "class", "probability"):
        rows.add_column(title, overflow="fold")
    for file, name, share in list(zip(files, names, shares, strict=True))[:_MOST_ROWS]:
        # Names of files may hold what looks like markup.
        rows.add_row(text.Text(printable(file)), text.Text(name), f"{share:.3f}")
    console.Console().print(rows)
    more = f"{len(files) - _MOST_ROWS:,} more are" if len(files) > _MOST_ROWS else "The same is"
    print(f"{more} in {csv_path}.")


def write(path, files, names, found, class_names=()):
    """Writes the CSV file, whole or not at all.

    Args:
        path: `pathlib.Path`.
        files: List of `pathlib.Path`.
        names: List of the names of their classes.
        found: Probabilities `[images, classes]`.
        class_names: Names of the classes, for a column each; none by default.

    Raises:
        UserError: If it cannot be written.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["file", "class", "probability", *class_names])
    for name, label, row in zip(files, names, found, strict=True):
        shares = row if class_names else ()
        writer.writerow([name, label, *(f"{share:.6f}" for share in (row.max(), *shares))])
    try:
        # Names of files need not be UTF-8; they are written as they are.
        _files.write(path, text.getvalue().encode(errors="surrogateescape"), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={path}: {error}.") from error


def _below(folder, files):
    """The files as they are called below the folder that was searched."""
    return [file.relative_to(folder) if file != folder else file for file in files]


def _readable(path, skip_broken):
    """The images under a path, and how many broken ones were left out."""
    if not path.exists():
        raise UserError(f"There is nothing at --images={path}.")
    files = find(path)[0] if path.is_dir() else [path]
    folder = path if path.is_dir() else path.parent
    readable, broken = check(files, folder, f"--images={path}", skip_broken)
    if not readable:
        raise UserError(
            f"There is no image that can be read under --images={path}. Suffixes are "
            f"{', '.join(SUFFIXES)}. Broken: {len(broken)}."
        )
    return [each.file for each in readable], len(broken)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
