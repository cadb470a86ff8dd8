"""What a trained model makes of new rows of a table."""

import csv
import io
import pathlib

from keras import ops

from tfdpx import _files
from tfdpx.accounting import record as records
from tfdpx.train.errors import UserError
from tfdpx.train.run import finetuning
from tfdpx.train.tables import preprocessing, reading


def run_on(model, rows, path, all_classes=False):
    """Predicts rows of a file, and writes a CSV file with a line for each, in their order.

    Args:
        model: String, a file that `finetuning.model_file` found.
        rows: String, a CSV or Parquet file with the columns that the model was trained on.
        path: String, the file to write.
        all_classes: Bool, whether it gets the probability of every class.

    Returns:
        Dict for the last line.

    Raises:
        UserError: If the model is of no table, or a column is missing or of another kind.
    """
    try:
        record = records.read(model)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read --model={model}: {error}") from error
    if record is None or "columns" not in (record.inputs or {}):
        raise UserError(
            f"Flag --rows needs a model of a table, as classify --dataset=csv:PATH writes it. "
            f"Received: --model={model}."
        )
    kinds, names = record.inputs["columns"], record.inputs["class_names"]
    file = pathlib.Path(rows).expanduser()
    if not file.is_file():
        raise UserError(f"There is no file at --rows={rows}.")
    table = reading.read(file, kinds, flag="rows")
    values = {name: reading.values(table, name, kind) for name, kind in kinds.items()}
    found = preprocessing.predict(finetuning.read(model, "model"), values)
    header, lines = [record.inputs["target"]], [[f"{value:.6g}"] for value in found[:, 0]]
    if names:
        shares = ops.convert_to_numpy(ops.softmax(found))
        header = [*header, "probability", *(names if all_classes else ())]
        lines = [
            [names[row.argmax()], *(f"{s:.6f}" for s in (row.max(), *(row if all_classes else ())))]
            for row in shares
        ]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *lines])
    try:
        _files.write(pathlib.Path(path).expanduser(), text.getvalue().encode(), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={path}: {error}.") from error
    return {"rows": len(lines), "model": model, "csv": path}
