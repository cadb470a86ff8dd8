"""Reads any image classification data set of TensorFlow Datasets as numpy arrays."""

import dataclasses

import numpy as np
import tensorflow_datasets as tfds
from sklearn import model_selection

from tfdpx.train import digits_builder  # Registers `sklearn_digits` with TensorFlow Datasets.
from tfdpx.train.errors import UserError

DIGITS = digits_builder.SklearnDigits.name
ALIASES = {"digits": DIGITS}
KNOWN = ("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn_cropped")

# Grey level that becomes 0, per data set; the first layer of the model maps x to x / centre - 1.
# These are properties of the file format. A mean or a deviation computed from the training images,
# such as the constants in common use for CIFAR-10, would be a release that no budget pays for.
CENTRES = {DIGITS: 8.0 * digits_builder.PIXEL_SCALE}
DEFAULT_CENTRE = 127.5


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images and labels in memory, and what a model needs to know of them.

    Attributes:
        name: Name of the data set in TensorFlow Datasets.
        train_x: uint8 images `[num_train, height, width, channels]`, the private data.
        train_y: int64 labels `[num_train]` in `[0, num_classes)`.
        eval_x: uint8 images on which accuracy is measured.
        eval_y: Their labels.
        eval_split: `"test"`, or `"validation"` when a part of the training images is held out.
        class_names: One name a class.
        centre: Grey level that the model maps to 0; see `CENTRES`.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    eval_x: np.ndarray
    eval_y: np.ndarray
    eval_split: str
    class_names: tuple
    centre: float

    @property
    def num_classes(self):
        """Number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self):
        """`(height, width, channels)`."""
        return self.train_x.shape[1:]


def load(name, data_dir=None, validation=0.0, download=False):
    """Reads the training images of a data set and those to measure accuracy on.

    Args:
        name: `"digits"` or any image classification data set of TensorFlow Datasets.
        data_dir: Folder with prepared data sets; `None` is the default of TensorFlow Datasets. The
            digits are written there on first use.
        validation: Fraction of the training images to hold out, class by class, instead of reading
            the test images. It is always the same part, so that runs can be compared.
        download: Whether to fetch and prepare a data set that is not in `data_dir`.

    Returns:
        An `ImageData`.

    Raises:
        UserError: If there is no such data set, it is not prepared or cannot be, or it does not
            consist of uint8 images of one shape, each with one label.
    """
    name = ALIASES.get(name, name)
    builder = _find(name, data_dir)
    num_classes, class_names = _classes(builder, name)
    if not builder.is_prepared():
        _prepare(builder, name, data_dir, download or name == DIGITS)
    train_x, train_y = _read(builder, name, "train", num_classes)
    if validation:
        train_x, eval_x, train_y, eval_y = _hold_out(train_x, train_y, validation)
    else:
        test = "test" if "test" in builder.info.splits else "validation"
        eval_x, eval_y = _read(builder, name, test, num_classes)
    return ImageData(
        name=name,
        train_x=train_x,
        train_y=train_y,
        eval_x=eval_x,
        eval_y=eval_y,
        eval_split="validation" if validation else "test",
        class_names=class_names,
        centre=CENTRES.get(name, DEFAULT_CENTRE),
    )


def _find(name, data_dir):
    try:
        return tfds.builder(name, data_dir=data_dir)
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


def _prepare(builder, name, data_dir, allowed):
    root = builder.data_dir
    if not allowed:
        raise UserError(
            f"The data set {name!r} is not prepared: {root} does not hold it. Add --download to "
            "fetch it, or name the folder that has it with --data_dir, or run "
            f"`tfds build {name}` on a machine with a network and copy the result. "
            f"Received: --data_dir={data_dir}."
        )
    try:
        builder.download_and_prepare()
    # Whatever a builder raises here (no network, no space, files to be fetched by hand) means to
    # the user that the data set could not be prepared, and why.
    except Exception as error:
        raise UserError(
            f"The data set {name!r} could not be prepared under {root}: "
            f"{type(error).__name__}: {error}. Received: --data_dir={data_dir}."
        ) from error


def _classes(builder, name):
    """Returns the number and the names of the classes of an (image, label) data set."""
    keys = builder.info.supervised_keys
    if not keys or len(keys) != 2 or not all(isinstance(key, str) for key in keys):
        raise UserError(
            f"The data set {name!r} has no (image, label) pairs: its supervised_keys are {keys}. "
            "Use an image classification data set."
        )
    image, label = (builder.info.features[key] for key in keys)
    if not isinstance(label, tfds.features.ClassLabel) or not label.num_classes:
        raise UserError(
            f"The labels {keys[1]!r} of the data set {name!r} are not class labels: {label}. "
            "Use an image classification data set."
        )
    if len(image.shape) != 3 or None in image.shape or image.np_dtype != np.uint8:
        raise UserError(
            f"The images of the data set {name!r} must be uint8, all of one shape (height, width, "
            f"channels). Received: shape={image.shape}, dtype={np.dtype(image.np_dtype)}."
        )
    return label.num_classes, tuple(label.names)


def _read(builder, name, split, num_classes):
    if split not in builder.info.splits:
        raise UserError(
            f"The data set {name!r} has no {split!r} split. Received: splits="
            f"{sorted(builder.info.splits)}. Training needs 'train', measuring needs 'test' or "
            "'validation' (or hold out a part of 'train' with --validation)."
        )
    images, labels = tfds.as_numpy(builder.as_dataset(split, batch_size=-1, as_supervised=True))
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UserError(
            f"The labels of the {split!r} split of {name!r} must lie in [0, {num_classes}). "
            f"Received: labels from {labels.min()} to {labels.max()}."
        )
    return images, labels


def _hold_out(images, labels, fraction):
    try:
        return model_selection.train_test_split(
            images, labels, test_size=fraction, stratify=labels, random_state=0
        )
    except ValueError as error:  # Too few images for one of each class on both sides.
        raise UserError(
            f"Cannot hold out --validation={fraction} of {len(labels)} training images: {error}"
        ) from error
