"""Tables to train on: CSV and Parquet files as columns of numbers and texts.

Names and types of columns are public, so errors name them. No error quotes a value. Importing
pyarrow takes most of a second, so that it is imported where a table is read.
"""

import collections
import dataclasses
import hashlib
import pathlib
import re

import numpy as np

from tfdpx.train.errors import UserError, did_you_mean

NUMBER, BOOLEAN, CATEGORY = "number", "boolean", "category"
MISSING = "(missing)"  # The category of a field without a text.
_DELIMITERS = ",;\t|"
_BLOCK_SIZE = 2**30  # pyarrow infers types from the first block of a file.
_MOST_CLASSES = 100
_MOST_NAMES = 30  # Of columns in an error.
# A column of at least so many texts that nearly all differ names the rows. A column of texts that
# are nearly all dates is of dates.
_FEWEST_NAMES, _NEARLY_ALL = 20, 0.9
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{4})\b")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Attributes:
        columns: Dict from a name to an array `[rows]`: float64 with NaN, or texts.
        target: float32 numbers, or int64 classes `[rows]`.
    """

    columns: dict
    target: np.ndarray

    def __len__(self):
        return len(self.target)

    def __getitem__(self, index):
        columns = {name: values[index] for name, values in self.columns.items()}
        return Rows(columns, self.target[index])


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that was read, with its rows split into training and test rows.

    Attributes:
        kinds: Dict from the columns that the model takes to `NUMBER`, `BOOLEAN` or `CATEGORY`.
        class_names: Tuple with a label for each class; empty for a regression.
        train: `Rows` to train on.
        test: `Rows` to test on.
    """

    kinds: dict
    class_names: tuple
    train: Rows
    test: Rows


def load(settings):
    """Reads the table of a run.

    Args:
        settings: The settings of the run.

    Returns:
        `Table`.

    Raises:
        UserError: If the file cannot be read, or a column cannot be used.
    """
    where, ranges = f"--dataset={settings.dataset}", settings.ranges
    drop, categorical = settings.drop or (), settings.categorical or ()
    bounded = [name for name in ranges if name != "*"]
    source = read(_path_of(settings.dataset), dict.fromkeys(categorical, CATEGORY))
    _require([settings.target, *drop, *bounded], source.column_names, where)
    names = [name for name in source.column_names if name not in (settings.target, *drop)]
    if not names or settings.target in drop:
        raise UserError(
            f"There is nothing to learn from: columns except --target={settings.target} and "
            f"--drop={','.join(drop)} are: {', '.join(names) or 'none'}."
        )
    inputs = collections.Counter(map(input_name, names))
    for name in names:
        if name.startswith("tfdpx.") or "\0" in name or inputs[input_name(name)] > 1:
            raise UserError(
                f"Column {name!r} needs another name. In a model '/' becomes '_', and names must "
                f"differ and not begin with 'tfdpx.'. Rename it, or --drop={name}."
            )
    kinds = {name: _kind_of(name, source[name]) for name in names}
    for name in bounded:
        if kinds.get(name) != NUMBER:
            raise UserError(
                f"Flag --bounds is for columns of numbers that the model takes. Received: {name!r}."
            )
    columns = {name: _values(source[name], kind) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if kind == CATEGORY:
            _check_texts(name, columns[name], name in categorical)
        elif name not in bounded:
            _check_numbers(name, columns[name])
    rows, class_names = _with_target(columns, source[settings.target], settings)
    is_test = _is_test(rows, class_names, settings.test_fraction, settings.test_seed)
    table = Table(kinds, class_names, rows[~is_test], rows[is_test])
    if not len(table.train) or (settings.test_fraction and not len(table.test)):
        raise UserError(
            f"There are too few rows: {len(table.train)} to train on, {len(table.test)} to test "
            f"on. Received: {where} --test_fraction={settings.test_fraction}."
        )
    return table


def read_columns(path, kinds, flag):
    """Reads columns of known kinds, for a model that was trained on them.

    Args:
        path: `pathlib.Path` of a CSV or Parquet file.
        kinds: Dict from columns to kinds, as in `Table`.
        flag: String, the flag that names the file, for errors.

    Returns:
        Dict from a name to an array `[rows]`, as in `Rows`.

    Raises:
        UserError: If the file cannot be read, or a column is missing or of another kind.
    """
    source = read(path, kinds, flag)
    return {name: _values(source[name], kind) for name, kind in kinds.items()}


def read(path, kinds, flag="dataset"):
    """Reads a file.

    Args:
        path: `pathlib.Path`. A name that ends in .parquet is of Parquet, any other CSV.
        kinds: Dict from columns to kinds, as in `Table`. Each other column gets the type that all
            of its values have.
        flag: String, the flag that names the file, for errors.

    Returns:
        `pyarrow.Table`.

    Raises:
        UserError: If the file cannot be read, or a column has no name of its own, is missing or of
            another kind.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    types = {NUMBER: pa.float64(), BOOLEAN: pa.bool_(), CATEGORY: pa.string()}
    column_types = {name: types[kind] for name, kind in kinds.items()}
    where = f"--{flag}={path}"
    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            with path.open(encoding="utf-8-sig") as file:
                delimiter = max(_DELIMITERS, key=file.readline().count)
            table = csv.read_csv(
                path,
                # With threads an error does not give the number of the row.
                csv.ReadOptions(block_size=_BLOCK_SIZE, use_threads=False),
                csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                csv.ConvertOptions(column_types=column_types, strings_can_be_null=True),
            )
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        # pyarrow quotes values at the end of its errors.
        text = re.sub(r"(got \d+): .*|: invalid value.*", r"\1", str(error), flags=re.DOTALL)
        raise UserError(f"Cannot read {where}: {text}.") from error
    names = table.column_names
    if unfit := [name for name in names if names.count(name) > 1 or not name.strip()]:
        raise UserError(
            f"The first line of {where} must give every column a name of its own. Received: "
            f"{unfit[0]!r}, double or empty. (With pandas: to_csv(index=False).)"
        )
    _require(kinds, names, where)
    if not table.num_rows:
        raise UserError(f"There is no row in {where}.")
    for name, column_type in column_types.items():
        try:
            column = table[name].cast(column_type, safe=False)
        except pa.ArrowException as error:
            kind = kinds[name]
            raise UserError(f"Column {name!r} of {where} is not of {kind} values.") from error
        table = table.set_column(names.index(name), name, column)
    return table


def input_name(column):
    """Returns the name of a column's input of a model, because Keras's names have no slash."""
    return column.replace("/", "_")


def _path_of(dataset):
    """The file of `--dataset=csv:PATH` or `parquet:PATH`."""
    kind, _, text = dataset.partition(":")
    path = pathlib.Path(text).expanduser()
    if not path.is_file():
        raise UserError(f"There is no file {path}. Received: --dataset={dataset}.")
    if (kind == "parquet") != (path.suffix == ".parquet"):
        raise UserError(
            "A file that ends in .parquet is named parquet:PATH, any other csv:PATH. Received: "
            f"--dataset={dataset}."
        )
    return path


def _require(wanted, names, where):
    """Refuses columns that are not there."""
    for name in wanted:
        if name not in names:
            raise UserError(
                f"There is no column {name!r} in {where}.{did_you_mean(name, names)} Columns are: "
                f"{', '.join(names[:_MOST_NAMES])}."
            )


def _kind_of(name, column):
    """The kind of a `pyarrow.ChunkedArray`."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_boolean(kind):
        return BOOLEAN
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return NUMBER
    if types.is_string(kind) or types.is_large_string(kind):
        return CATEGORY
    raise UserError(
        f"Column {name!r} is {'empty' if types.is_null(kind) else f'of type {kind}'}, and columns "
        f"are numbers, booleans or texts. Leave it out: --drop={name}. Or make dates numbers, such "
        "as days since a public date, and save texts as UTF-8."
    )


def _values(column, kind):
    """A `pyarrow.ChunkedArray` as an array of `Rows`."""
    if kind == CATEGORY:
        return np.array([text or MISSING for text in column.cast("string").to_pylist()])
    return column.cast("float64", safe=False).to_numpy(zero_copy_only=False)


def _check_texts(name, texts, is_declared):
    present = texts[texts != MISSING]
    dates = sum(bool(_DATE.match(text)) for text in present)
    if not is_declared and dates > _NEARLY_ALL * len(present):
        raise UserError(
            f"Column {name!r} is of dates. Replace it by numbers, such as days since a public "
            f"date, or --drop={name}, or name it in --categorical if each date is a category."
        )
    if len(present) >= _FEWEST_NAMES and len(set(present)) > _NEARLY_ALL * len(present):
        raise UserError(
            f"Column {name!r} names the rows: nearly all of its texts differ, so nothing can be "
            f"learned from it. Leave it out: --drop={name}. Or correct the values that are no "
            "numbers, if it should be of numbers."
        )


def _check_numbers(name, numbers):
    present = numbers[np.isfinite(numbers)]
    values = np.unique(present)
    if len(values) < max(_FEWEST_NAMES, len(present)):
        return
    if np.all(values == np.round(values)) and np.ptp(values) < 2 * len(values):
        raise UserError(
            f"Column {name!r} numbers the rows: its values are whole, all differ and leave few "
            f"out. Leave it out: --drop={name}. Or give its public range, "
            f"--bounds={name}:LOWER:UPPER, if it measures something."
        )


def _with_target(columns, column, settings):
    """`Rows` of columns and a target, a `pyarrow.ChunkedArray`, and the names of classes."""
    from pyarrow import types

    name, kind = settings.target, _kind_of(settings.target, column)
    if column.null_count:
        raise UserError(
            f"Some rows have no value in the column --target={name}. Remove them: the model can "
            "predict it for them later."
        )
    if settings.task == "regression":
        if kind != NUMBER:
            raise UserError(
                f"Flag --task=regression needs a target of numbers. Received: --target={name}, a "
                f"{kind}."
            )
        values = _values(column, NUMBER)
        if not np.all(np.isfinite(values)):
            raise UserError(f"Some values of the column --target={name} are not finite.")
        clipped = np.clip(values, settings.target_lower, settings.target_upper)
        return Rows(columns, clipped.astype("float32")), ()
    if types.is_floating(column.type) or types.is_decimal(column.type):
        raise UserError(
            f"Column --target={name} has numbers with fractions, which are no classes. Predict it "
            "with --task=regression, or write the classes as texts or whole numbers."
        )
    labels = _values(column, CATEGORY).tolist()
    present = sorted(set(labels), key=int if kind == NUMBER else str)
    class_names = tuple(dict.fromkeys(settings.classes or present))
    if not 2 <= len(class_names) <= _MOST_CLASSES or not set(present) <= set(class_names):
        raise UserError(
            f"Column --target={name} must have from two to {_MOST_CLASSES} labels, all of them in "
            f"--classes where that is given. Received: {len(present)} different labels, --classes="
            f"{','.join(settings.classes or ())}. Numbers are predicted by --task=regression."
        )
    index = {label: i for i, label in enumerate(class_names)}
    return Rows(columns, np.array([index[label] for label in labels], "int64")), class_names


def _is_test(rows, class_names, fraction, seed):
    """Splits by a hash of each row, bool `[rows]`, so that no row moves another.

    Equal rows are told apart by a running number. Of these it does not matter which is which.
    """
    salt, counts, hashes = seed.to_bytes(16, "little"), collections.Counter(), []
    # Another label changes the numbers of classes, but not their names.
    target = [class_names[i] for i in rows.target] if class_names else rows.target.tolist()
    for row in zip(*(values.tolist() for values in rows.columns.values()), target, strict=True):
        text = repr(row)
        counts[text] += 1
        digest = hashlib.blake2b(f"{text}{counts[text]}".encode(), salt=salt, digest_size=8)
        hashes.append(int.from_bytes(digest.digest(), "little"))
    return np.array(hashes, "uint64") < fraction * 2**64
