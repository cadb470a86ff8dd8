"""CSV and Parquet files as columns of numbers and texts, read by pyarrow.

The names and the types of columns are public, and what cannot be a type's value is refused here.
No error quotes a value.
"""

import pathlib

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet, types

from tfdpx.train.errors import UserError, did_you_mean

NUMBER, BOOLEAN, CATEGORY = "number", "boolean", "category"
MISSING = "(missing)"  # The category of fields without a text.
_AS = {NUMBER: pa.float64(), BOOLEAN: pa.bool_(), CATEGORY: pa.string()}
_ONE_BLOCK = 2**30  # Types are inferred from the first block of a file.
_DELIMITERS = ",;\t|"


def read(path, kinds=None, flag="dataset"):
    """A file as a `pyarrow.Table`.

    Args:
        path: `pathlib.Path`; a name that ends in .parquet is of Parquet, any other CSV.
        kinds: Optional dict from the columns to read to `NUMBER`, `BOOLEAN` or `CATEGORY`. Others
            have the type that all their values have.
        flag: The flag that names it, for errors.

    Raises:
        UserError: If it cannot be read, or names of columns are missing or double.
    """
    kinds = kinds or {}
    wanted = {name: _AS[kind] for name, kind in kinds.items()}
    where, unfit = f"--{flag}={path}", []

    def refuse(row):
        unfit.append(row)
        return "error"

    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            table = csv.read_csv(
                path,
                # Threads would not know the number of a row.
                read_options=csv.ReadOptions(block_size=_ONE_BLOCK, use_threads=False),
                parse_options=csv.ParseOptions(
                    delimiter=_delimiter(path), newlines_in_values=True, invalid_row_handler=refuse
                ),
                convert_options=csv.ConvertOptions(column_types=wanted, strings_can_be_null=True),
            )
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        text = str(error).partition(": invalid value")[0]
        if unfit:
            row = unfit[0]
            text = f"row {row.number} has {row.actual_columns} values for {row.expected_columns} "
            text += "columns. Correct its separators and quotes."
        raise UserError(f"Cannot read {where}: {text}") from error
    names = table.column_names
    double = sorted({name for name in names if names.count(name) > 1 or not name.strip()})
    if double:
        raise UserError(
            f"The first line of {where} must give every column a name of its own. Received: "
            f"{', '.join(map(repr, double))}, double or empty. (Of pandas: to_csv(index=False).)"
        )
    if missing := [name for name in wanted if name not in names]:
        raise UserError(
            f"There is no column {missing[0]!r} in {where}.{did_you_mean(missing[0], names)} "
            f"Columns are: {', '.join(names[:30])}."
        )
    if not table.num_rows:
        raise UserError(f"There is no row in {where}.")
    try:
        for name, kind in wanted.items():
            table = table.set_column(names.index(name), name, table[name].cast(kind, safe=False))
    except pa.ArrowException as error:
        raise UserError(f"Column {name!r} of {where} is not of {kinds[name]} values.") from error
    return table


def kind_of(table, name):
    """The kind of a column.

    Args:
        table: `pyarrow.Table`.
        name: String.

    Raises:
        UserError: If there is no rule for its type.
    """
    kind = table.schema.field(name).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    remedy = f"Leave it out: --drop={name}."
    if types.is_boolean(kind):
        return BOOLEAN
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return NUMBER
    if types.is_string(kind) or types.is_large_string(kind):
        return CATEGORY
    if types.is_temporal(kind):
        remedy = f"Replace it by numbers, such as days since a public date, or --drop={name}."
    if types.is_binary(kind) or types.is_large_binary(kind):
        remedy = f"Save the file as UTF-8, or --drop={name}."
    what = "empty" if types.is_null(kind) else f"of type {kind}"
    raise UserError(
        f"Column {name!r} is {what}, and columns are numbers, booleans or texts. {remedy}"
    )


def values(table, name, kind):
    """A column as an array `[rows]`: float64 with NaN, or texts with `MISSING`.

    Args:
        table: `pyarrow.Table`.
        name: String.
        kind: `NUMBER`, `BOOLEAN` or `CATEGORY`.
    """
    column = table[name]
    if kind == CATEGORY:
        return np.array([v or MISSING for v in column.cast(pa.string()).to_pylist()])
    if kind == BOOLEAN:
        column = column.cast(pa.int8())
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def path_of(dataset):
    """The file of `--dataset=csv:PATH` or `parquet:PATH`.

    Raises:
        UserError: If its name does not say the same.
    """
    kind, _, text = dataset.partition(":")
    path = pathlib.Path(text).expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {path}. Received: --dataset={dataset}.")
    if (kind == "parquet") != (path.suffix == ".parquet"):
        raise UserError(
            f"A file that ends in .parquet is named parquet:PATH, others csv:PATH. Received: "
            f"--dataset={dataset}."
        )
    return path


def _delimiter(path):
    """Whichever is most frequent in the first line."""
    with path.open(encoding="utf-8-sig") as file:
        line = file.readline()
    return max(_DELIMITERS, key=line.count)
