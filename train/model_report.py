"""`tfdpx.report`, which writes the report of a model that Keras code of a user trained."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from scipy import special

from tfdpx import account
from tfdpx._keras import model_internals, saving_internals
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.accounting.statement import why_unknown
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples
from tfdpx.train import measure
from tfdpx.train import report as files_of_run
from tfdpx.train.measure import Measured
from tfdpx.training.budget import ledger_at_rates
from tfdpx.training.private_optimizer import PrivateOptimizer

_UNITS = {2: "row", 4: "image"}  # By the rank of the only input of a model.
_LEAST_PROBABILITY, _LARGEST_PROBABILITY = 1e-30, 1 - 2.0**-24  # Their log-odds are finite.


def report(
    model: keras.Model,
    folder: str | os.PathLike,
    *,
    data: str,
    test: Any = None,
) -> dict[str, Any]:
    """Writes a report of a model's privacy loss and results, for the people who receive the model.

    The files are those of the program `tfdpx classify`: `model.keras` with its ledger, but without
    its optimizer, `record.json`, `privacy_statement.txt`, `report.html`, `model_card.md` and
    pictures. The command `tfdpx verify FOLDER` checks that they agree. Call it after the last
    `fit`.

    Metrics of `test` are exact, not private. They are on the page and in the record, which tell
    this, but not on the model card. For classes they are for example accuracy with its interval and
    base rate, and AUC; for a single number they are R2 and the mean absolute error. For all other
    models they are the metrics of `compile`.

    Args:
        model: A `keras.Model` of which all or some layers were trained by a tfdpx optimizer with a
            `plan`, or one with the layer of a fitted head of `tfdpx.heads`.
        folder: Path of a folder without a report. It is created if needed.
        data: String, the name of the training data, for example "ward 7, 2024". `tfdpx account`
            adds up reports on data with the same name.
        test: Optional test examples: arrays `(x, y)` as for `evaluate`, or a `tf.data.Dataset` of
            batches.

    Returns:
        Dict of JSON values: results, epsilon and other values that follow from the record.

    Raises:
        ValueError: If no private training of the model is known, a part of the privacy loss of its
            weights is unknown, `folder` has a report, or `test` is neither a pair nor a data set.

    Example:
    >>> tfdpx.report(model, "reports/first", data="ward 7, 2024", test=(x, y))  # doctest: +SKIP
    """
    if not (isinstance(data, str) and data.strip()):
        raise ValueError(
            f"Argument `data` must be the name of the data trained on. Received: data={data!r}."
        )
    folder = pathlib.Path(folder)
    if (folder / records.FILE).exists():
        raise ValueError(
            f"Argument `folder` must hold no report, because {records.FILE} in it is the account "
            f"of another one. Received: folder={str(folder)!r}. Name a new folder."
        )
    optimizer = model_internals.innermost(getattr(model, "optimizer", None))
    optimizer = optimizer if isinstance(optimizer, PrivateOptimizer) else None
    plan = optimizer.plan if optimizer else None
    ledger = _ledger(model, optimizer, plan)
    unit = _unit(model)
    measured, results = None, {}
    if test is not None:
        measured, results = _measure(model, test)
    settings = _settings(optimizer, plan)
    is_full_batch = all(entry.sampling_probability == 1 for entry in ledger.entries)
    sampling = plan.sampling if plan else "full_batch" if is_full_batch else "poisson"
    record = Record(
        program="tfdpx.report",
        data=DatasetId(data, ledger.num_examples),
        ledger=ledger,
        delta=ledger.delta if ledger.has_noise else None,
        accountant=plan.accountant if plan else "pld",
        sampling="unknown" if why_unknown(ledger) else sampling,
        independence="; ".join(map(str, optimizer.independence)) or None if optimizer else None,
        unit=unit,
        settings=settings,
        results={
            **results,
            **{name: settings[name] for name in ("learning_rate", "l2_norm_clip", "batch_size")},
            "noise_multiplier": plan and plan.noise_multiplier,
            "model": model.name,
            "parameters": model.count_params(),
            "trained_parameters": sum(math.prod(v.shape) for v in model.trainable_variables),
        },
    )
    folder.mkdir(parents=True, exist_ok=True)
    with saving_internals.saving_arrays(model, account.arrays_of(ledger)):
        files_of_run.save_model(model, record, folder)
    files_of_run.write_record(record, folder)
    if measured:
        files_of_run.draw_metrics(measured, folder)
    files_of_run.write_page(folder)
    return {**record.view(), "folder": str(folder)}


def _ledger(model: keras.Model, optimizer: Any, plan: PrivacyPlan | None) -> Ledger:
    """Returns the ledger of the weights of a model, with a delta."""
    ledger = optimizer.ledger if optimizer else account.ledger_of(model.weights)
    if plan:
        ledger = ledger_at_rates(optimizer, plan)
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


def _settings(optimizer: Any, plan: PrivacyPlan | None) -> dict[str, Any]:
    """Returns the arguments of an optimizer that the record names, as JSON values."""
    names = ("optimizer", "learning_rate", "l2_norm_clip", "augmult", "batch_size")
    settings: dict[str, Any] = dict.fromkeys(names)
    if optimizer:
        clip = optimizer.l2_norm_clip
        settings |= {
            "optimizer": type(optimizer).__name__,
            "learning_rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate)),
            "l2_norm_clip": clip if isinstance(clip, (int, float, str)) else type(clip).__name__,
            "augmult": optimizer.augmult,
            "batch_size": optimizer.batch_size,
        }
    return settings | ({"epsilon": plan.epsilon, "delta": plan.delta} if plan else {})


def _unit(model: keras.Model) -> str:
    """Returns the word for an example of a model: image, row, or example."""
    inputs = tf.nest.flatten(getattr(model, "inputs", None) or [])
    return _UNITS.get(len(inputs[0].shape), "example") if len(inputs) == 1 else "example"


def _measure(model: keras.Model, test: Any) -> tuple[Measured | None, dict[str, Any]]:
    """Returns the `Measured` of a model with classes or one value, and the results for a record."""
    is_pair = isinstance(test, tuple) and len(test) == 2
    if not is_pair and not isinstance(test, tf.data.Dataset):
        raise ValueError(
            "Argument `test` must be a pair (x, y) or a tf.data.Dataset of batches of pairs. "
            f"Received: a {type(test).__name__}."
        )
    batches = sampled_batches.in_order(as_examples(*test), measure.BATCH_SIZE) if is_pair else test
    outputs, labels = [], []
    for x, y, _ in map(keras.utils.unpack_x_y_sample_weight, batches):
        parts = model.predict(x, batch_size=measure.BATCH_SIZE, verbose=0), y
        if any(tf.nest.is_nested(part) or len(part.shape) > 2 for part in parts):
            return None, _evaluate(model, test if is_pair else (test,))
        outputs.append(np.asarray(parts[0], "float32").reshape(len(y), -1))
        labels.append(np.asarray(y).reshape(len(y), -1))
    targets, values = np.concatenate(labels), np.concatenate(outputs)
    classes = _class_indices(targets, values.shape[1])
    if classes is not None:
        logits = _logits(values, model.loss if model.compiled else None)
        measured = Measured(classes, logits, tuple(map(str, range(logits.shape[1]))))
    elif targets.shape[1] == values.shape[1] == 1 and targets.dtype.kind in "fiu":
        measured = Measured(targets[:, 0], values[:, 0])
    else:
        return None, _evaluate(model, test if is_pair else (test,))
    return measured, measured.results()


def _class_indices(targets: np.ndarray, num_outputs: int) -> np.ndarray | None:
    """Returns integer labels [n] for targets [n, 1] or one-hot [n, classes]; None for others."""
    if targets.dtype.kind not in "biuf":
        return None
    if targets.shape[1] == num_outputs > 1:
        is_one_hot = np.isin(targets, (0, 1)).all() and (targets.sum(axis=1) == 1).all()
        return targets.argmax(axis=1) if is_one_hot else None
    if targets.shape[1] > 1 or not np.isin(targets, range(max(num_outputs, 2))).all():
        return None
    return targets[:, 0].astype("int64")


def _logits(outputs: np.ndarray, loss: Any) -> np.ndarray:
    """Returns logits [n, classes] for logits or probabilities; one column is the second class."""
    if outputs.shape[1] > 1:
        is_sure = (outputs >= 0).all() and np.allclose(outputs.sum(axis=1), 1, atol=1e-2)
        return np.log(np.maximum(outputs, _LEAST_PROBABILITY)) if is_sure else outputs
    if not getattr(loss, "from_logits", ((outputs < 0) | (outputs > 1)).any()):
        shares = np.clip(outputs.astype("float64"), _LEAST_PROBABILITY, _LARGEST_PROBABILITY)
        outputs = special.logit(shares)
    return np.concatenate([np.zeros_like(outputs), outputs], axis=1)


def _evaluate(model: keras.Model, test: tuple) -> dict[str, Any]:
    """Evaluates the metrics that a model was compiled with, and returns results for a record."""
    scores = model.evaluate(*test, return_dict=True, verbose=0) if model.compiled else {}
    results = {f"test_{name}": float(score) for name, score in scores.items()}
    return records.plain(results | {"measured_on": "test", "not_protected": measure.NOT_PROTECTED})
