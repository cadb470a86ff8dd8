"""Reads tables from CSV and Parquet files, as columns of numbers and texts.

Errors name columns and their types, which are public. They never quote a value. pyarrow is imported
only when a table is read, because runs on images do not need it.
"""

import collections
import dataclasses
import pathlib
import re

import numpy as np

from tfdpx.sampling.users import numbered
from tfdpx.tables.estimators import input_name
from tfdpx.train.data.folder import place
from tfdpx.train.errors import UserError, did_you_mean

NUMBER, BOOLEAN, CATEGORY = "number", "boolean", "category"
MISSING = "(missing)"  # The category of an empty field.
_DELIMITERS = ",;\t|"
_BLOCK_SIZE = 2**30  # pyarrow infers types from the first block of a file.
_MOST_CLASSES = 100
_MOST_NAMES = 30  # The largest number of columns in an error.
# A column of texts counts as names of the rows if it has at least `_FEWEST_NAMES` texts and nearly
# all of them differ. It counts as dates if nearly all of its texts are dates.
_FEWEST_NAMES, _NEARLY_ALL = 20, 0.9
# Typical names, or last words of names, of columns that tell the person of a row.
_PERSONS = ("id", "user", "person", "patient", "customer", "client", "member", "subject", "email")
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{4})\b")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Attributes:
        columns: Dict from a column's name to an array `[rows]`: texts, or float64 with NaN for a
            missing number.
        target: Array `[rows]`: float32 numbers, or int64 classes.
        people: int64 `[rows]`, a number for the person of each row; None without `--user`.
    """

    columns: dict
    target: np.ndarray
    people: np.ndarray | None = None

    def __len__(self):
        return len(self.target)

    def __getitem__(self, index):
        columns = {name: values[index] for name, values in self.columns.items()}
        people = None if self.people is None else self.people[index]
        return Rows(columns, self.target[index], people)

    @property
    def num_protected(self):
        """The number of people or, without `--user`, of rows."""
        return len(self) if self.people is None else len(np.unique(self.people))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table, with its rows split into training and test rows.

    Attributes:
        kinds: Dict from each column that the model takes to `NUMBER`, `BOOLEAN` or `CATEGORY`.
        class_names: Tuple with a label for each class; empty for a regression.
        train: `Rows` to train on.
        test: `Rows` to test on.
        notes: Lines to print: the numbers of rows, the columns, and the facts that are assumed to
            be public.
    """

    kinds: dict
    class_names: tuple
    train: Rows
    test: Rows
    notes: tuple = ()

    def of_kind(self, kind):
        """Returns a list of the names of all columns of a kind."""
        return [name for name, other in self.kinds.items() if other == kind]


def load(settings):
    """Reads the table of a run.

    Args:
        settings: The settings of the run.

    Returns:
        `Table`.

    Raises:
        UserError: If the file cannot be read, or a column cannot be used.
    """
    kind, _, path = settings.dataset.partition(":")
    where = f"--dataset={settings.dataset}"
    if (kind == "parquet") != path.endswith(".parquet"):
        raise UserError(
            f"Name a file parquet:PATH if it ends in .parquet, else csv:PATH. Received: {where}."
        )
    drop, categorical = list(settings.drop or ()), settings.categorical or ()
    users = [settings.user] if settings.has_people else []
    drop += users
    bounded = [name for name in settings.ranges if name != "*"]
    # Names of people are read as texts, so 01 and 1 are two people.
    source = read(path, dict.fromkeys([*categorical, *users], CATEGORY), where)
    _require([settings.target, *drop, *bounded], source.column_names, where)
    names = [name for name in source.column_names if name not in (settings.target, *drop)]
    if not names or settings.target in drop:
        raise UserError(
            f"There is nothing to learn from: columns except --target={settings.target} and "
            f"--drop={','.join(drop)} are: {', '.join(names) or 'none'}."
        )
    kinds, columns = _usable(source, names, bounded, categorical)
    if settings.user is None:
        _refuse_several(columns)
    column = source[settings.target]
    target_kind = _kind_of(settings.target, column)
    values = _values(column, target_kind)
    target, class_names = _encode(column, values, target_kind, settings)
    if settings.has_people:
        units = [text or "" for text in source[settings.user].to_pylist()]
        try:
            people = numbered(np.array(units, object), len(units))[0]
        except ValueError as error:
            raise UserError(
                f"Column --user={settings.user} must name the person of every row in one way. Some "
                "rows have no name, or one that differs from another only in spaces or in upper "
                "and lower case: correct them."
            ) from error
    else:
        people, units = None, _numbered_rows([*columns.values(), values])
    rows = Rows(columns, target, people)
    places = np.array([place(unit.encode(), settings.test_seed) for unit in units])
    is_test = places < settings.test_fraction
    train, test = rows[~is_test], rows[is_test]
    if not len(train) or (settings.test_fraction and not len(test)):
        raise UserError(
            f"There are too few rows: {len(train)} to train on, {len(test)} to test "
            f"on. Received: {where} --test_fraction={settings.test_fraction}."
        )
    of_kinds = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    notes = [f"{len(train)} rows to train on, {len(test)} to test on; {of_kinds}"]
    if settings.has_people:
        notes.append(f"People to train on, by --user={settings.user}: {train.num_protected}.")
    labels = f", the labels {', '.join(class_names)}" if class_names else ""
    unit = "people" if settings.has_people else "rows"
    notes.append(
        f"Public, so not protected: how many {unit} there are to train on, names and types of "
        f"columns{labels}."
    )
    return Table(kinds, class_names, train, test, tuple(notes))


def _usable(source, names, bounded, categorical):
    """Returns a dict from each column to its kind, and a dict from each column to its values.

    Args:
        source: `pyarrow.Table`.
        names: List of the columns that the model takes.
        bounded: Names of the columns with `--bounds`.
        categorical: Names of the columns in `--categorical`.

    Raises:
        UserError: If columns cannot be used. The error names all of them.
    """
    input_names = collections.Counter(map(input_name, names))
    kinds, columns = {}, {}
    problems = {
        name: f"Flag --bounds is for columns that the model takes. Received: {name!r}."
        for name in bounded
        if name not in names
    }
    for name in names:
        try:
            if name.startswith("tfdpx.") or "\0" in name or input_names[input_name(name)] > 1:
                raise UserError(
                    f"Column {name!r} needs another name. In a model '/' becomes '_', and names "
                    f"must differ and not begin with 'tfdpx.'. Rename it, or --drop={name}."
                )
            kind = kinds[name] = _kind_of(name, source[name])
            if name in bounded and kind != NUMBER:
                raise UserError(f"Flag --bounds is for columns of numbers. Received: {name!r}.")
            columns[name] = _values(source[name], kind)
            if kind == CATEGORY:
                _check_texts(name, columns[name], name in categorical)
            elif name not in bounded:
                _check_numbers(name, columns[name])
        except UserError as error:
            problems[name] = str(error)
    if problems:
        unusable = [name for name in names if name in problems]
        together = f" To leave out all of them: --drop={','.join(unusable)}."
        raise UserError(" ".join(problems.values()) + (together if len(unusable) > 1 else ""))
    return kinds, columns


def _refuse_several(columns):
    """Raises UserError if a column's name suggests people, and values of the column repeat."""
    for name, values in columns.items():
        words = re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower()
        is_named = words in _PERSONS or re.split(r"[\W_]+", words)[-1] == "id"
        people = len(np.unique(values))
        if is_named and 2 < people < len(values):
            raise UserError(
                f"Column {name!r} has {people} values in {len(values)} rows. If it names the "
                "person of a row, epsilon protects only one row of a person: to protect people, "
                f"add --user={name}. If every person has one row, add --user=none."
            )


def read_columns(path, kinds):
    """Reads columns of known kinds, for a model that was trained on them.

    Args:
        path: String, the file that --rows names. It is read as Parquet if it ends in .parquet,
            else as CSV.
        kinds: Dict from columns to kinds, as in `Table`.

    Returns:
        Dict from a name to an array `[rows]`, as in `Rows`.

    Raises:
        UserError: If the file cannot be read, or a column is missing or of another kind.
    """
    source = read(path, kinds, f"--rows={path}")
    return {name: _values(source[name], kind) for name, kind in kinds.items()}


def read(path, kinds, where):
    """Reads a file as a `pyarrow.Table`.

    Args:
        path: String, a file. It is read as Parquet if it ends in .parquet, else as CSV.
        kinds: Dict from columns to kinds, as in `Table`. The types of all other columns follow from
            their values.
        where: String, the flag that names the file, for errors.

    Raises:
        UserError: If the file cannot be read, or a column is missing or of another kind.
    """
    import pyarrow as pa
    from pyarrow import csv, parquet

    types = {NUMBER: pa.float64(), BOOLEAN: pa.bool_(), CATEGORY: pa.string()}
    column_types = {name: types[kind] for name, kind in kinds.items()}
    try:
        with pathlib.Path(path).expanduser().open("rb") as file:
            if path.endswith(".parquet"):
                table = parquet.read_table(file)
            else:
                delimiter = max(_DELIMITERS, key=file.readline().decode("utf-8-sig").count)
                file.seek(0)
                table = csv.read_csv(
                    file,
                    # With threads, the errors of pyarrow do not have the number of the row.
                    csv.ReadOptions(block_size=_BLOCK_SIZE, use_threads=False),
                    csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                    csv.ConvertOptions(column_types=column_types, strings_can_be_null=True),
                )
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        # Removes the values that pyarrow quotes at the end of its errors.
        text = re.sub(r"(got \d+): .*|: invalid value.*", r"\1", str(error), flags=re.DOTALL)
        raise UserError(f"Cannot read {where}: {text}.") from error
    names = table.column_names
    if unfit := [name for name in names if names.count(name) > 1 or not name.strip()]:
        raise UserError(
            f"The first line of {where} must give every column a different name. Received: "
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


def _require(wanted, names, where):
    """Raises UserError if one of the columns `wanted` is not among `names`."""
    for name in wanted:
        if name not in names:
            raise UserError(
                f"There is no column {name!r} in {where}.{did_you_mean(name, names)} Columns are: "
                f"{', '.join(names[:_MOST_NAMES])}."
            )


def _kind_of(name, column):
    """Returns the kind of a `pyarrow.ChunkedArray`: `NUMBER`, `BOOLEAN` or `CATEGORY`."""
    from pyarrow import types

    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if types.is_boolean(kind):
        return BOOLEAN
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return NUMBER
    if types.is_string(kind) or types.is_large_string(kind):
        return CATEGORY
    raise UserError(
        f"Column {name!r} is {'empty' if types.is_null(kind) else f'of type {kind}'}, but columns "
        f"must be numbers, booleans or texts. Leave it out: --drop={name}. Or make dates numbers, "
        "such as days since a public date, and save texts as UTF-8."
    )


def _values(column, kind):
    """Converts a `pyarrow.ChunkedArray` to an array `[rows]`, as in `Rows.columns`."""
    if kind == CATEGORY:
        return np.array([text or MISSING for text in column.cast("string").to_pylist()])
    return column.cast("float64", safe=False).to_numpy(zero_copy_only=False)


def _check_texts(name, texts, is_declared):
    """Refuses a column of dates, and a column with a different text in nearly every row."""
    present = texts[texts != MISSING]
    dates = sum(bool(_DATE.match(text)) for text in present)
    if not is_declared and dates > _NEARLY_ALL * len(present):
        raise UserError(
            f"Column {name!r} holds dates. Replace them by numbers, such as days since a public "
            f"date, or leave the column out: --drop={name}. If each date is a category, name the "
            "column in --categorical."
        )
    if len(present) >= _FEWEST_NAMES and len(set(present)) > _NEARLY_ALL * len(present):
        raise UserError(
            f"Column {name!r} names the rows: nearly all of its texts differ, so nothing can be "
            f"learned from it. Leave it out: --drop={name}. If it should hold numbers, correct "
            "the values that are not numbers."
        )


def _check_numbers(name, numbers):
    """Refuses a column that only numbers the rows, such as an index."""
    present = numbers[np.isfinite(numbers)]
    values = np.unique(present)
    all_differ = len(values) == len(present) >= _FEWEST_NAMES
    if all_differ and np.all(values == np.round(values)) and np.ptp(values) < 2 * len(values):
        raise UserError(
            f"Column {name!r} numbers the rows: its values are whole numbers, all different and "
            f"almost consecutive. Leave it out: --drop={name}. Or give its public range, "
            f"--bounds={name}:LOWER:UPPER, if it measures something."
        )


def _encode(column, values, kind, settings):
    """Encodes the target column. Returns `Rows.target`, and class names (empty for regression)."""
    from pyarrow import types

    name = settings.target
    if np.any(values == MISSING if kind == CATEGORY else np.isnan(values)):
        raise UserError(
            f"Some rows have no value in the column --target={name}. Remove them: the model can "
            "predict it for them later."
        )
    if settings.is_regression:
        if kind != NUMBER:
            raise UserError(
                "Flags --target_lower and --target_upper are for a target of numbers. Received: "
                f"--target={name}, a {kind}."
            )
        return np.clip(values, settings.target_lower, settings.target_upper).astype("float32"), ()
    if types.is_floating(column.type) or types.is_decimal(column.type):
        raise UserError(
            f"Column --target={name} has numbers with fractions, which are no classes. Predict it "
            "with --target_lower and --target_upper, or write the classes as whole numbers."
        )
    labels = _values(column, CATEGORY).tolist()
    present = set(labels)
    names = set(settings.classes or present)
    if not 2 <= len(names) <= _MOST_CLASSES or not present <= names:
        raise UserError(
            f"Column --target={name} must have from two to {_MOST_CLASSES} labels, and --classes "
            f"must be all of them or left out. Received: {len(present)} different labels, "
            f"--classes={','.join(settings.classes or ())}. Numbers are predicted "
            "with --target_lower and --target_upper."
        )
    # In the order of their values, so the order of --classes does not choose the positive class.
    are_whole = kind == NUMBER and all(name.lstrip("-").isdecimal() for name in names)
    class_names = tuple(sorted(names, key=int if are_whole else str))
    index = {label: i for i, label in enumerate(class_names)}
    return np.array([index[label] for label in labels], "int64"), class_names


def _numbered_rows(columns):
    """Returns the values of each row as a text. Equal rows are numbered, so all texts differ."""
    counts, texts = collections.Counter(), []
    for row in map(repr, zip(*(values.tolist() for values in columns), strict=True)):
        counts[row] += 1
        texts.append(f"{row}{counts[row]}")
    return texts
