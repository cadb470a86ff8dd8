"""A run on a table: its columns, their statistics, the training, and what it leaves."""

import dataclasses
import pathlib
import time

import keras
import numpy as np

import tfdpx
from tfdpx.accounting.record import Record
from tfdpx.train import pictures, report
from tfdpx.train.config import run_flags
from tfdpx.train.data import identity
from tfdpx.train.errors import checking_flags
from tfdpx.train.run import provenance
from tfdpx.train.tables import columns, models
from tfdpx.train.tables.preprocessing import Preprocessing, predict

_PREPARATION = (
    "A dict from columns to arrays [rows, 1]: numbers and booleans as float32, NaN where missing; "
    'categories as strings, "(missing)" where missing. The model does all else.'
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training on a table gave.

    Attributes:
        model: `keras.Model` from a dict of columns to logits, or to values of the target.
        choice: `models.Choice`.
        optimizer: The tfdpx optimizer, with the ledger of all that was spent.
    """

    model: keras.Model
    choice: models.Choice
    optimizer: keras.optimizers.Optimizer


def fit(table, settings):
    """Trains a model on the rows of a table to train on.

    Args:
        table: `columns.Table`.
        settings: `settings.TableSettings`.

    Returns:
        `Trained`.
    """
    train, num_rows = table.train, len(table.train)
    prepared = Preprocessing(
        table.kinds, settings.ranges, num_rows, settings.epsilon, settings.delta
    )
    if settings.seed is not None:
        keras.utils.set_random_seed(settings.seed)
    before, spent = prepared.adapt(train.columns, settings.seed)
    x = predict(before, train.columns)
    with checking_flags():
        choice = models.choose(settings, num_rows, spent)
    head = models.head(choice.model, x.shape[1], len(table.class_names) or 1)
    optimizer = tfdpx.DPSGD(
        choice.learning_rate, plan=choice.plan, l2_norm_clip="automatic", seed=settings.seed
    )
    y, loss = train.target, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if settings.is_regression:
        middle = (settings.target_upper + settings.target_lower) / 2
        half = (settings.target_upper - settings.target_lower) / 2
        y, loss = ((y - middle) / half)[:, np.newaxis], "mean_squared_error"
    # Another model of the same layers: a file of a compiled one would hold the optimizer.
    private = keras.Model(head.inputs[0], head.outputs[0])
    private.compile(optimizer, loss)
    private.fit(choice.plan.batches(x, y, optimizer=optimizer), shuffle=False, verbose=0)
    outputs = head(before.output)
    if settings.is_regression:
        outputs = keras.layers.Rescaling(half, middle, name="tfdpx.rescaling")(outputs)
    name = f"{choice.model}_on_table"
    return Trained(keras.Model(before.input, outputs, name=name), choice, optimizer)


def main(settings):
    """Runs `train` in the folder of --workdir, and returns what it does."""
    path = run_flags.WORKDIR.value or time.strftime("runs/table-%Y%m%d-%H%M%S")
    with run_flags.leaving_no_empty_folder(pathlib.Path(path)):
        return train(settings, run_flags.make_workdir(path))


def train(settings, workdir):
    """Trains, measures, and writes what every run leaves.

    Args:
        settings: `settings.TableSettings`.
        workdir: `pathlib.Path`.

    Returns:
        The report, a dict.
    """
    table = columns.load(settings)
    print(
        f"{len(table.train)} rows to train on, {len(table.test)} to test on; "
        + ", ".join(f"{name} ({kind})" for name, kind in table.kinds.items())
    )
    print(
        "Public, so not protected: how many rows there are to train on, names and types of columns"
        + (f", the labels {', '.join(table.class_names)}." if table.class_names else ".")
    )
    began = time.perf_counter()
    data = identity.of(settings.dataset, len(table.train))
    trained = fit(table, settings)
    seconds = time.perf_counter() - began
    plan, optimizer = trained.choice.plan, trained.optimizer
    found = measure(trained.model, table.test, settings)
    record = Record(
        program="classify",
        data=data,
        ledger=optimizer.ledger,
        delta=plan.delta,
        accountant=plan.accountant,
        sampling=plan.sampling,
        independence="; ".join(map(str, optimizer.independence)) or None,
        inputs={
            "columns": table.kinds,
            "target": settings.target,
            "class_names": list(table.class_names),
            "preparation": _PREPARATION,
        },
        unit="row",
        settings=provenance.without_secrets(settings),
        results={
            **found,
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            "preprocessing_noise_multiplier": max(
                (entry.noise_multiplier for entry in plan.spent.entries), default=None
            ),
            "releases": plan.spent.steps,
            "seconds": seconds,
            "batch_size": plan.batch_size,
            "sampling_probability": plan.sampling_probability,
            "measured_on": "test",
            "num_measured": len(table.test),
            "model": trained.model.name,
            "learning_rate": trained.choice.learning_rate,
            "l2_norm_clip": "automatic",
            "parameters": trained.model.count_params(),
        },
    )
    report.save_model(trained.model, record, workdir)
    report.write_record(record, workdir)
    if table.class_names and len(table.test):
        predicted = predict(trained.model, table.test.columns).argmax(axis=1)
        path = workdir / report.CONFUSION
        pictures.confusion_matrix(table.test.target, predicted, table.class_names, path)
    report.write_page(workdir)
    return {**record.view(), "workdir": str(workdir)}


def measure(model, rows, settings):
    """What a model makes of rows, a dict of floats; None without rows.

    Args:
        model: `keras.Model`.
        rows: `columns.Rows`.
        settings: `settings.TableSettings`.
    """
    names = ("test_r2", "test_mean_error") if settings.is_regression else ("test_accuracy",)
    if not len(rows):
        return dict.fromkeys(names)
    found = predict(model, rows.columns)
    if not settings.is_regression:
        return {names[0]: float(np.mean(found.argmax(axis=1) == rows.target))}
    errors = found[:, 0] - rows.target
    variance = float(np.var(rows.target))
    r2 = 1 - float(np.mean(errors**2)) / variance if variance else None
    return dict(zip(names, (r2, float(np.mean(np.abs(errors)))), strict=True))
