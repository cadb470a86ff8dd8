"""Checks of callbacks that would act on training metrics, which are computed without noise.

The training loss and metrics are computed from the private data without noise. A callback must not
use them to choose weights, a learning rate, the number of steps or the name of a file. Such a
choice would reveal more of the examples than epsilon allows, so the callback is refused. Validation
metrics are trusted only if the optimizer has `public_validation=True`, which declares that their
examples are public. For a callback that only writes numbers for the user to read, there is a
warning. Custom code that reads the logs, and callbacks inside of other callbacks, cannot be
checked.
"""

import numbers
import os
import re
import string

import keras
import numpy as np

from tfdpx._warnings import warn
from tfdpx.checks.errors import refusing

# Callbacks that write every number of the logs.
_WRITING = (
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
# Packages with callbacks that write every number of the logs.
_TRACKERS = ("comet_ml", "dvclive", "mlflow", "neptune", "wandb")
# Attributes in which callbacks of Keras, Optuna and KerasTuner keep the metric that they act on.
_MONITORS = ("monitor", "_monitor", "objective")
# Attributes in which callbacks keep the paths that they write to, and the fields that a path may
# have.
_PATHS = ("filepath", "filename", "directory", "backup_dir", "log_dir")
_COUNTERS = ("epoch", "batch")
_COVERED = ("epsilon", "epsilon_approximate", "learning_rate", "l2_norm_clip")
IF_PUBLIC = (
    "If the validation examples are public, make the optimizer with `public_validation=True`."
)


def is_covered(name, optimizer):
    """Returns whether a number in the logs is from public data, or covered by the guarantee.

    Args:
        name: String, the number's name in the logs.
        optimizer: The innermost optimizer of the model, private or not.
    """
    if name.startswith("val_"):
        return not getattr(optimizer, "noise_multiplier", 0) or optimizer.public_validation
    return name in _COVERED


def check_validation_data(data, x, optimizer):
    """Raises if the validation examples share memory with the training examples.

    Args:
        data: The `validation_data` of `fit`, or None.
        x: The `x` of `fit`: arrays, or an object such as a `tf.data.Dataset`.
        optimizer: The tfdpx optimizer; without noise nothing is refused.

    Raises:
        ValueError: If an input of `data` is an input of `x`, or an array that shares memory with
            one.
    """
    if not optimizer.noise_multiplier or data is None:
        return
    inputs = _objects_in(keras.utils.unpack_x_y_sample_weight(data)[0])
    if any(_share_memory(first, second) for first in inputs for second in _objects_in(x)):
        raise ValueError(
            "Argument `validation_data` must hold other examples than `x`. Received: the same "
            "object, or arrays that share memory with `x`. Validate on examples that are not "
            "trained on."
        )


def check_callbacks(callbacks, optimizer):
    """Raises if a callback would base a decision on metrics of private examples.

    Args:
        callbacks: The argument of `fit`: a callback, a nest of them, a `CallbackList` or None.
        optimizer: The tfdpx optimizer; without noise nothing is refused.

    Raises:
        ValueError: If a callback would base a decision on such metrics. The message names the
            metric, or the path that the callback writes to.
    """
    if not optimizer.noise_multiplier:
        return
    with refusing(ValueError) as problems:
        for callback in _flatten(callbacks):
            problems += _problems_of_acting(callback, optimizer)
            problems += _problems_of_paths(callback, optimizer)
            if isinstance(callback, _WRITING) or _is_of(callback, _TRACKERS):
                warn(
                    f"{type(callback).__name__} writes the training loss and metrics, which the "
                    "privacy guarantee does not cover. Keep what it writes as secret as the data, "
                    "or use `tfdpx.callbacks.TensorBoard`.",
                )


def check_log_names(logs, optimizer):
    """Raises if a training metric has a name that is reserved for another number.

    Callbacks treat names that begin with "val_" as metrics of validation data, "epsilon" as the
    number of `PrivacyBudget`, and "l2_norm_clip" as the noisy clip of `AdaptiveClip`.

    Args:
        logs: Dict by name, the numbers that a training step shows.
        optimizer: As for `check_callbacks`.

    Raises:
        ValueError: If a metric has such a name. The message lists all such metrics.
    """
    with refusing(ValueError) as problems:
        for name in logs if optimizer.noise_multiplier else ():
            if name.startswith("val_") or name in _COVERED:
                problems.append(
                    "A training metric must not have a name that stands for validation or for the "
                    f"privacy spent, since callbacks would trust it. Received: '{name}'. Rename "
                    "the metric, or the output of the model whose loss it is."
                )


def _objects_in(data):
    """Returns the arrays and data sets in a nest, and leaves out strings, numbers and None."""
    plain_types = str | bytes | numbers.Number | None
    return [leaf for leaf in keras.tree.flatten(data) if not isinstance(leaf, plain_types)]


def _share_memory(first, second):
    are_arrays = isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
    return first is second or (are_arrays and np.shares_memory(first, second))


def _flatten(callbacks):
    """Yields every callback in a nest, also those in a `CallbackList`."""
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from _flatten(callback.callbacks)
        else:
            yield callback


def _is_of(callback, packages):
    return any(c.__module__.partition(".")[0] in packages for c in type(callback).__mro__)


def _problems_of_acting(callback, optimizer):
    of_mlflow = " `mlflow.autolog(checkpoint=False)` leaves it out."
    remedy = of_mlflow if _is_of(callback, ("mlflow",)) else ""
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        yield (
            "TerminateOnNaN would act on the training data without noise, which the privacy "
            "guarantee does not cover: one example could end the run. Leave the callback out: an "
            "example whose gradient is not finite contributes zero, and is counted in "
            "`optimizer.nonfinite_examples`."
        )
    # A checkpoint that saves every epoch has a `monitor` too, but ignores it.
    for attribute in _MONITORS if getattr(callback, "save_best_only", True) else ():
        monitor = getattr(callback, attribute, None)
        monitor = getattr(monitor, "name", monitor)
        if not isinstance(monitor, str) or is_covered(monitor, optimizer):
            continue
        argument = f"Received: {attribute}={monitor!r}."
        if not monitor.startswith("val_"):
            yield (
                f"{type(callback).__name__} would act on the training data without noise, which "
                f"the privacy guarantee does not cover. {argument} Monitor a metric of data that "
                f'need no privacy, such as "val_loss", or leave the callback out.{remedy}'
            )
        else:
            yield (
                f"{type(callback).__name__} would act on validation metrics, which the privacy "
                f"guarantee does not cover. {argument} {IF_PUBLIC}{remedy}"
            )


def _problems_of_paths(callback, optimizer):
    for attribute in _PATHS:
        path = getattr(callback, attribute, None)
        if not isinstance(path, (str, os.PathLike)):
            continue
        argument = f"Received: {attribute}={str(path)!r}."
        for field in _fields(os.fspath(path)):
            if field in _COUNTERS or is_covered(field, optimizer):
                continue
            if not field.startswith("val_"):
                yield (
                    f"{type(callback).__name__} would write the training metric '{field}' into a "
                    f"path, which the privacy guarantee does not cover. {argument} Name files by "
                    "{epoch} or a metric of public validation data, such as {val_loss}."
                )
            else:
                yield (
                    f"{type(callback).__name__} would write the validation metric '{field}' into "
                    f"a path, which the privacy guarantee does not cover. {argument} {IF_PUBLIC}"
                )


def _fields(template):
    """Yields the names of the fields of a format string, including fields within fields."""
    for _, field, specification, _ in string.Formatter().parse(template):
        if field is not None:
            yield re.split(r"[.\[]", field)[0]
            yield from _fields(specification)
