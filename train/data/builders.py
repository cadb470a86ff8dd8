"""Opens data sets with TensorFlow Datasets: prepared ones, or by preparing them."""

import dataclasses
import pathlib

import numpy as np
import tensorflow_datasets as tfds

from tfdpx.train.data.datasets import FOLDER, KNOWN
from tfdpx.train.errors import UserError, did_you_mean


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
    source = name.entry.source
    builder = _find(source, data_dir)
    features(builder, source)  # Before it is fetched in vain.
    if builder.is_prepared():
        return builder
    if name.entry.made_here:
        return _prepare(source, data_dir)
    if not download:
        raise UserError(
            f"The data set {source!r} is not prepared: {builder.data_dir} does not hold it. "
            "Add --download to fetch it, or name the folder that has it with --data_dir, or run "
            f"`tfds build {source} --file_format=array_record` on a machine with a network "
            f"and copy the result. Received: --data_dir={data_dir}."
        )
    # The format that can be read in any order, which large data sets need.
    return _prepare(source, data_dir, file_format="array_record")


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
        if name and pathlib.Path(name).expanduser().is_dir():
            raise UserError(
                f"There is no data set {name!r}, but a folder. Of its images the name is "
                f"--dataset={FOLDER}:{name}."
            ) from error
        raise UserError(
            f"There is no data set {name!r}.{did_you_mean(name, KNOWN)} Use one of "
            f"{', '.join(KNOWN)}, or the name of any "
            "other image classification data set of TensorFlow Datasets, with --data_dir naming "
            f"the folder that holds it. Received: --data_dir={data_dir}."
        ) from error
    except OSError as error:
        raise UserError(
            f"Cannot read the data set {name!r}: {error}. Received: --data_dir={data_dir}."
        ) from error


def _prepare(source, data_dir, **kwargs):
    builder, failure = _find(source, data_dir, **kwargs), None
    try:
        builder.download_and_prepare()
    # Whatever a builder raises here (no network, no space, files to be fetched by hand) means to
    # the user that the data set could not be prepared, and why.
    except Exception as error:
        failure = error
    # Another process may have prepared it meanwhile, which fails here or leaves `builder` unaware.
    prepared = _find(source, data_dir)
    if not prepared.is_prepared():
        raise UserError(
            f"The data set {source!r} could not be prepared under {builder.data_dir}: "
            f"{type(failure).__name__}: {failure}. Received: --data_dir={data_dir}."
        ) from failure
    return prepared
