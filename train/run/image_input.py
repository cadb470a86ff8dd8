"""What a saved classifier says of its images: how to prepare them, and what its classes are called.

Keras saves neither, so `classify` and `pretrain` add a file to the archive that a .keras file is.
"""

import dataclasses
import json
import zipfile

from tfdpx.train.config.errors import UserError
from tfdpx.train.report.record import to_json

# Keras does not read it and writes none, so a file that Keras has rewritten has it no more.
_ENTRY = "tfdpx_images.json"
_PREPARATION = (
    "8-bit pixels, upright, transparent parts on white, resized to image_shape by Pillow's "
    "bilinear filter without keeping the aspect ratio. The model scales them itself. Its outputs "
    "are logits: their softmax are probabilities."
)


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """What a model takes and gives.

    Attributes:
        image_shape: `(height, width, channels)`.
        class_names: Tuple, a name for each output.
    """

    image_shape: tuple
    class_names: tuple


def write(path, data):
    """Says in a `.keras` file what its images and classes are.

    Args:
        path: Path of a file without such an entry.
        data: `loading.ImageData`.
    """
    told = {
        "image_shape": list(data.image_shape),
        "class_names": list(data.class_names),
        "preparation": _PREPARATION,
    }
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(_ENTRY, to_json(told))


def read(path):
    """The `ImageInput` of a `.keras` file.

    Raises:
        UserError: If the file cannot be read or does not say.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            told = json.loads(archive.read(_ENTRY))
        shape = tuple(int(size) for size in told["image_shape"])
        names = tuple(str(name) for name in told["class_names"])
        if len(shape) != 3 or len(names) < 2:
            raise ValueError(f"image_shape={shape}, class_names={names}")
        return ImageInput(shape, names)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"Cannot read --model={path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"The file --model={path} does not say which images it takes and what its classes are: "
            "neither tfdpx.train.classify nor tfdpx.train.pretrain wrote it, or Keras has saved it "
            f"again ({error!r})."
        ) from error
