"""Finds and reads the file of a model that a flag names, and the record in it.

The record has the images that a classifier takes and the names of its classes: Keras saves
neither.
"""

import dataclasses
import pathlib
import zipfile

import keras

from tfdpx import account
from tfdpx.accounting import record as records
from tfdpx.report.spent import MODEL
from tfdpx.train.errors import UserError

_PREPARATION = (
    "8-bit pixels, upright, transparent parts on white, {resized} by Pillow's bilinear filter. The "
    "model scales them itself. Its outputs are logits: their softmax are probabilities."
)
_CROPPED = "cropped around their centre to {0:.4g} of the shorter side and resized to image_shape"
_SQUEEZED = "resized to image_shape without keeping the aspect ratio"


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
        if not (file / records.FILE).exists() or not (file / MODEL).is_file():
            raise UserError(
                f"The folder --{flag}={path} holds no finished run: {records.FILE} and {MODEL}."
                " Name a finished run (--resume ends one that was interrupted), or a .keras file."
            )
        file = file / MODEL
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


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """The images that a model takes, and its classes.

    Attributes:
        image_shape: `(height, width, channels)`.
        class_names: Tuple, a name for each output.
        center_crop: Float, see `images.decode`.
        threshold: Float, see `measure.predicted_classes`.
    """

    image_shape: tuple
    class_names: tuple
    center_crop: float
    threshold: float = 0.5


def inputs_of(data):
    """Returns the `inputs` of a record, a dict of JSON values about the model's images and classes.

    Args:
        data: `images.ImageData`.
    """
    return {
        "image_shape": list(data.image_shape),
        "class_names": list(data.class_names),
        "centre": data.centre,
        "deviation": data.deviation,
        "center_crop": data.center_crop,
        "preparation": _PREPARATION.format(
            resized=_CROPPED.format(data.center_crop) if data.center_crop else _SQUEEZED
        ),
    }


def image_input(path):
    """Reads the `ImageInput` of a `.keras` file.

    Raises:
        UserError: If the file cannot be read, or has no such record.
    """
    inputs = recorded_inputs(path)
    if "image_shape" not in inputs:
        raise UserError(
            f"The file --model={path} does not say which images it takes and what its classes are: "
            "tfdpx.train.classify did not write it, or Keras has saved it again."
        )
    return ImageInput(
        tuple(inputs["image_shape"]),
        tuple(inputs["class_names"]),
        inputs.get("center_crop", 0.0),
        inputs["threshold"],
    )
