"""Records the images that a saved classifier takes, and the names of its classes.

They are in the record in a `.keras` file of `classify`, because Keras saves neither.
"""

import dataclasses

from tfdpx.train.errors import UserError
from tfdpx.train.model_files import recorded_inputs

_PREPARATION = (
    "8-bit pixels, upright, transparent parts on white, {resized} by Pillow's bilinear filter. The "
    "model scales them itself. Its outputs are logits: their softmax are probabilities."
)
_CROPPED = "cropped around their centre to {0:.4g} of the shorter side and resized to image_shape"
_SQUEEZED = "resized to image_shape without keeping the aspect ratio"


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


def of(data):
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


def read(path):
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
