"""Runs on tables: `classify --dataset=csv:PATH` or `parquet:PATH` trains by `tfdpx.sklearn`."""

from tfdpx.report.measure import Measured
from tfdpx.sklearn import PrivateClassifier, PrivateRegressor
from tfdpx.tables.estimators import predict
from tfdpx.tables.rules import TooFewRows
from tfdpx.train.data.tables import BOOLEAN, NUMBER
from tfdpx.train.errors import UserError, checking_flags

_ARGUMENTS = ("delta", "accountant", "model", "batch_size", "steps", "learning_rate", "seed")
_PREPARATION = (
    "A dict from columns to arrays [rows, 1]: numbers and booleans as float32, NaN where missing; "
    'categories as strings, "(missing)" where missing. The model does all else.'
)


def fit(table, settings):
    """Returns a private estimator of `tfdpx.sklearn`, fitted to the training rows of a table.

    Args:
        table: `data.tables.Table`.
        settings: The settings of the run.

    Raises:
        UserError: If there are too few rows to find ranges, or settings contradict each other.
    """
    arguments = {name: getattr(settings, name) for name in _ARGUMENTS} | settings.goal
    ranges = {n: settings.ranges.get(n, settings.ranges.get("*")) for n in table.of_kind(NUMBER)}
    ranges |= dict.fromkeys(table.of_kind(BOOLEAN), (0.0, 1.0))
    for end, name in enumerate(("lower", "upper")):
        arguments[name] = {column: pair[end] for column, pair in ranges.items() if pair}
    if table.class_names:
        estimator = PrivateClassifier(classes=range(len(table.class_names)), **arguments)
    else:
        limits = {name: getattr(settings, name) for name in ("target_lower", "target_upper")}
        estimator = PrivateRegressor(**limits, **arguments)
    rows, people = table.train, {}
    if settings.has_people:
        people = {"user_ids": rows.people, "examples_per_user": settings.examples_per_user}
    with checking_flags():
        try:
            return estimator.fit(rows.columns, rows.target, **people)
        except TooFewRows as error:
            num_rows, columns, enough, epsilon = error.args
            first = next(column for column, pair in ranges.items() if not pair)
            raise UserError(
                f"{num_rows} rows are too few to find the ranges of {columns} columns at "
                f"--epsilon={settings.budget:.3g}, which takes some {enough} rows, or "
                f"--epsilon={epsilon:g}. Give what is publicly known, even roughly: "
                f"--bounds={first}:LOWER:UPPER,... or --bounds=*:LOWER:UPPER."
            ) from error


def inputs(table, settings):
    """Returns the `inputs` of a record, a dict of the columns and the preparation of rows."""
    return {
        "columns": table.kinds,
        "target": settings.target,
        "class_names": list(table.class_names),
        "preparation": _PREPARATION,
    }


def measure(estimator, table, threshold):
    """Returns the `Measured` of an estimator on the test rows of its table.

    Args:
        estimator: A fitted estimator of `fit`.
        table: `data.tables.Table`.
        threshold: Float, see `measure.predicted_classes`.
    """
    outputs, names = predict(estimator.model_, table.test.columns), table.class_names
    return Measured(table.test.target, outputs if names else outputs[:, 0], names, threshold)
