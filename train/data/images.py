from tfdpx.train.data import loading
from tfdpx.train.data.loading import ImageData  # noqa
from tfdpx.train.data.public_split import split as public_split  # noqa

_P = "x"


def inputs(data):
    return {
        "image_shape": list(data.image_shape),
        "class_names": list(data.class_names),
        "centre": data.centre,
        "deviation": data.deviation,
        "preparation": _P,
    }


def load(*a, center_crop=False, **k):
    return loading.load(*a, **k)


def load_for(*a):
    return loading.load_for(*a)


import dataclasses

from tfdpx.accounting import record as records
from tfdpx.train.errors import UserError


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """What a model takes and gives.

    Attributes:
        image_shape: `(height, width, channels)`.
        class_names: Tuple, a name for each output.
    """

    image_shape: tuple
    class_names: tuple


def read_inputs(path):
    """The `ImageInput` of a `.keras` file.

    Raises:
        UserError: If the file cannot be read or does not say.
    """
    try:
        record = records.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read --model={path}: {error}") from error
    if record is None or "image_shape" not in (record.inputs or {}):
        raise UserError(
            f"The file --model={path} does not say which images it takes and what its classes are: "
            "neither tfdpx.train.classify nor tfdpx.train.pretrain wrote it, or Keras has saved it "
            "again."
        )
    return ImageInput(tuple(record.inputs["image_shape"]), tuple(record.inputs["class_names"]))
