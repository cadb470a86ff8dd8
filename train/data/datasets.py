"""Data sets by name: where they are, what they must be, and what is known without reading them."""

import dataclasses
import pathlib
import re

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdpx.train.config.errors import UserError
from tfdpx.train.data import digits  # Registers `sklearn_digits` with TensorFlow Datasets.

DIGITS = digits.SklearnDigits.name
FOLDER = "folder"
ALIASES = {"digits": DIGITS, "imagenet32": "imagenet_resized/32x32"}
KNOWN = (
    "digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn_cropped", "imagenet32",
    "imagenet2012", "places365_small", f"{FOLDER}:PATH",
)  # fmt: skip

# Where accuracy is measured, if not on "test": the test images of these have no labels.
TEST_SPLITS = {"imagenet2012": "validation", "places365_small": "validation"}

# Grey levels per channel that become 0, and those that become a unit; otherwise both are
# DEFAULT_CENTRE, which maps bytes to [-1, 1]. None is computed from the private images: that would
# be a release that no budget pays for. The digits' is a property of the file format, and all
# photographs are standardized by the constants that are published for ImageNet. (Of ImageNet
# itself they are averages over more than a million images, rounded to three digits.)
DEFAULT_CENTRE = 127.5
_DIGITS_CENTRE = 8.0 * digits.PIXEL_SCALE
_IMAGENET = (
    tuple(255 * mean for mean in (0.485, 0.456, 0.406)),
    tuple(255 * deviation for deviation in (0.229, 0.224, 0.225)),
)
_STANDARDIZED = {
    DIGITS: (_DIGITS_CENTRE, _DIGITS_CENTRE),
    "cifar10": _IMAGENET,
    "cifar100": _IMAGENET,
    "imagenet2012": _IMAGENET,
    "places365_small": _IMAGENET,
}

_CLASSES_OF = re.compile(r"(.+):(\d+)-(\d+)")


@dataclasses.dataclass(frozen=True)
class Name:
    """What `--dataset` says.

    Attributes:
        text: As it was given.
        builder: Name in TensorFlow Datasets, or `FOLDER`.
        path: Of the folder of images, or None.
        classes: The classes to keep, a range; None for all.
    """

    text: str
    builder: str
    path: pathlib.Path | None = None
    classes: range | None = None

    @classmethod
    def parse(cls, text):
        """Reads `NAME`, `folder:PATH`, and `NAME:FIRST-LAST` for a part of the classes."""
        if text == FOLDER or text.startswith(f"{FOLDER}:"):
            path = text[len(FOLDER) + 1 :]
            if not path:
                raise UserError(
                    f"Name the folder of images: --dataset={FOLDER}:PATH. "
                    f"Received: --dataset={text}."
                )
            return cls(text, FOLDER, path=pathlib.Path(path).expanduser())
        part = _CLASSES_OF.fullmatch(text)
        name = part[1] if part else text
        classes = range(int(part[2]), int(part[3]) + 1) if part else None
        return cls(text, ALIASES.get(name, name), classes=classes)

    @property
    def full(self):
        """The name in full, such as `"sklearn_digits:0-4"`."""
        if self.classes is None:
            return self.text if self.path else self.builder
        return f"{self.builder}:{self.classes.start}-{self.classes.stop - 1}"

    @property
    def standardization(self):
        """Grey levels that become 0, and levels a unit: floats, or a tuple of one a channel."""
        return _STANDARDIZED.get(self.builder, (DEFAULT_CENTRE, DEFAULT_CENTRE))

    @property
    def test_split(self):
        """Name of the split to measure on; None for "test" if there is one, else "validation"."""
        return TEST_SPLITS.get(self.builder)


@dataclasses.dataclass(frozen=True)
class Features:
    """What the examples of a data set are.

    Attributes:
        keys: Names of the image and the label in an example.
        shape: `(height, width, channels)` of an image; None where it varies.
        class_names: Tuple, a name for each class.
    """

    keys: tuple
    shape: tuple
    class_names: tuple


def open_builder(name, data_dir, download):
    """The builder of a data set that is prepared, perhaps by this call.

    Args:
        name: `Name`.
        data_dir: Folder with prepared data sets, or None.
        download: Whether to fetch and prepare what is not there.

    Raises:
        UserError: If there is no such data set, or it is not prepared and cannot be.
    """
    if name.builder == FOLDER:
        return _open_folder(name.path)
    builder = _find(name.builder, data_dir)
    features(builder, name.builder)  # Before it is fetched in vain.
    if builder.is_prepared():
        return builder
    if name.builder == DIGITS:
        return _prepare(builder, name.builder, data_dir)
    if not download:
        raise UserError(
            f"The data set {name.builder!r} is not prepared: {builder.data_dir} does not hold it. "
            "Add --download to fetch it, or name the folder that has it with --data_dir, or run "
            f"`tfds build {name.builder} --file_format=array_record` on a machine with a network "
            f"and copy the result. Received: --data_dir={data_dir}."
        )
    # The format that can be read in any order, which large data sets need.
    return _prepare(
        _find(name.builder, data_dir, file_format="array_record"), name.builder, data_dir
    )


def features(builder, name):
    """The `Features` of a builder of (image, label) pairs.

    Raises:
        UserError: If it is not one, or the images are not uint8.
    """
    keys = builder.info.supervised_keys
    # Those of places365_small end with the name of the file.
    if not keys or len(keys) < 2 or not all(isinstance(key, str) for key in keys):
        raise UserError(
            f"The data set {name!r} has no (image, label) pairs: its supervised_keys are {keys}. "
            "Use an image classification data set (ImageNet at 32 pixels with labels: imagenet32)."
        )
    keys = tuple(keys[:2])
    image, label = (builder.info.features[key] for key in keys)
    if not isinstance(label, tfds.features.ClassLabel) or not label.num_classes:
        raise UserError(
            f"The labels {keys[1]!r} of the data set {name!r} are not class labels: {label}. "
            "Use an image classification data set."
        )
    dtype = np.dtype(image.np_dtype)
    if len(image.shape) != 3 or dtype != np.uint8 or image.shape[2] not in (1, 3):
        raise UserError(
            f"The images of the data set {name!r} must be uint8 of shape (height, width, 1 or 3). "
            f"Received: shape={image.shape}, dtype={dtype}."
        )
    return Features(keys, tuple(image.shape), tuple(label.names))


def _find(name, data_dir, **kwargs):
    try:
        return tfds.builder(name, data_dir=data_dir, **kwargs)
    # ValueError: not the name of a data set; AssertionError: no such version of it.
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"There is no data set {name!r}. Use one of {', '.join(KNOWN)}, or the name of any "
            "other image classification data set of TensorFlow Datasets, with --data_dir naming "
            f"the folder that holds it. Received: --data_dir={data_dir}."
        ) from error
    except OSError as error:
        raise UserError(
            f"Cannot read the data set {name!r}: {error}. Received: --data_dir={data_dir}."
        ) from error


def _open_folder(path):
    try:
        builder = tfds.ImageFolder(str(path))
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise UserError(f"Cannot read --dataset={FOLDER}:{path}: {error}") from error
    if not builder.info.splits:
        raise UserError(
            f"The folder of --dataset={FOLDER}:{path} must hold images as train/CLASS/NAME.jpg and "
            "test/CLASS/NAME.jpg (or .png). None was found."
        )
    return builder


def _prepare(builder, name, data_dir):
    try:
        builder.download_and_prepare()
    # Whatever a builder raises here (no network, no space, files to be fetched by hand) means to
    # the user that the data set could not be prepared, and why.
    except Exception as error:
        raise UserError(
            f"The data set {name!r} could not be prepared under {builder.data_dir}: "
            f"{type(error).__name__}: {error}. Received: --data_dir={data_dir}."
        ) from error
    return builder
