"""Private models of tables: `classify --dataset=csv:PATH` or `parquet:PATH`.

A part of the budget pays for statistics of the columns, which scale numbers and find the frequent
texts, and for a count of the labels. The rest pays for the training of a linear model or of one
hidden layer, by a rule of epsilon times rows that was fitted on generated tables (docs/tables.md).
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

import tfdpx
from tfdpx import _files
from tfdpx.accounting.ledger import EXAMPLE, USER, Ledger
from tfdpx.heads.releases import Releases
from tfdpx.tables import narrow
from tfdpx.train import model_files
from tfdpx.train.data import tables as data_tables
from tfdpx.train.data.tables import BOOLEAN, CATEGORY, NUMBER, input_name
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.measure import Measured, check_threshold, predicted_classes, probabilities

# The share of the squared mu of Gaussian differential privacy, which adds up.
_SHARE_OF_RELEASES = 0.1
_LARGEST = 4.0  # Numbers are clipped to so many deviations.
_NOISIEST_MEAN = 0.05  # As a part of the range; noisier means are not worth their budget.
# As a part of the rows: counts that are noisier narrow no bounds, and find no rare label.
_NOISIEST_CELL, _NOISIEST_LABEL = 0.12, 1 / 3
_RARE_LABEL = 0.5  # Of an even share, which is 25% of two labels.
_NOISE_OF_LABELS = 2  # Times that of the other releases.
# Ranges are found from the counts of powers of two. The fullest bin of a column has about a third
# of the rows, and should stand out.
_FULLEST_BIN, _BINS = 1 / 3, 123
_PREPARATION = (
    "A dict from columns to arrays [rows, 1]: numbers and booleans as float32, NaN where missing; "
    'categories as strings, "(missing)" where missing. The model does all else.'
)
# Limits of epsilon times rows, and what lies below and above.
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
        l2_norm_clip: Float, or "automatic".
        optimizer: The tfdpx optimizer, with the ledger of all that was spent.
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
        UserError: If the rows are too few to find ranges, or settings do not go together.
    """
    if settings.seed is not None:
        keras.utils.set_random_seed(settings.seed % 2**32)
    y, by_person = table.train.target, {}
    # One row of a person, so that statistics change with all rows of one as with one row.
    rows = table.train.one_of_each_person()
    with checking_flags():
        preprocessing, spent, shares = adapt(rows, table, settings)
        if settings.user:
            spent = Ledger(tuple(dataclasses.replace(e, unit=USER) for e in spent.entries))
            by_person = {"user_ids": table.train.people}
            by_person["examples_per_user"] = settings.examples_per_user
        num_columns = None if shares is None else len(table.kinds)
        name, plan, learning_rate, clip = choose(settings, len(rows), spent, num_columns)
    x = predict(preprocessing, table.train.columns)
    head = keras.Sequential([keras.Input(x.shape[1:])], name="tfdpx.head")
    if name == "network":
        head.add(keras.layers.Dense(_HIDDEN, "tanh"))
    head.add(keras.layers.Dense(len(table.class_names) or 1, kernel_initializer="zeros"))
    if shares is not None:
        head.layers[-1].bias.assign(np.log(shares))
    outputs = head(preprocessing.output)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if settings.task == "regression":
        middle = (settings.target_upper + settings.target_lower) / 2
        half = (settings.target_upper - settings.target_lower) / 2
        y, loss = ((y - middle) / half)[:, np.newaxis], "mean_squared_error"
        outputs = keras.layers.Rescaling(half, middle, name="tfdpx.rescaling")(outputs)
    optimizer = tfdpx.DPSGD(learning_rate, plan=plan, l2_norm_clip=clip, seed=settings.seed)
    # Another model of the same layers, because a file of a compiled one would hold the optimizer.
    private = keras.Model(head.inputs[0], head.outputs[0])
    private.compile(optimizer, loss)
    private.fit(plan.batches(x, y, optimizer=optimizer, **by_person), shuffle=False, verbose=0)
    model = keras.Model(preprocessing.input, outputs, name=f"{name}_on_table")
    return Trained(model, plan, learning_rate, clip, optimizer)


def adapt(rows, table, settings):
    """Makes the layers in front of a model of a table, and counts the labels.

    Numbers are centred and scaled by a private mean and variance within their public range, which
    is narrowed first if it is rough, or by that range where rows are too few. Texts are one-hot
    over those that are frequent.

    Guarantee: the ledger has all that the statistics in the layers and the shares cost. Names and
    kinds of columns, labels, the number of rows and `settings.ranges` are public.

    Args:
        rows: `data.tables.Rows` to train on.
        table: `data.tables.Table`, for kinds of columns and labels.
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
    noise, takes_moments, narrows, counts_labels = _noise_of(
        settings, len(rows), unbounded, bounded, rough, texts, num_classes
    )
    release = {"noise_multiplier": noise, "seed": settings.seed}
    planned = {"cells": (noise, 1), "labels": (_NOISE_OF_LABELS * noise, 1)}
    releases, shares = Releases(planned, settings.seed), None
    if counts_labels:
        counts = np.bincount(rows.target, minlength=num_classes).astype("float64")
        counts = np.maximum(releases.gaussian("labels", counts, 1.0), _NOISE_OF_LABELS * noise)
        if np.min(counts) < _RARE_LABEL * len(rows) / num_classes:
            shares = counts / np.sum(counts)
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
        if names == bounded:
            lower, upper = np.array([limits[name] for name in bounded]).T
            if narrows:  # Numbers come first; booleans have no rough bounds.
                n = len(rough)
                lower[:n], upper[:n] = narrow(
                    *(x[:, :n], lower[:n], upper[:n]),
                    lambda exact, bound: (
                        releases.gaussian("cells", exact(), bound),
                        noise * bound,
                    ),
                )
        if names == unbounded or takes_moments:
            layer = keras.layers.Normalization()
            ledger += tfdpx.private_adapt(layer, x, lower=lower, upper=upper, **release)
        else:
            mean, variance = (lower + upper) / 2, ((upper - lower) / 2) ** 2
            layer = keras.layers.Normalization(mean=mean.tolist(), variance=variance.tolist())
        z = layer(ops.concatenate([inner_inputs[name] for name in names], axis=-1))
        parts.append(ops.clip(ops.where(ops.isnan(z), 0.0, z), -_LARGEST, _LARGEST))
    for name in texts:
        layer = keras.layers.StringLookup(output_mode="one_hot")
        ledger += tfdpx.private_adapt(layer, columns[name], **release)
        parts.append(layer(inner_inputs[name]))
    features = ops.concatenate(parts, axis=-1)
    # A model within a model, because columns may have the names of layers.
    inner = keras.Model(list(inner_inputs.values()), features, name="tfdpx.preprocessing")
    outer_inputs = {
        input_name(name): keras.Input((1,), dtype=tensor.dtype, name=input_name(name))
        for name, tensor in inner_inputs.items()
    }
    model = keras.Model(outer_inputs, inner(list(outer_inputs.values())))
    return model, ledger + releases.ledger(), shares


def _noise_of(settings, num_rows, unbounded, bounded, rough, texts, num_classes):
    """The noise multiplier of releases, and which there are of bounded columns and of labels.

    All follow from public numbers alone.

    Returns:
        Tuple of a float and three bools: whether there are moments of bounded columns, narrower
        bounds of rough ones, and counts of labels at `_NOISE_OF_LABELS` times the noise.
    """
    budget = {"delta": settings.delta, "accountant": "gdp"}
    plan = tfdpx.PrivacyPlan(num_rows, num_rows, 1, epsilon=settings.epsilon, **budget)
    of_one = plan.noise_multiplier / math.sqrt(_SHARE_OF_RELEASES)
    releases = 2 * bool(unbounded) + len(texts)
    of_label = _NOISE_OF_LABELS * of_one * math.sqrt(releases + 2)
    even_share = num_rows / max(num_classes, 1)
    counts_labels = num_classes > 1 and of_label < _NOISIEST_LABEL * _RARE_LABEL * even_share
    releases += counts_labels / _NOISE_OF_LABELS**2
    of_cell = of_one * math.sqrt((releases + 2) * len(rough))
    narrows = bool(rough) and of_cell < _NOISIEST_CELL * num_rows
    of_mean = of_one * math.sqrt((releases + 1) * 1.25 * len(bounded)) / (2 * num_rows)
    takes_moments = narrows or (bool(bounded) and of_mean < _NOISIEST_MEAN)
    noise_multiplier = of_one * math.sqrt(releases + takes_moments + narrows)
    if unbounded:
        of_bin = math.sqrt(len(unbounded) * 2 * math.log(10 * _BINS * len(unbounded)))
        if of_bin * noise_multiplier > _FULLEST_BIN * num_rows:
            # More rows or a larger epsilon may buy the other releases, too.
            most = releases + (num_classes > 1) / _NOISE_OF_LABELS**2 + 2 * bool(bounded)
            needed = math.ceil(of_bin * of_one * math.sqrt(most) / _FULLEST_BIN)
            enough = plan.noise_multiplier * num_rows / needed
            cost = tfdpx.PrivacyPlan(num_rows, num_rows, 1, noise_multiplier=enough, **budget)
            raise UserError(
                f"{num_rows} rows are too few to find the ranges of {len(unbounded)} columns at "
                f"--epsilon={settings.epsilon:g}, which takes some {needed} rows, or "
                f"--epsilon={math.ceil(10 * cost.epsilon) / 10:g}. Give what is publicly known, "
                f"even roughly: --bounds={unbounded[0]}:LOWER:UPPER,... or --bounds=*:LOWER:UPPER."
            )
    return noise_multiplier, takes_moments, narrows, counts_labels


def choose(settings, num_rows, spent, num_columns=None):
    """Chooses a model, its plan, learning rate and clip; the settings come first.

    Args:
        settings: The settings of the run.
        num_rows: Int, of the rows to train on, or people.
        spent: `tfdpx.accounting.Ledger` of the preprocessing.
        num_columns: Int, of the inputs, if a label is rare. Then the clip is about the largest norm
            of a gradient, so that few are cut: automatic clipping counts the rows of each label
            rather than their errors, and all probabilities tend to the frequent label.

    Returns:
        Tuple of "linear" or "network", the `tfdpx.PrivacyPlan`, a float, and a float or
        "automatic".

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
        unit=USER if settings.user else EXAMPLE,
    )
    clip = "automatic"
    if settings.task == "regression":
        rate = min(plan.suggested_learning_rate, 0.1)
    elif num_columns:
        # A column's mean square is one, that of a hidden unit's tanh about a half. Errors of the
        # probabilities have at most the norm sqrt(2).
        clip = math.sqrt(2 * (1 + (_HIDDEN / 2 if name == "network" else num_columns)))
        rate = min(plan.suggested_learning_rate / 2, clip)
    elif name == "network":
        rate = min(plan.suggested_learning_rate, 8.0)
    else:
        rate = 2.0  # The classes of a linear model do not depend on the scale of its weights.
    return name, plan, settings.learning_rate or rate, clip


def inputs(table, settings):
    """Returns the `inputs` of a record, a dict: the columns, and how to prepare rows for the model.

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


def measure(model, rows, class_names, threshold):
    """Returns the `Measured` of a model on rows.

    Args:
        model: `keras.Model` from a dict of columns to logits, or to values of the target.
        rows: `data.tables.Rows`.
        class_names: Tuple of names of the classes; none of a regression.
        threshold: Float, see `predicted_classes`.
    """
    outputs = np.zeros([0, len(class_names) or 1], "float32")
    if len(rows):
        outputs = predict(model, rows.columns)
    return Measured(rows.target, outputs if class_names else outputs[:, 0], class_names, threshold)


def predict_rows(model_path, rows_path, csv_path, all_classes=False, threshold=None):
    """Predicts rows of a file, and writes a CSV file with a line for each, in their order.

    Args:
        model_path: String, a .keras file.
        rows_path: String, a CSV or Parquet file with the columns that the model was trained on.
        csv_path: String, the file to write.
        all_classes: Bool, whether it gets the probability of every class.
        threshold: Float, see `predicted_classes`; None for the one recorded.

    Returns:
        Dict for the last line.

    Raises:
        UserError: If the model is not of a table, or a column is missing or of another kind.
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
        lines = [[target, "probability", *names]]
        classes = predicted_classes(outputs, threshold or recorded["threshold"])
        for index, row in zip(classes, probabilities(outputs), strict=True):
            lines.append([names[index], *(f"{p:.6f}" for p in (row[index], *row))])
        lines = lines if all_classes else [line[:2] for line in lines]
    else:
        lines = [[target], *([f"{value:.6g}"] for value in outputs[:, 0])]
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    try:
        _files.write(pathlib.Path(csv_path).expanduser(), text.getvalue().encode(), mode=0o644)
    except OSError as error:
        raise UserError(f"Cannot write --csv={csv_path}: {error}.") from error
    return {"rows": len(outputs), "model": model_path, "csv": csv_path}
