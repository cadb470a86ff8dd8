"""The columns of a table that a model takes, and its rows to train and to test on."""

import collections
import dataclasses
import hashlib
import re

import numpy as np
from pyarrow import compute, types

from tfdpx.train.errors import UserError, did_you_mean
from tfdpx.train.tables import preprocessing, reading
from tfdpx.train.tables.reading import CATEGORY, MISSING, NUMBER

_MOST_CLASSES = 100
# A column of texts where more than this part of the values differ names the rows; where more are
# dates, it is of dates.
_IDENTIFIER, _IDENTIFIER_ROWS = 0.9, 20
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{4})\b")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a table.

    Attributes:
        columns: Dict from a name to an array `[rows]`, numbers or texts.
        target: float32 numbers, or int64 classes `[rows]`.
    """

    columns: dict
    target: np.ndarray

    def __len__(self):
        return len(self.target)

    def __getitem__(self, chosen):
        return Rows({n: v[chosen] for n, v in self.columns.items()}, self.target[chosen])


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that was read, all of whose columns are known.

    Attributes:
        kinds: Dict from the columns that the model takes to their kinds.
        class_names: Tuple, a label for each class; empty for a regression.
        train: `Rows` to train on.
        test: `Rows` to test on.
    """

    kinds: dict
    class_names: tuple
    train: Rows
    test: Rows


def load(settings):
    """The `Table` of a `settings.TableSettings`.

    Raises:
        UserError: If a column cannot be used, by its name.
    """
    path = reading.path_of(settings.dataset)
    table = reading.read(path, dict.fromkeys(settings.categorical or (), CATEGORY))
    named = [name for name in settings.ranges if name != "*"]
    for name in [settings.target, *(settings.drop or ()), *named]:
        if name not in table.column_names:
            near = did_you_mean(name, table.column_names)
            raise UserError(
                f"There is no column {name!r} in --dataset={settings.dataset}.{near} Columns are: "
                f"{', '.join(table.column_names[:30])}."
            )
    left_out = {settings.target, *(settings.drop or ())}
    names = [name for name in table.column_names if name not in left_out]
    if not names or settings.target in (settings.drop or ()):
        raise UserError(
            f"There is nothing to learn from: columns but for --target={settings.target} and "
            f"--drop={','.join(settings.drop or ())} are: {', '.join(names) or 'none'}."
        )
    if unfit := [name for name in names if name.startswith("tfdpx.") or "\0" in name]:
        raise UserError(f"Column {unfit[0]!r} needs another name: a model cannot have this one.")
    if len({preprocessing.input_name(name) for name in names}) < len(names):
        raise UserError(
            "Names of columns must differ in more than '/' for '_', which Keras needs. Received: "
            f"{', '.join(name for name in names if '/' in name)}. Rename or --drop one."
        )
    kinds = {name: reading.kind_of(table, name) for name in names}
    for name in named:
        if kinds.get(name) != NUMBER:
            raise UserError(
                f"Flag --bounds is for columns of numbers that the model takes. Received: {name!r}."
            )
    columns = {name: reading.values(table, name, kind) for name, kind in kinds.items()}
    for name, values in columns.items():
        if kinds[name] == CATEGORY:
            _check_texts(name, values, name in (settings.categorical or ()))
        elif name not in named:
            _check_numbering(name, table[name])
    target, class_names = _target(table, settings)
    rows = Rows(columns, target)
    test = _is_test(rows, settings.test_fraction, settings.test_seed)
    found = Table(kinds, class_names, rows[~test], rows[test])
    if not len(found.train) or not (len(found.test) or not settings.test_fraction):
        raise UserError(
            f"There are too few rows: {len(found.train)} to train on, {len(found.test)} to test "
            f"on. Received: --dataset={settings.dataset} --test_fraction={settings.test_fraction}."
        )
    return found


def _target(table, settings):
    """The target `[rows]`, and the names of its classes."""
    name, column = settings.target, table[settings.target]
    kind = reading.kind_of(table, name)
    if column.null_count:
        raise UserError(
            f"Some rows have no value in the column --target={name}. Remove them: the model can "
            "predict it for them later."
        )
    if settings.is_regression:
        if kind != NUMBER:
            raise UserError(
                f"Flag --task=regression needs a target of numbers. Received: --target={name}, a "
                f"{kind}."
            )
        values = reading.values(table, name, NUMBER)
        if not np.all(np.isfinite(values)):
            raise UserError(f"Some values of the column --target={name} are not finite.")
        clipped = np.clip(values, settings.target_lower, settings.target_upper)
        return clipped.astype("float32"), ()
    if types.is_floating(column.type) or types.is_decimal(column.type):
        raise UserError(
            f"Column --target={name} has numbers with fractions, which are no classes. Predict it "
            "with --task=regression, or write the classes as texts or whole numbers."
        )
    labels = reading.values(table, name, CATEGORY)
    found = set(labels.tolist())
    by_value = int if kind == NUMBER else str
    names = tuple(dict.fromkeys(settings.classes or sorted(found, key=by_value)))
    if not 2 <= len(names) <= _MOST_CLASSES or not found.issubset(names):
        raise UserError(
            f"Column --target={name} must have from two to {_MOST_CLASSES} labels, all of them in "
            f"--classes where that is given. Received: {len(found)} different labels, --classes="
            f"{','.join(settings.classes or ())}. Numbers are predicted by --task=regression."
        )
    index = {label: i for i, label in enumerate(names)}
    return np.array([index[label] for label in labels.tolist()], "int64"), names


def _check_texts(name, values, is_declared):
    present = values[values != MISSING]
    dates = sum(bool(_DATE.match(value)) for value in present)
    if not is_declared and dates > _IDENTIFIER * len(present):
        raise UserError(
            f"Column {name!r} is of dates. Replace it by numbers, such as days since a public "
            f"date, or --drop={name}, or name it in --categorical if each date is a category."
        )
    if len(present) >= _IDENTIFIER_ROWS and len(set(present)) > _IDENTIFIER * len(present):
        raise UserError(
            f"Column {name!r} names the rows: nearly all of its texts differ, so nothing can be "
            f"learned from it. Leave it out: --drop={name}. Or correct the values that are no "
            "numbers, if it should be of numbers."
        )


def _check_numbering(name, column):
    """Refuses a running number of the rows: whole, all different, and leaving few out."""
    present = column.drop_null()
    if not types.is_integer(column.type) or len(present) < _IDENTIFIER_ROWS:
        return
    ends = compute.min_max(present)
    dense = ends["max"].as_py() - ends["min"].as_py() < 2 * len(present)
    if dense and len(present.unique()) == len(present):
        raise UserError(
            f"Column {name!r} numbers the rows: its values are whole, all differ and leave few "
            f"out. Leave it out: --drop={name}. Or give its public range, "
            f"--bounds={name}:LOWER:UPPER, if it measures something."
        )


def _is_test(rows, fraction, seed):
    """Which are, bool `[rows]`: by a hash of what a row holds, so that no row moves another.

    Of rows that are alike so many are as their number says, whichever.
    """
    salt, seen = seed.to_bytes(16, "little"), collections.Counter()
    columns = [values.tolist() for values in (*rows.columns.values(), rows.target)]
    found = []
    for row in zip(*columns, strict=True):
        text = repr(row)
        seen[text] += 1
        digest = hashlib.blake2b(f"{text}{seen[text]}".encode(), salt=salt, digest_size=8).digest()
        found.append(int.from_bytes(digest, "little") < fraction * 2**64)
    return np.array(found)
