"""Data sets by name: an entry for each that is known without reading it, and what --dataset says.

A new data set of TensorFlow Datasets is an entry of `ENTRIES`. Without one it can be trained on
too: its photographs are then mapped to [-1, 1], and --dry_run does not know its size.
"""

import dataclasses
import pathlib
import re

from tfdpx.train.data import digits  # Registers `sklearn_digits` with TensorFlow Datasets.
from tfdpx.train.errors import UserError

FOLDER = "folder"
TABLES = ("csv", "parquet")

# What --dataset says, for instance "digits:0-4".
_CLASSES_OF = re.compile(r"(.+):(\d+)-(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSet:
    """What is known of a data set without reading it.

    `centre` and `deviation` are the grey levels that become 0 and that become a unit: floats, or a
    tuple of one a channel. None is computed from the private images: that would be a release that
    no budget pays for. Unless an entry says otherwise, both are 127.5: bytes become [-1, 1].

    Attributes:
        name: What --dataset calls it.
        source: Its name in TensorFlow Datasets.
        train_images: Training images; None if that is not known.
        image_shape: `(height, width, channels)`; None where it varies.
        num_classes: Classes.
        test_split: Name of the split to measure on; None: "test" if there is one, else
            "validation".
        made_here: Whether it can be prepared without a network.
    """

    name: str
    source: str
    train_images: int | None = None
    image_shape: tuple = (None, None, 3)
    num_classes: int | None = None
    test_split: str | None = None
    centre: float | tuple = 127.5
    deviation: float | tuple = 127.5
    made_here: bool = False


# Constants that are published for ImageNet serve all photographs. (Of ImageNet itself they are
# averages over more than a million images, rounded to three digits.)
_IMAGENET = dict(
    centre=tuple(255 * mean for mean in (0.485, 0.456, 0.406)),
    deviation=tuple(255 * deviation for deviation in (0.229, 0.224, 0.225)),
)
# A property of the digits' file format: half of its largest value.
_DIGITS_CENTRE = 8.0 * digits.PIXEL_SCALE

ENTRIES = (
    DataSet(
        name="digits", source=digits.SklearnDigits.name, made_here=True,
        train_images=1_437, image_shape=(8, 8, 1), num_classes=10,
        centre=_DIGITS_CENTRE, deviation=_DIGITS_CENTRE,
    ),
    DataSet(
        name="mnist", source="mnist",
        train_images=60_000, image_shape=(28, 28, 1), num_classes=10,
    ),
    DataSet(
        name="fashion_mnist", source="fashion_mnist",
        train_images=60_000, image_shape=(28, 28, 1), num_classes=10,
    ),
    DataSet(
        name="cifar10", source="cifar10",
        train_images=50_000, image_shape=(32, 32, 3), num_classes=10, **_IMAGENET,
    ),
    DataSet(
        name="cifar100", source="cifar100",
        train_images=50_000, image_shape=(32, 32, 3), num_classes=100, **_IMAGENET,
    ),
    DataSet(
        name="svhn_cropped", source="svhn_cropped",
        train_images=73_257, image_shape=(32, 32, 3), num_classes=10,
    ),
    DataSet(
        name="imagenet32", source="imagenet_resized/32x32",
        train_images=1_281_167, image_shape=(32, 32, 3), num_classes=1000,
    ),
    # The test images of these two have no labels.
    DataSet(
        name="imagenet2012", source="imagenet2012", test_split="validation",
        train_images=1_281_167, num_classes=1000, **_IMAGENET,
    ),
    DataSet(
        name="places365_small", source="places365_small", test_split="validation",
        train_images=1_803_460, image_shape=(256, 256, 3), num_classes=365, **_IMAGENET,
    ),
)  # fmt: skip

KNOWN = (*(entry.name for entry in ENTRIES), f"{FOLDER}:PATH")


def find(name):
    """Returns the entry of that name or source, None if there is none."""
    return next((entry for entry in ENTRIES if name in (entry.name, entry.source)), None)


@dataclasses.dataclass(frozen=True)
class Name:
    """What `--dataset` says.

    Attributes:
        text: As it was given.
        entry: `DataSet`, with nothing but a name if it is not one of `ENTRIES`.
        path: Of the folder of images, or of the table, or None.
        classes: The classes to keep, a range; None for all.
    """

    text: str
    entry: DataSet
    path: pathlib.Path | None = None
    classes: range | None = None

    @classmethod
    def parse(cls, text):
        """Reads `NAME`, `folder:PATH` and tables, and `NAME:FIRST-LAST` for some classes."""
        kind, _, path = text.partition(":")
        if kind in (FOLDER, *TABLES):
            if not path:
                what = "folder of images" if kind == FOLDER else "table"
                raise UserError(
                    f"Name the {what}: --dataset={kind}:PATH. Received: --dataset={text}."
                )
            entry = DataSet(name=kind, source=kind)
            return cls(text, entry, path=pathlib.Path(path).expanduser())
        part = _CLASSES_OF.fullmatch(text)
        name = part[1] if part else text
        classes = range(int(part[2]), int(part[3]) + 1) if part else None
        return cls(text, find(name) or DataSet(name=name, source=name), classes=classes)

    @property
    def full(self):
        """The name in full, such as `"sklearn_digits:0-4"`."""
        if self.classes is None:
            return self.text if self.path else self.entry.source
        return f"{self.entry.source}:{self.classes.start}-{self.classes.stop - 1}"
