"""Private models of tables: `classify --dataset=csv:PATH` or `parquet:PATH`.

A part of the budget pays for statistics of the columns, which scale numbers and find the frequent
texts. The rest pays for the training of a linear model or of one hidden layer, by a rule of epsilon
times rows that was fitted on generated tables (docs/tables.md).
"""

import csv
import dataclasses
import io
import math
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import ops
from sklearn import metrics

import tfdpx
from tfdpx import _files
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.train import start_from
from tfdpx.train.data import tables as data_tables
from tfdpx.train.data.tables import BOOLEAN, CATEGORY, NUMBER, input_name
from tfdpx.train.errors import UserError, checking_flags

# The preprocessing gets this share of the squared mu of Gaussian differential privacy, which
# adds up.
_SHARE = 0.1
_LARGEST = 4.0  # Numbers are clipped to so many deviations.
# Means of columns are not worth their noise where it exceeds this part of the range.
_WORTH = 0.05
# Ranges are found from bins of powers of two. The fullest bin should stand out.
_FULLEST, _BINS = 1 / 3, 123
_PREPARATION = (
    "A dict from columns to arrays [rows, 1]: numbers and booleans as float32, NaN where missing; "
    'categories as strings, "(missing)" where missing. The model does all else.'
)
# By epsilon times rows.
_NETWORK_FROM, _HIDDEN = 3_500, 64
_FEW_STEPS_BELOW, _FEW_STEPS, _STEPS = 300, 60, 180
_LARGEST_BATCH = 65_536
_PREDICT_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model of a table that was trained.

    Attributes:
        model: `keras.Model` from a dict of columns to logits, or to values of the target.
        plan: The `tfdpx.PrivacyPlan`.
        learning_rate: Float.
        optimizer: The tfdpx optimizer, with the ledger of all that was spent.
    """

    model: keras.Model
    plan: tfdpx.PrivacyPlan
    learning_rate: float
    optimizer: keras.optimizers.Optimizer


def fit(table, settings):
    """Trains a model on the training rows of a table.

    Args:
        table: `data.tables.Table`.
        settings: The settings of the run.

    Returns:
        `Trained`.

    Raises:
        UserError: If the rows are too few to find ranges, or settings do not go together.
    """
    if settings.seed is not None:
        keras.utils.set_random_seed(settings.seed)
    columns, y = table.train.columns, table.train.target
    with checking_flags():
        preprocessing, spent = adapt(
            columns, table.kinds, settings.ranges, settings.epsilon, settings.delta, settings.seed
        )
        name, plan, learning_rate = choose(settings, len(y), spent)
    x = predict(preprocessing, columns)
    head = keras.Sequential([keras.Input(x.shape[1:])], name="tfdpx.head")
    if name == "network":
        head.add(keras.layers.Dense(_HIDDEN, "tanh"))
    head.add(keras.layers.Dense(len(table.class_names) or 1, kernel_initializer="zeros"))
    outputs = head(preprocessing.output)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if settings.task == "regression":
        middle = (settings.target_upper + settings.target_lower) / 2
        half = (settings.target_upper - settings.target_lower) / 2
        y, loss = ((y - middle) / half)[:, np.newaxis], "mean_squared_error"
        outputs = keras.layers.Rescaling(half, middle, name="tfdpx.rescaling")(outputs)
    optimizer = tfdpx.DPSGD(learning_rate, plan=plan, l2_norm_clip="automatic", seed=settings.seed)
    # Another model of the same layers, because a file of a compiled one would hold the optimizer.
    private = keras.Model(head.inputs[0], head.outputs[0])
    private.compile(optimizer, loss)
    private.fit(plan.batches(x, y, optimizer=optimizer), shuffle=False, verbose=0)
    model = keras.Model(preprocessing.input, outputs, name=f"{name}_on_table")
    return Trained(model, plan, learning_rate, optimizer)


def adapt(columns, kinds, ranges, epsilon, delta, seed=None):
    """Makes the layers in front of a model of a table.

    Numbers are centred and scaled by a private mean and variance, or by their public range where
    rows are too few. Texts are one-hot over those that are frequent.

    Guarantee: the ledger has all that the statistics in the layers cost. Names and kinds of
    columns, the number of rows and `ranges` are public.

    Args:
        columns: Dict from a name to an array `[rows]`, of the rows to train on.
        kinds: Dict from a name to its kind.
        ranges: Dict from names, or "*", to pairs of floats.
        epsilon: Float, of the run.
        delta: Float, of the run.
        seed: Optional int, for experiments alone.

    Returns:
        A `keras.Model` from a dict of `[rows, 1]` to `[rows, features]`, and a
        `tfdpx.accounting.Ledger`.

    Raises:
        UserError: If there are too few rows to find ranges.
    """
    num_rows = len(next(iter(columns.values())))
    limits = {n: ranges.get(n, ranges.get("*")) for n, kind in kinds.items() if kind == NUMBER}
    limits |= {n: (0.0, 1.0) for n, kind in kinds.items() if kind == BOOLEAN}
    unbounded = [name for name, pair in limits.items() if pair is None]
    bounded = [name for name, pair in limits.items() if pair is not None]
    texts = [name for name, kind in kinds.items() if kind == CATEGORY]
    whole = tfdpx.PrivacyPlan(num_rows, num_rows, 1, epsilon=epsilon, delta=delta, accountant="gdp")
    releases = 2 * bool(unbounded) + len(texts)
    noise = whole.noise_multiplier * math.sqrt((releases + 1) / _SHARE)
    takes_moments = 0 < noise * math.sqrt(1.25 * len(bounded)) < 2 * _WORTH * num_rows
    noise = whole.noise_multiplier * math.sqrt((releases + takes_moments) / _SHARE)
    deviation = noise * math.sqrt(len(unbounded))
    needed = deviation * math.sqrt(2 * math.log(10 * _BINS * max(len(unbounded), 1))) / _FULLEST
    if needed > num_rows:
        raise UserError(
            f"{num_rows} rows are too few to find the ranges of {len(unbounded)} columns at "
            f"--epsilon={epsilon:g}, which takes some {math.ceil(needed)}. Give what is publicly "
            f"known: --bounds={unbounded[0]}:LOWER:UPPER,... or --bounds=*:LOWER:UPPER."
        )
    # A model of its own, because columns may be called as layers are.
    inputs = {
        name: keras.Input((1,), dtype="string" if name in texts else "float32", name=f"column_{i}")
        for i, name in enumerate(columns)
    }
    ledger, parts = Ledger(), []
    for names in (unbounded, bounded):
        if not names:
            continue
        lower = upper = None
        if names == bounded:
            lower, upper = np.array([limits[name] for name in bounded]).T
        if names == unbounded or takes_moments:
            layer = keras.layers.Normalization()
            x = np.stack([columns[name] for name in names], axis=1)
            ledger += tfdpx.private_adapt(
                layer, x, noise_multiplier=noise, lower=lower, upper=upper, seed=seed
            )
        else:
            mean, variance = (lower + upper) / 2, ((upper - lower) / 2) ** 2
            layer = keras.layers.Normalization(mean=mean.tolist(), variance=variance.tolist())
        z = layer(ops.concatenate([inputs[name] for name in names], axis=-1))
        parts.append(ops.clip(ops.where(ops.isnan(z), 0.0, z), -_LARGEST, _LARGEST))
    for name in texts:
        layer = keras.layers.StringLookup(output_mode="one_hot")
        ledger += tfdpx.private_adapt(layer, columns[name], noise_multiplier=noise, seed=seed)
        parts.append(layer(inputs[name]))
    features = ops.concatenate(parts, axis=-1)
    inner = keras.Model(list(inputs.values()), features, name="tfdpx.preprocessing")
    outer = {
        input_name(name): keras.Input((1,), dtype=tensor.dtype, name=input_name(name))
        for name, tensor in inputs.items()
    }
    return keras.Model(outer, inner(list(outer.values()))), ledger


def choose(settings, num_rows, spent):
    """Chooses a model and its training; values in the settings stay.

    Args:
        settings: The settings of the run.
        num_rows: Int, of the rows to train on.
        spent: `tfdpx.accounting.Ledger` of the preprocessing.

    Returns:
        "linear" or "network", the `tfdpx.PrivacyPlan`, and the learning rate.

    Raises:
        ValueError: If the values do not go together.
    """
    budget = settings.epsilon * num_rows
    name = settings.model or ("network" if budget >= _NETWORK_FROM else "linear")
    plan = tfdpx.PrivacyPlan(
        num_rows,
        settings.batch_size or min(num_rows, _LARGEST_BATCH),
        settings.steps or (_FEW_STEPS if budget < _FEW_STEPS_BELOW else _STEPS),
        epsilon=settings.epsilon,
        delta=settings.delta,
        accountant=settings.accountant,
        spent=spent,
    )
    if settings.task == "regression":
        rate = min(plan.suggested_learning_rate, 0.1)
    elif name == "network":
        rate = min(plan.suggested_learning_rate, 8.0)
    else:
        rate = 2.0  # The classes of a linear model do not depend on the scale of its weights.
    return name, plan, settings.learning_rate or rate


def inputs(table, settings):
    """Returns the part of a record that says how to prepare rows for the model, a dict.

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
        if values.dtype.kind != "U":  # The model clips the largest number, and not infinity.
            values = np.clip(values, -largest, largest).astype("float32")
        tensors[input_name(name)] = tf.constant(values[:, np.newaxis])
    return model.predict(tensors, batch_size=_PREDICT_BATCH, verbose=0)


def measure(model, rows, settings):
    """Measures a model on rows.

    Args:
        model: `keras.Model`.
        rows: `data.tables.Rows`.
        settings: The settings of the run.

    Returns:
        Dict of floats, "test_accuracy", or "test_r2" and "test_mean_error"; None without rows.
    """
    if settings.task == "regression":
        scores = {"test_r2": metrics.r2_score, "test_mean_error": metrics.mean_absolute_error}
    else:
        scores = {"test_accuracy": metrics.accuracy_score}
    if not len(rows):
        return dict.fromkeys(scores)
    outputs = predict(model, rows.columns)
    predicted = outputs[:, 0] if settings.task == "regression" else outputs.argmax(axis=1)
    return {name: float(score(rows.target, predicted)) for name, score in scores.items()}


def predict_rows(model, rows, path, all_classes=False):
    """Predicts rows of a file, and writes a CSV file with a line for each, in their order.

    Args:
        model: String, path of a .keras file.
        rows: String, a CSV or Parquet file with the columns that the model was trained on.
        path: String, the file to write.
        all_classes: Bool, whether it gets the probability of every class.

    Returns:
        Dict for the last line.

    Raises:
        UserError: If the model is not of a table, or a column is missing or of another kind.
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
    file = pathlib.Path(rows).expanduser()
    if not file.is_file():
        raise UserError(f"There is no file at --rows={rows}.")
    columns = data_tables.read_columns(file, record.inputs["columns"], flag="rows")
    outputs = predict(start_from.read(model, "model"), columns)
    header, names = [record.inputs["target"]], record.inputs["class_names"]
    if names:
        probabilities = ops.convert_to_numpy(ops.softmax(outputs))
        header += ["probability", *(names if all_classes else ())]
        lines = []
        for row in probabilities:
            shown = [row.max(), *(row if all_classes else ())]
            lines.append([names[row.argmax()], *(f"{value:.6f}" for value in shown)])
    else:
        lines = [[f"{value:.6g}"] for value in outputs[:, 0]]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([header, *lines])
    try:
        _files.write(pathlib.Path(path).expanduser(), text.getvalue().encode(), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={path}: {error}.") from error
    return {"rows": len(lines), "model": model, "csv": path}
