"""Assembles the record of a run, and writes the files of the run.

`write` is the last step of every program. `tfdpx.report` calls `write` for a model that was not
trained by a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdpx import _files as files
from tfdpx import account
from tfdpx._keras import model_internals, saving_internals
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.accounting.statement import is_unknown
from tfdpx.report import card, measure, page, pictures, words
from tfdpx.report.measure import Measured
from tfdpx.report.spent import MODEL
from tfdpx.sampling.examples import as_examples
from tfdpx.training.budget import ledger_at_rates
from tfdpx.training.private_optimizer import PrivateOptimizer

STATEMENT = "privacy_statement.txt"
_MOST_WRONG = 12
_UNITS = {2: "row", 4: "image"}  # From the rank of a model's only input to its unit.


def report(
    model: keras.Model,
    folder: str | os.PathLike,
    *,
    data: str,
    test: Any = None,
) -> dict[str, Any]:
    """Writes a report of a model's privacy loss and results, for the people who receive the model.

    Call this function after the last `fit`. It writes the same files as the program `tfdpx
    classify`: `model.keras` (with the ledger, but without the optimizer), `record.json`,
    `privacy_statement.txt`, `report.html`, `model_card.md` and pictures. The command `tfdpx verify
    FOLDER` checks that the files agree.

    Metrics on `test` are exact, so no guarantee covers them. The page and the record show them with
    a warning, and the model card leaves them out. For a classifier, the metrics are, for example,
    accuracy with its confidence interval, the share of the most frequent class, and AUC. For a
    model that predicts a single number, they are R2 and the mean absolute error. For any other
    model, they are the metrics of `compile`.

    Args:
        model: A `keras.Model`. Some of its layers were trained by a tfdpx optimizer with a `plan`,
            or one of them comes from a fitted head of `tfdpx.heads`.
        folder: Path of a folder without a report. It is created if needed.
        data: String, the name of the training data, for example "ward 7, 2024". `tfdpx account`
            adds up reports on data with the same name.
        test: Optional test examples: arrays `(x, y)` as for `evaluate`, or a `tf.data.Dataset` of
            batches.

    Returns:
        Dict of JSON values: the results, epsilon, and other values from the record.

    Raises:
        OSError: If a file cannot be written, for example because the disk is full.
        ValueError: If no private training of the model is known, if a part of the privacy loss of
            its weights is unknown, if `folder` has a report, or if `test` is neither a pair nor a
            data set.

    Example:
    >>> tfdpx.report(model, "reports/first", data="ward 7, 2024", test=(x, y))  # doctest: +SKIP
    """
    if not (isinstance(data, str) and data.strip()):
        raise ValueError(
            f"Argument `data` must be the name of the data trained on. Received: data={data!r}."
        )
    folder = _new(folder, "folder")
    optimizer = model_internals.innermost(getattr(model, "optimizer", None))
    optimizer = optimizer if isinstance(optimizer, PrivateOptimizer) else None
    ledger = _ledger(model, optimizer)
    measured, results = (None, {}) if test is None else measure.measure_keras(model, test)
    settings = _settings(optimizer)
    shown = {name: settings.get(name) for name in ("learning_rate", "l2_norm_clip")}
    with saving_internals.saving_arrays(model, account.arrays_of(ledger)):
        record = write(
            folder,
            program="tfdpx.report",
            data=DatasetId(data, ledger.num_examples),
            ledger=ledger,
            model=model,
            optimizer=optimizer,
            measured=measured,
            results={**results, **shown},
            unit=_unit(model),
            settings=settings,
        )
    return {**record.view(), "folder": str(folder)}


def write(
    folder: str | os.PathLike,
    *,
    ledger: Ledger,
    model: keras.Model | None = None,
    optimizer: Any = None,
    measured: Measured | None = None,
    results: Mapping[str, Any] | None = None,
    curve: Sequence[Mapping[str, float]] = (),
    examples: Any = None,
    **facts: Any,
) -> Record:
    """Assembles the record of a run, and writes all files that follow from it.

    The model is written first. It contains the record, so weights never exist without a record.
    Then `record.json` is written, which marks the run as finished. Pictures, page and card come
    last.

    Args:
        folder: Path of the folder. It is created if needed.
        ledger: `Ledger` of the privacy that the weights have spent on the data.
        model: A `keras.Model` without an optimizer, or None to write no model.
        optimizer: The tfdpx optimizer with the plan of the run; None if the run had none.
        measured: `measure.Measured`, for metrics and pictures; or None.
        results: Dict of other results, as JSON values.
        curve: The rows of a learning curve, dicts with `step`, `epsilon` and `accuracy`.
        examples: The measured images, for pictures of wrong predictions: a tuple of the arguments
            of `tfdpx.sampling.examples.as_examples`; or None.
        **facts: Other arguments of `Record`. Arguments that follow from ledger and optimizer may be
            left out.

    Returns:
        The `Record`.

    Raises:
        OSError: If a file cannot be written, for example because the disk is full.
    """
    folder, plan = pathlib.Path(folder), optimizer.plan if optimizer else None
    is_full_batch = all(entry.sampling_probability == 1 for entry in ledger.entries)
    sampling = plan.sampling if plan else "full_batch" if is_full_batch else "poisson"
    defaults: dict[str, Any] = {
        "delta": (plan.delta if plan else ledger.delta) if ledger.has_noise else None,
        "accountant": plan.accountant if plan else "pld",
        "initialized": model is not None and account.are_initialized(model.weights),
        "sampling": "unknown" if is_unknown(ledger) else sampling,
        "independence": optimizer and ("; ".join(map(str, optimizer.independence)) or None),
    }
    names = ("noise_multiplier", "batch_size", "sampling_probability") if plan else ()
    of_training: dict[str, Any] = {name: getattr(plan, name) for name in names}
    if model is not None:
        trained = sum(math.prod(v.shape) for v in model.trainable_variables)
        of_training |= {"model": model.name, "parameters": model.count_params()}
        of_training["trained_parameters"] = trained
    results = {**(measured.results() if measured else {}), **of_training, **(results or {})}
    record = words.worded(Record(ledger=ledger, results=results, **defaults | facts))
    folder.mkdir(parents=True, exist_ok=True)
    if model is not None:
        with files.replacing(folder / MODEL, mode=0o644) as fresh:
            model.save(fresh)
            record = record.save(fresh)
    _write_record(record, folder)
    with _after_the_record(folder):
        _draw(record, folder, measured, [row for row in curve if "accuracy" in row], examples)
    write_page(folder)
    return record


def rewrite(folder: pathlib.Path, *, results: Mapping[str, Any], **facts: Any) -> Record:
    """Changes the record of a finished run, and rewrites all files that are made from the record.

    Args:
        folder: `pathlib.Path` of the run.
        results: Dict of results to add.
        **facts: Arguments of `Record` that replace the old values.
    """
    old = records.read(folder / records.FILE)
    changed = {**facts, "results": {**old.results, **results}}
    record = words.worded(dataclasses.replace(old, **changed))
    record = record.save(folder / MODEL)
    _write_record(record, folder)
    write_page(folder)
    return record


def render(record: Record, folder: str | os.PathLike) -> None:
    """Writes statement, page, card and the picture of attack bounds for a record to a folder.

    Args:
        record: `Record`.
        folder: Path of a folder without a record. It is created if needed.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the folder holds a record.
    """
    path = _new(folder, "render")
    path.mkdir(parents=True, exist_ok=True)
    _write_record(record, path)
    write_page(path)


def write_page(folder: str | os.PathLike) -> None:
    """Writes `attack.png`, `report.html` and `model_card.md` from the record of a finished run.

    Args:
        folder: Path of the folder with `record.json` and pictures.

    Raises:
        OSError: If the folder has no record, because its run is unfinished. Also if the page cannot
            be written, for example because the disk is full.
        ValueError: If the record is damaged.
    """
    folder = pathlib.Path(folder)
    record = records.read(folder / records.FILE)
    bounds = record.attack_bounds()
    with _after_the_record(folder):
        if bounds and record.ledger.steps and record.is_private:
            pictures.attack_curve(bounds, folder / page.ATTACK)
        files.write(folder / page.FILE, page.page(record, page.pictures_of(folder)), mode=0o644)
        # The name of a file may have bytes that are not valid characters.
        text = card.text(record).encode("utf-8", "backslashreplace")
        files.write(folder / card.FILE, text, mode=0o644)


def _new(folder, name):
    """Returns the path of a folder; raises ValueError if the folder holds a record."""
    folder = pathlib.Path(folder).expanduser()
    if (folder / records.FILE).exists():
        raise ValueError(
            f"Argument `{name}` must hold no report, because {records.FILE} in it is the account "
            f"of another one. Received: {name}={str(folder)!r}. Name a new folder."
        )
    return folder


@contextlib.contextmanager
def _after_the_record(folder: pathlib.Path) -> Iterator[None]:
    """Context manager for writing pictures and page. Adds a remedy to the text of disk errors."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        raise files.DiskError(
            f"The page {os.fspath(folder / page.FILE)!r} or a picture could not be written: "
            f"{error}. Model, record and statement were saved before and are whole. Make room, and "
            'write the page by `python -c "from tfdpx.report.report import write_page; '
            f'write_page({os.fspath(folder)!r})"`.'
        ) from error


def _write_record(record: Record, folder: pathlib.Path) -> None:
    text = words.statement(record).encode("utf-8", "backslashreplace")
    files.write(folder / STATEMENT, text, mode=0o644)
    record.save(folder / records.FILE)


def _draw(record, folder, measured, curve, examples):
    """Draws the learning curve and, for classes, the confusion matrix and the calibration.

    For public examples, it also draws wrong predictions, and precision and recall by threshold.
    """
    if curve:
        split = record.results["measured_on"]
        base_rate = record.results[f"{split}_base_rate"]
        pictures.learning_curve(curve, folder / page.CURVE, split, base_rate)
    if not measured or not len(measured.class_names) or not len(measured.targets):
        return
    labels, predictions, names = measured.targets, measured.predictions, measured.class_names
    pictures.confusion_matrix(labels, predictions, names, folder / page.CONFUSION)
    if len(names) == 2 and np.isfinite(measured.margins).all():
        shown = names[1], folder / page.CALIBRATION, measured.is_public
        pictures.calibration(labels, measured.positive, *shown)
    wrong = np.flatnonzero(np.not_equal(labels, predictions))
    if examples is not None and measured.is_public and len(wrong):
        rows = wrong[np.linspace(0, len(wrong) - 1, min(len(wrong), _MOST_WRONG)).astype(int)]
        images, _, _ = as_examples(*examples).batch(rows, len(rows))
        shown = (labels[rows], predictions[rows], names, folder / page.WRONG)
        pictures.wrong_predictions(np.asarray(images), *shown)


def _ledger(model: keras.Model, optimizer: Any) -> Ledger:
    """Returns the ledger of a model's weights. Its `delta` is set."""
    ledger = optimizer.ledger if optimizer else account.ledger_of(model.weights)
    if optimizer and optimizer.plan:
        ledger = ledger_at_rates(optimizer, optimizer.plan)
    if not ledger.entries:
        raise ValueError(
            "No private training of this model is known, so there is nothing to report. Compile it "
            "with a tfdpx optimizer, `model.compile(tfdpx.DPSGD(..., plan=plan), ...)`, and `fit`."
        )
    if not ledger.is_complete:
        raise ValueError(
            "A part of what the weights of this model have spent is unknown: values came from a "
            "file without a ledger, `set_weights`, an ordinary `fit`, an initializer of your own, "
            "or from before `import tfdpx`. If no private data are in the weights that it began "
            "with, say `tfdpx.checks.mark_public(model)` on these layers; else load the `.keras` "
            "file that has the ledger, or use `tfdpx.copy_weights`."
        )
    if ledger.delta is None:
        raise ValueError(
            "The report needs a delta, and the optimizer has no plan that names it. Compile the "
            "model again with `plan=tfdpx.PrivacyPlan(...)`; what was spent stays in its account."
        )
    return ledger


def _settings(optimizer: Any) -> dict[str, Any]:
    """Returns the arguments of an optimizer for the record, a dict of JSON values."""
    if optimizer is None:
        return {}
    clip, plan = optimizer.l2_norm_clip, optimizer.plan
    settings = {name: getattr(plan, name) for name in ("epsilon", "delta") if plan}
    return settings | {
        "optimizer": type(optimizer).__name__,
        "learning_rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate)),
        "l2_norm_clip": clip if isinstance(clip, (int, float, str)) else type(clip).__name__,
        "augmult": optimizer.augmult,
        "batch_size": optimizer.batch_size,
    }


def _unit(model: keras.Model) -> str:
    """Returns the word for one input of a model: "image", "row" or "example"."""
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    return _UNITS.get(len(inputs[0].shape), "example") if len(inputs) == 1 else "example"
