"""Which callbacks would act on the training data without noise, or write what no noise covers.

The training loss and metrics are functions of the private data that no noise was added to. A
callback that lets them choose weights, a learning rate, the number of steps or the name of a file
reveals more of the examples than epsilon says: it is refused. So it is with validation metrics
unless their examples are seen, or said, to be others than the private ones
(`tfdpx.checks.validation`). A callback that only writes for the user to read gets a warning. What a
callback of one's own does with its logs cannot be seen.
"""

import os
import re
import string

import keras

from tfdpx._warnings import warn
from tfdpx.checks.errors import refusing

# These write every number of the logs.
_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# Where callbacks of Keras, Optuna and KerasTuner keep the name of a metric that they act on.
_MONITORS = ("monitor", "_monitor", "objective")
# Where callbacks keep the paths that they write to, and the fields that those may have.
_PATHS = ("filepath", "filename", "directory", "backup_dir", "log_dir")
_COUNTERS = ("epoch", "batch")


_COVERED = ("epsilon", "epsilon_approximate", "learning_rate", "l2_norm_clip")
_IF_PUBLIC = (
    "Validate on public examples alone; or, if these are public, make the optimizer with "
    "`public_validation=True`."
)


def is_covered(name, validation=None):
    """Whether the guarantee covers a number of the logs, or it is not of the private data.

    Args:
        name: String.
        validation: Optional `tfdpx.checks.validation.Validation` of the `fit`.
    """
    if name.startswith("val_"):
        return validation is None or not validation.is_private
    return name in _COVERED


def check_callbacks(callbacks, optimizer, validation):
    """Raises if a callback would let metrics of private examples act on what is released.

    Args:
        callbacks: What `fit` was given: a callback, a nest of them, a `CallbackList` or None.
            Callbacks that a callback holds in its attributes are checked too.
        optimizer: Gives `noise_multiplier`; without noise there is no guarantee to void.
        validation: The `tfdpx.checks.validation.Validation` of the `fit`. Its examples are compared
            with what is trained on if a callback acts on validation metrics, or is a writer of
            what is covered alone.

    Raises:
        ValueError: Names each such callback, and what it monitors or the path that it writes to.
    """
    if not optimizer.noise_multiplier:
        return
    with refusing(ValueError) as problems:
        for callback in _callbacks_in(callbacks, set()):
            problems += _problems_of_acting(callback, validation)
            problems += _problems_of_paths(callback, validation)
            covered = getattr(callback, "writes_only_covered", False)
            if covered and validation.is_private:
                warn(
                    f"{type(callback).__name__} leaves the validation metrics out of what the "
                    f"privacy guarantee covers: {validation.objection}. {_IF_PUBLIC}",
                )
            if isinstance(callback, _WRITING) and not covered:
                warn(
                    f"{type(callback).__name__} writes the training loss and metrics, which the "
                    "privacy guarantee does not cover. Keep what it writes as secret as the data, "
                    "or use `tfdpx.callbacks.TensorBoard`.",
                )


def check_log_names(logs, optimizer):
    """Raises if a training metric has a name by which it would pass for another number.

    Callbacks take what begins with "val_" for a metric of validation data, "epsilon" for what
    `PrivacyBudget` computes, and "l2_norm_clip" for the noisy one of `AdaptiveClip`.

    Args:
        logs: Dict by name, what a training step shows.
        optimizer: As for `check_callbacks`.

    Raises:
        ValueError: Names each such metric.
    """
    with refusing(ValueError) as problems:
        for name in logs if optimizer.noise_multiplier else ():
            if is_covered(name):
                problems.append(
                    "A training metric must not have a name that stands for validation or for the "
                    f"privacy spent, since callbacks would trust it. Received: '{name}'. Rename "
                    "the metric, or the output of the model whose loss it is."
                )


def _callbacks_in(value, seen):
    """Every callback in a nest, and those that callbacks hold in their attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, keras.callbacks.Callback):
        yield value
        value = vars(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple, set)):
        return
    for inner in value:
        yield from _callbacks_in(inner, seen)


def _problems_of_acting(callback, validation):
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        yield (
            "TerminateOnNaN would act on the training data without noise, which the privacy "
            "guarantee does not cover: one example could end the run. Leave the callback out: an "
            "example whose gradient is not finite contributes zero, and is counted in "
            "`optimizer.nonfinite_examples`."
        )
    # A checkpoint has a name to monitor also where it saves regardless of it.
    for attribute in _MONITORS if getattr(callback, "save_best_only", True) else ():
        monitor = getattr(callback, attribute, None)
        monitor = getattr(monitor, "name", monitor)
        if not isinstance(monitor, str) or monitor in _COVERED:
            continue
        received = f"Received: {attribute}={monitor!r}."
        if not monitor.startswith("val_"):
            yield (
                f"{type(callback).__name__} would act on the training data without noise, which "
                f"the privacy guarantee does not cover. {received} Monitor a metric of data that "
                'need no privacy, such as "val_loss", or leave the callback out.'
            )
        elif validation.objection is not None:
            yield (
                f"{type(callback).__name__} would act on validation metrics that the privacy "
                f"guarantee does not cover: {validation.objection}. {received} {_IF_PUBLIC}"
            )


def _problems_of_paths(callback, validation):
    for attribute in _PATHS:
        path = getattr(callback, attribute, None)
        if not isinstance(path, (str, os.PathLike)):
            continue
        received = f"Received: {attribute}={str(path)!r}."
        for field in _fields(os.fspath(path)):
            if field in _COUNTERS or field in _COVERED:
                continue
            if not field.startswith("val_"):
                yield (
                    f"{type(callback).__name__} would write the training metric '{field}' into a "
                    f"path, which the privacy guarantee does not cover. {received} Name files by "
                    "{epoch} or a metric of public validation data, such as {val_loss}."
                )
            elif validation.objection is not None:
                yield (
                    f"{type(callback).__name__} would write the validation metric '{field}' into "
                    "a path, which the privacy guarantee does not cover: "
                    f"{validation.objection}. {received} {_IF_PUBLIC}"
                )


def _fields(template):
    """The names of the replacement fields of a format string, also of those within formats."""
    for _, field, specification, _ in string.Formatter().parse(template):
        if field is not None:
            yield re.split(r"[.\[]", field)[0]
            yield from _fields(specification)
