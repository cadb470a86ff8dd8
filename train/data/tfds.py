"""Reads data sets by name: all of TensorFlow Datasets, and the digits of scikit-learn.

To add a data set of TensorFlow Datasets, add an entry to `ENTRIES`. Data sets without an entry
work, too, but their images are mapped to [-1, 1], and --dry_run does not know their size.
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable

import numpy as np
import tensorflow_datasets as tfds
from sklearn import datasets, model_selection

from tfdpx.train.errors import UserError, did_you_mean

FOLDER = "folder"
TABLES = ("csv", "parquet")
# The pixels of the digits have values 0 to 16. This factor maps them to 0 to 240.
PIXEL_SCALE = 15
TEST_EXAMPLES = 360
# The largest number of bytes to hold in memory. The bytes are those of decoded images or, for a
# data set without random access, of encoded images.
IN_MEMORY_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class DataSet:
    """The public facts about a data set, which are known before the data are read.

    `centre` and `deviation` are constants. They are not computed from the images: statistics of
    private images would have a privacy loss that the budget does not include.

    Attributes:
        name: The name of the data set in `--dataset`.
        source: The name of the data set in TensorFlow Datasets.
        train_images: Number of training images; None if unknown.
        image_shape: `(height, width, channels)`; None if it varies.
        num_classes: Number of classes; None if unknown.
        centre: Grey level that models map to 0: a float, or a tuple with one for each channel.
        deviation: Divisor of grey levels after `centre` is subtracted: a float, or a tuple with one
            for each channel. By default both are 127.5, which maps bytes to [-1, 1].
        test_split: Name of the split for evaluation. None means "test" if the data set has this
            split, else "validation".
    """

    name: str
    source: str
    train_images: int | None = None
    image_shape: tuple = (None, None, 3)
    num_classes: int | None = None
    centre: float | tuple = 127.5
    deviation: float | tuple = 127.5
    test_split: str | None = None


# The published constants of ImageNet, which are used for all photographs. (For ImageNet itself,
# they are averages over more than a million images, rounded to three digits.)
_IMAGENET = (
    tuple(255 * mean for mean in (0.485, 0.456, 0.406)),
    tuple(255 * deviation for deviation in (0.229, 0.224, 0.225)),
)
# Half of the largest grey level that the digits' format allows.
_DIGITS_LEVELS = (8.0 * PIXEL_SCALE, 8.0 * PIXEL_SCALE)
_IMAGENET32 = "imagenet_resized/32x32"

DIGITS = "sklearn_digits"

ENTRIES = (
    DataSet("digits", DIGITS, 1_437, (8, 8, 1), 10, *_DIGITS_LEVELS),
    DataSet("mnist", "mnist", 60_000, (28, 28, 1), 10),
    DataSet("fashion_mnist", "fashion_mnist", 60_000, (28, 28, 1), 10),
    DataSet("cifar10", "cifar10", 50_000, (32, 32, 3), 10, *_IMAGENET),
    DataSet("cifar100", "cifar100", 50_000, (32, 32, 3), 100, *_IMAGENET),
    DataSet("svhn_cropped", "svhn_cropped", 73_257, (32, 32, 3), 10),
    DataSet("imagenet32", _IMAGENET32, 1_281_167, (32, 32, 3), 1000),
    # The test images of the next two data sets have no labels.
    DataSet(
        *("imagenet2012", "imagenet2012", 1_281_167, (None, None, 3), 1000, *_IMAGENET),
        test_split="validation",
    ),
    DataSet(
        *("places365_small", "places365_small", 1_803_460, (256, 256, 3), 365, *_IMAGENET),
        test_split="validation",
    ),
)
KNOWN = (*(entry.name for entry in ENTRIES), f"{FOLDER}:PATH")


def find(name):
    """Returns the entry of `ENTRIES` with this name or source; None if there is none."""
    return next((entry for entry in ENTRIES if name in (entry.name, entry.source)), None)


@dataclasses.dataclass(frozen=True)
class Name:
    """The parts of a value of `--dataset`.

    Attributes:
        text: The whole value.
        entry: The `DataSet` in `ENTRIES`, or a `DataSet` with only a name if there is none.
        path: `pathlib.Path` of the folder of images or of the table, or None.
        classes: The classes to keep, a range; None for all.
    """

    text: str
    entry: DataSet
    path: pathlib.Path | None = None
    classes: range | None = None

    @classmethod
    def parse(cls, text):
        """Parses a value of `--dataset`: `NAME`, `NAME:FIRST-LAST`, `folder:PATH`, or a table."""
        kind, _, path = text.partition(":")
        if kind in (FOLDER, *TABLES):
            if not path:
                source = "folder of images" if kind == FOLDER else "table"
                raise UserError(
                    f"Name the {source}: --dataset={kind}:PATH. Received: --dataset={text}."
                )
            return cls(text, DataSet(kind, kind), path=pathlib.Path(path).expanduser())
        part = re.fullmatch(r"(.+):(\d+)-(\d+)", text)
        name = part[1] if part else text
        classes = range(int(part[2]), int(part[3]) + 1) if part else None
        return cls(text, find(name) or DataSet(name, name), classes=classes)

    @property
    def full(self):
        """The full name, for example `"sklearn_digits:0-4"`."""
        if self.classes is None:
            return self.text if self.path else self.entry.source
        return f"{self.entry.source}:{self.classes.start}-{self.classes.stop - 1}"


def is_known(name):
    """Returns whether the name of a data set is in `ENTRIES`."""
    return Name.parse(name).entry in ENTRIES


@dataclasses.dataclass(frozen=True)
class Records:
    """Reads the examples of a split from storage.

    Attributes:
        count: Int, the number of examples.
        read: Function from a list of row numbers to a list of pairs: an image and its label. An
            image is the bytes of a file, or a uint8 array `[height, width, channels]`.
        stored_labels: Integers `[count]`; None if labels are unknown before the images are read.
        names: List with a name for each example; None if examples have only row numbers.
        people: Array with the person of each example; None without people.
    """

    count: int
    read: Callable
    stored_labels: np.ndarray | None = None
    names: list | None = None
    people: np.ndarray | None = None

    def labels(self):
        """Returns the labels, int64 `[count]`. If they are unknown, reads all images in parts."""
        if self.stored_labels is not None:
            return self.stored_labels
        parts = (range(self.count)[at : at + 1024] for at in range(0, self.count, 1024))
        return np.array([label for part in parts for _, label in self.read(list(part))])


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set of images with labels, from any source.

    Attributes:
        shape: `(height, width, channels)` of an image; None if it varies.
        class_names: Tuple with a name for each class.
        records: Function from "train", "validation" or "test" to the `Records` of this split, which
            may be empty.
        notes: Tuple of sentences to print about the images, for example how their size was chosen.
        left_out: Number of images that were left out because they could not be read.
    """

    shape: tuple
    class_names: tuple
    records: Callable
    notes: tuple = ()
    left_out: int = 0


def read_digits():
    """Returns the `Source` of the 1,797 handwritten digits of scikit-learn.

    Images are `[8, 8, 1]` uint8 and hold the pixel values of `sklearn.datasets.load_digits` times
    15. The splits `"train"` (1,437 examples) and `"test"` (360) are from
    `train_test_split(test_size=360, stratify=y, random_state=0)`.
    """
    digits = datasets.load_digits()
    images = (digits.images * PIXEL_SCALE).astype(np.uint8)[..., np.newaxis]
    examples = list(zip(images, digits.target, strict=True))
    train, test = model_selection.train_test_split(
        examples, test_size=TEST_EXAMPLES, stratify=digits.target, random_state=0
    )
    splits = {"train": train, "test": test}
    return Source((8, 8, 1), tuple("0123456789"), lambda split: _in_memory(splits.get(split, [])))


def read(name, data_dir=None, download=False):
    """Opens a data set of TensorFlow Datasets. With `download`, first prepares it if necessary.

    Args:
        name: `Name`.
        data_dir: Folder with prepared data sets, or None.
        download: Whether to fetch and prepare a data set that is not in `data_dir`.

    Returns:
        `Source`.

    Raises:
        UserError: If the data set does not exist, is not prepared, or is not for image
            classification.
    """
    source = name.entry.source
    builder = _find(source, data_dir)
    described = described_by(builder, source)  # Checks the data set before it is fetched.
    if not builder.is_prepared():
        if not download:
            raise UserError(
                f"The data set {source!r} is not prepared: {builder.data_dir} does not hold it. "
                "Add --download to fetch it, or name the folder that has it with --data_dir, or "
                f"run `tfds build {source} --file_format=array_record` on a machine with a "
                f"network and copy the result. Received: --data_dir={data_dir}."
            )
        try:  # This format has random access, which large data sets need.
            _find(source, data_dir, file_format="array_record").download_and_prepare()
        # Any exception of a builder becomes a UserError. For example, the network is down, the
        # disk is full, or the user must fetch files by hand.
        except Exception as error:
            # Another process may have prepared the data set in the meantime.
            if not _find(source, data_dir).is_prepared():
                raise UserError(
                    f"The data set {source!r} could not be prepared under {builder.data_dir}: "
                    f"{type(error).__name__}: {error}. Received: --data_dir={data_dir}."
                ) from error
        builder = _find(source, data_dir)
    tests = name.entry.test_split or ("test" if "test" in builder.info.splits else "validation")
    return dataclasses.replace(
        described,
        records=lambda split: _records(builder, tests if split == "test" else split),
    )


def described_by(builder, name):
    """Returns the `Source` that a builder of TensorFlow Datasets describes, with no records yet.

    Raises:
        UserError: If the examples are not pairs of a uint8 image and a label.
    """
    keys, info = builder.info.supervised_keys, builder.info.features
    # places365_small has a third key after image and label: the name of the file.
    if keys and len(keys) >= 2 and all(isinstance(key, str) for key in keys):
        image, label = (info[key] for key in keys[:2])
        is_image = np.dtype(image.np_dtype) == np.uint8 and len(image.shape) == 3
        is_label = isinstance(label, tfds.features.ClassLabel) and label.num_classes
        if is_image and image.shape[2] in (1, 3) and is_label:
            return Source(tuple(image.shape), tuple(label.names), None)
    raise UserError(
        f"The data set {name!r} is no image classification data set: it must have pairs of a uint8 "
        "image of shape (height, width, 1 or 3) and a class label. Received: "
        f"supervised_keys={keys} of {' '.join(repr(info).split())}. Use another (ImageNet at 32 "
        "pixels with labels: imagenet32)."
    )


def _records(builder, split):
    """Returns the `Records` of a split. Refuses a large split without random access."""
    info, (image, label) = builder.info, builder.info.supervised_keys[:2]
    if split not in info.splits:
        return _in_memory([])
    decoders = None
    if isinstance(info.features[image], tfds.features.Image):
        decoders = {image: tfds.decode.SkipDecoding()}
    if info.available_file_formats() & tfds.core.FileFormat.with_random_access():
        source = builder.as_data_source(split, decoders=decoders)
        return Records(
            len(source),
            lambda rows: [(one[image], one[label]) for one in source.__getitems__(rows)],
        )
    size = info.splits[split].num_bytes
    if size > IN_MEMORY_BYTES:
        raise UserError(
            f"The data set {builder.name!r} is too large to be held in memory ({size} bytes), and "
            f"its format {info.file_format.value} cannot be read in any order. Prepare it "
            f"by `tfds build {builder.name} --file_format=array_record`, or convert it by `tfds "
            "convert_format`."
        )
    examples = tfds.as_numpy(builder.as_dataset(split, decoders=decoders))
    return _in_memory([(one[image], one[label]) for one in examples])


def _in_memory(pairs):
    return Records(len(pairs), lambda rows: [pairs[row] for row in rows])


def _find(name, data_dir, **kwargs):
    try:
        return tfds.builder(name, data_dir=data_dir, **kwargs)
    # The name or the version is unknown, or files cannot be read.
    except (ValueError, AssertionError, OSError) as error:
        if (path := pathlib.Path(name).expanduser()).exists():
            table = "parquet" if path.suffix == ".parquet" else "csv"
            raise UserError(
                f"Flag --dataset needs the kind of data before a path: write --dataset="
                f"{FOLDER if path.is_dir() else table}:{name}. Received: --dataset={name}."
            ) from error
        raise UserError(
            f"There is no data set {name!r} to be read.{did_you_mean(name, KNOWN)} Use one of "
            f"{', '.join(KNOWN)} (for a folder of images), or the name of any other image "
            "classification data set of TensorFlow Datasets, with --data_dir naming the folder "
            f"that holds it. Received: --data_dir={data_dir}."
        ) from error
