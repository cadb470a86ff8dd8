"""Finds and reads the file of a model that a flag names."""

import pathlib
import zipfile

import keras

from tfdpx import account
from tfdpx.accounting import record as records
from tfdpx.train.errors import UserError

# The file in a run's folder with its model.
MODEL_FILE = "model.keras"


def model_file(path, flag="init_from", suffixes=(".keras", ".weights.h5")):
    """Returns the file that a flag names, or the model in a run's folder.

    Args:
        path: String.
        flag: String, the name of the flag, for errors.
        suffixes: Tuple of strings, the valid endings of files.

    Raises:
        UserError: If there is no such file.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        if not (file / records.FILE).exists() or not (file / MODEL_FILE).is_file():
            raise UserError(
                f"The folder --{flag}={path} holds no finished run: {records.FILE} and model.keras."
                " Name a finished run (--resume ends one that was interrupted), or a .keras file."
            )
        file = file / MODEL_FILE
    if not (file.name.endswith(suffixes) and file.is_file()):
        reason = "a file of another kind" if file.exists() else "which does not exist"
        raise UserError(
            f"Flag --{flag} must name a run folder, or a file that ends in "
            f"{' or '.join(suffixes)}. Received: --{flag}={path}, {reason}. An .h5 file of a whole "
            "model becomes one by keras.saving.load_model(path).save('model.keras')."
        )
    if file.suffix == ".keras" and not zipfile.is_zipfile(file):
        raise UserError(
            f"Cannot read --{flag}={path}: it is not a model that Keras saved. Save one by "
            "model.save('model.keras')."
        )
    return str(file)


def read(path, flag="init_from"):
    """Reads the model of a `.keras` file. The record in the file accounts for its origin."""
    try:
        model = keras.saving.load_model(path, compile=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"Cannot read --{flag}={path}: {error}") from error
    account.mark_known(model.variables)
    return model


def recorded_inputs(path):
    """Returns inputs and threshold in the record of a `.keras` file, a dict; empty if it has none.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        record = records.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read --model={path}: {error}") from error
    if not (record and record.inputs):
        return {}
    return {"threshold": record.results.get("threshold", 0.5), **record.inputs}
