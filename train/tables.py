"""Trains private models of tables: `classify --dataset=csv:PATH` or `parquet:PATH`.

`tfdpx.table_rules` has the rules for the statistics to release and for the training.
"""

import csv
import dataclasses
import io
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdpx
from tfdpx import _files
from tfdpx.accounting.ledger import EXAMPLE, USER, Ledger
from tfdpx.report.measure import Measured, predicted_classes, probabilities
from tfdpx.table_rules import (
    TooFewRows,
    choose,
    cut_numbers,
    number_scaling,
    plan_releases,
    rare_shares,
    train_head,
)
from tfdpx.train import model_files
from tfdpx.train.data import tables as data_tables
from tfdpx.train.data.tables import BOOLEAN, CATEGORY, NUMBER, input_name
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.output import of_spreadsheet
from tfdpx.train.settings import check_threshold

_PREPARATION = (
    "A dict from columns to arrays [rows, 1]: numbers and booleans as float32, NaN where missing; "
    'categories as strings, "(missing)" where missing. The model does all else.'
)
_PREDICT_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model of a table.

    Attributes:
        model: `keras.Model` from a dict of columns to logits, or to target values.
        plan: The `tfdpx.PrivacyPlan`.
        learning_rate: Float.
        l2_norm_clip: Float, or "automatic".
        optimizer: The tfdpx optimizer, with the ledger of statistics and training.
    """

    model: keras.Model
    plan: tfdpx.PrivacyPlan
    learning_rate: float
    l2_norm_clip: float | str
    optimizer: keras.optimizers.Optimizer


def fit(table, settings):
    """Trains a model on the training rows of a table.

    Args:
        table: `data.tables.Table`.
        settings: The settings of the run.

    Returns:
        `Trained`.

    Raises:
        UserError: If there are too few rows to find ranges, or settings contradict each other.
    """
    if settings.seed is not None:
        keras.utils.set_random_seed(settings.seed % 2**32)
    y, by_person = table.train.target, {}
    # One row of each person, so that a person changes the statistics no more than one row does.
    rows = table.train.one_of_each_person()
    with checking_flags():
        preprocessing, spent, shares = adapt(rows, table, settings)
        if settings.user:
            spent = Ledger(tuple(dataclasses.replace(e, unit=USER) for e in spent.entries))
            by_person = {"user_ids": table.train.people}
            by_person["examples_per_user"] = settings.examples_per_user
        training = choose(
            len(rows),
            spent,
            epsilon=settings.epsilon,
            delta=settings.delta,
            is_regression=settings.task == "regression",
            rare_columns=None if shares is None else len(table.kinds),
            name=settings.model,
            batch_size=settings.batch_size,
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            accountant=settings.accountant,
            unit=USER if settings.user else EXAMPLE,
        )
    x = predict(preprocessing, table.train.columns)
    if settings.task == "regression":
        middle = (settings.target_upper + settings.target_lower) / 2
        half = (settings.target_upper - settings.target_lower) / 2
        y = (y - middle) / half
    head, optimizer = train_head(
        x, y, training, len(table.class_names), shares, seed=settings.seed, **by_person
    )
    outputs = head(preprocessing.output)
    if settings.task == "regression":
        outputs = keras.layers.Rescaling(half, middle, name="tfdpx.rescaling")(outputs)
    model = keras.Model(preprocessing.input, outputs, name=f"{training.name}_on_table")
    return Trained(model, training.plan, training.learning_rate, training.l2_norm_clip, optimizer)


def adapt(rows, table, settings):
    """Builds the preprocessing layers of a model of a table, and counts the labels.

    Numbers are centred and scaled by a private mean and variance within their public range; a rough
    range is narrowed first. If there are too few rows, the range itself is used. Frequent texts are
    one-hot encoded.

    Guarantee: the ledger has the cost of the shares and of all statistics in the layers. The names
    and kinds of columns, the labels, the number of rows and `settings.ranges` are public.

    Args:
        rows: `data.tables.Rows` to train on.
        table: `data.tables.Table` with the kinds of columns and the labels.
        settings: The settings of the run.

    Returns:
        A `keras.Model` from a dict of `[rows, 1]` to `[rows, features]`, a
        `tfdpx.accounting.Ledger`, and noisy shares of the labels `[classes]`, which are None if no
        label is known to be rare.

    Raises:
        UserError: If there are too few rows to find ranges.
    """
    columns, kinds, ranges = rows.columns, table.kinds, settings.ranges
    limits = {n: ranges.get(n, ranges.get("*")) for n, kind in kinds.items() if kind == NUMBER}
    rough = [name for name, pair in limits.items() if pair is not None]
    unbounded = [name for name, pair in limits.items() if pair is None]
    limits |= {n: (0.0, 1.0) for n, kind in kinds.items() if kind == BOOLEAN}
    bounded = [name for name, pair in limits.items() if pair is not None]
    texts = [name for name, kind in kinds.items() if kind == CATEGORY]
    num_classes = len(table.class_names)
    try:
        plan = plan_releases(
            len(rows),
            settings.epsilon,
            settings.delta,
            unbounded=len(unbounded),
            bounded=len(bounded),
            rough=len(rough),
            texts=len(texts),
            num_classes=num_classes,
        )
    except TooFewRows as error:
        raise UserError(
            f"{len(rows)} rows are too few to find the ranges of {len(unbounded)} columns at "
            f"--epsilon={settings.epsilon:g}, which takes some {error.rows} rows, or "
            f"--epsilon={error.epsilon:g}. Give what is publicly known, even roughly: "
            f"--bounds={unbounded[0]}:LOWER:UPPER,... or --bounds=*:LOWER:UPPER."
        ) from error
    releases, seed = plan.releases(settings.seed), settings.seed
    shares = rare_shares(rows.target, num_classes, plan, releases)
    inner_inputs = {
        name: keras.Input((1,), dtype="string" if name in texts else "float32", name=f"column_{i}")
        for i, name in enumerate(columns)
    }
    ledger, parts = Ledger(), []
    for names in (unbounded, bounded):
        if not names:
            continue
        x = np.stack([columns[name] for name in names], axis=1)
        lower = upper = None
        if names == bounded:  # Numbers come first; booleans have exact bounds.
            lower, upper = np.array([limits[name] for name in bounded]).T
        is_rough = np.arange(len(names)) < len(rough)
        layer, spent = number_scaling(x, lower, upper, is_rough, plan, releases, seed)
        ledger += spent
        z = layer(ops.concatenate([inner_inputs[name] for name in names], axis=-1))
        parts.append(cut_numbers(z))
    for name in texts:
        layer = keras.layers.StringLookup(output_mode="one_hot")
        ledger += tfdpx.private_adapt(
            layer, columns[name], noise_multiplier=plan.noise_multiplier, seed=seed
        )
        parts.append(layer(inner_inputs[name]))
    features = ops.concatenate(parts, axis=-1)
    # A nested model, because columns may have the same names as layers.
    inner = keras.Model(list(inner_inputs.values()), features, name="tfdpx.preprocessing")
    outer_inputs = {
        input_name(name): keras.Input((1,), dtype=tensor.dtype, name=input_name(name))
        for name, tensor in inner_inputs.items()
    }
    model = keras.Model(outer_inputs, inner(list(outer_inputs.values())))
    return model, ledger + releases.ledger(), shares


def inputs(table, settings):
    """Returns the `inputs` of a record, a dict of the columns and the preparation of rows.

    Args:
        table: `data.tables.Table`.
        settings: The settings of the run.
    """
    return {
        "columns": table.kinds,
        "target": settings.target,
        "class_names": list(table.class_names),
        "preparation": _PREPARATION,
    }


def predict(model, columns):
    """Returns the outputs of a model for columns, float32 `[rows, outputs]`.

    Args:
        model: `keras.Model` that takes a dict of columns.
        columns: Dict from a name to an array `[rows]`.
    """
    largest, tensors = np.finfo("float32").max, {}
    for name, values in columns.items():
        if values.dtype.kind != "U":  # The model clips the largest number, but not infinity.
            values = np.clip(values, -largest, largest).astype("float32")
        tensors[input_name(name)] = tf.constant(values[:, np.newaxis])
    return model.predict(tensors, batch_size=_PREDICT_BATCH, verbose=0)


def measure(model, rows, class_names, threshold):
    """Measures a model on rows, and returns a `Measured`.

    Args:
        model: `keras.Model` from a dict of columns to logits, or to target values.
        rows: `data.tables.Rows`.
        class_names: Tuple of names of the classes; empty for a regression.
        threshold: Float, see `measure.predicted_classes`.
    """
    outputs = np.zeros([0, len(class_names) or 1], "float32")
    if len(rows):
        outputs = predict(model, rows.columns)
    return Measured(rows.target, outputs if class_names else outputs[:, 0], class_names, threshold)


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
    recorded = model_files.recorded_inputs(model_path)
    if "columns" not in recorded:
        raise UserError(
            f"Flag --rows needs a model of a table, as classify --dataset=csv:PATH writes it. "
            f"Received: --model={model_path}."
        )
    if threshold is not None:
        check_threshold(threshold, recorded["class_names"])
    columns = data_tables.read_columns(rows_path, recorded["columns"], flag="rows")
    outputs = predict(model_files.read(model_path, "model"), columns)
    target, names = recorded["target"], recorded["class_names"]
    if names:
        names = [of_spreadsheet(name) for name in names]
        lines = [[target, "probability", *names]]
        classes = predicted_classes(outputs, threshold or recorded["threshold"])
        for index, row in zip(classes, probabilities(outputs), strict=True):
            lines.append([names[index], *(f"{p:.6f}" for p in (row[index], *row))])
        lines = lines if all_classes else [line[:2] for line in lines]
    else:
        lines = [[target], *([f"{value:.6g}"] for value in outputs[:, 0])]
    lines[0][0] = of_spreadsheet(target)
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    try:
        _files.write(pathlib.Path(csv_path).expanduser(), text.getvalue().encode(), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={csv_path}: {error}.") from error
    return {"rows": len(outputs), "model": model_path, "csv": csv_path}
