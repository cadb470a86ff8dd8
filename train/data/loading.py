"""Reads the images to train on and those to measure on: from memory, or large sets from disk."""

import dataclasses
import functools
import math

import numpy as np
import tensorflow as tf
from sklearn import model_selection

import tfdpx
from tfdpx.train.data import image_sources
from tfdpx.train.data.builders import features, open_builder
from tfdpx.train.data.datasets import FOLDER, TABLES, Name
from tfdpx.train.data.image_folder import ImageFolder
from tfdpx.train.errors import UserError


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images with labels, and what a model needs to know of them.

    Examples are a pair of arrays, uint8 images `[count, height, width, channels]` and int64 labels
    `[count]` in `[0, num_classes)`. Where they would fill more than
    `image_sources.IN_MEMORY_BYTES`, the first of the pair is a `tfdpx.RandomAccess` that reads both
    from disk, and the second is None: `plan.batches(data.train_x, data.train_y)` takes either.

    Attributes:
        name: Name of the data set.
        train_x, train_y: The private data. Larger than `image_shape` with a `train_scale`.
        eval_x, eval_y: Examples on which accuracy is measured.
        num_train: Number of training examples.
        train_users: Whose each training example is, an array; None where nobody's.
        image_shape: `(height, width, channels)` of what the model sees.
        eval_split: `"test"`, or `"validation"` for a part of the training images held out.
        class_names: One name a class.
        centre: Grey level that the model maps to 0, or a tuple, one for each channel.
        deviation: Likewise, grey levels that it maps to a difference of 1.
        notes: What was found and chosen, sentences for people.
        left_out: Images that could not be read, where these are left out.
    """

    name: str
    train_x: np.ndarray | tfdpx.RandomAccess
    train_y: np.ndarray | None
    eval_x: np.ndarray | tfdpx.RandomAccess
    eval_y: np.ndarray | None
    num_train: int
    image_shape: tuple
    eval_split: str
    class_names: tuple
    centre: float | tuple
    deviation: float | tuple
    notes: tuple = ()
    left_out: int = 0
    train_users: np.ndarray | None = None

    @property
    def num_protected(self):
        """Number of training examples, or of the people whose they are."""
        return self.num_train if self.train_users is None else len(set(self.train_users))

    @property
    def num_classes(self):
        """Number of classes."""
        return len(self.class_names)

    @property
    def num_eval(self):
        """Number of examples on which accuracy is measured."""
        return self.eval_x.count if self.eval_y is None else len(self.eval_y)

    @property
    def eval_examples(self):
        """The examples to measure on, as `Model.evaluate` and `distributed.fit` take them."""
        return (self.eval_x,) if self.eval_y is None else (self.eval_x, self.eval_y)


def load(
    name,
    data_dir=None,
    validation=0.0,
    download=False,
    *,
    eval_split=None,
    image_size=None,
    train_scale=1.0,
    test_fraction=None,
    test_seed=0,
    skip_broken=False,
    takes=(None, None, None),
    user=None,
):
    """Reads the training images of a data set and those to measure accuracy on.

    Args:
        name: `"digits"`, any image classification data set of TensorFlow Datasets, or
            `"folder:PATH"` with images as `PATH/CLASS/NAME.jpg`, or as `PATH/train/CLASS/NAME.jpg`
            and `PATH/test/...`.
            `"NAME:FIRST-LAST"` keeps those classes only (small data sets), numbered from 0.
        data_dir: Folder with prepared data sets; `None` is the default of TensorFlow Datasets. The
            digits are written there on first use.
        validation: Training images to hold out: a fraction below 1, or a number. It is always the
            same part, so that runs can be compared: class by class for data sets in memory, and of
            those on disk, whose labels are not known without reading it all, simply at random.
        download: Whether to fetch and prepare a data set that is not in `data_dir`.
        eval_split: `"validation"` (the images held out) or `"test"`; None for those held out, if
            there are any.
        image_size: Height and width in pixels to resize to; None leaves images of one size alone,
            and chooses for a folder.
        train_scale: Float >= 1. Training images are made this many times larger, to cut views from.
        test_fraction: Of a folder; see `image_folder.ImageFolder`.
        test_seed: Likewise.
        skip_broken: Likewise.
        takes: `(height, width, channels)` of the images that a model takes, None where any: they
            are resized, and made gray or coloured.
        user: Of a folder; see `people.People`.

    Returns:
        An `ImageData`. The test images of ImageNet and Places-365 are the official validation
        images, as in Table 11 of De et al. 2022.

    Raises:
        UserError: If there is no such data set, it is not prepared or cannot be, or it does not
            consist of uint8 images, each with one label.
    """
    name = Name.parse(name)
    if image_size and any(own not in (None, image_size) for own in takes[:2]):
        raise UserError(
            f"The model takes images of {takes[0]}x{takes[1]} pixels, to which they are resized: "
            f"leave out --image_size. Received: --image_size={image_size}."
        )
    eval_split = eval_split or ("validation" if validation else "test")
    if name.entry.name in TABLES:
        raise UserError(f"Tables are for classify alone. Received: --dataset={name.text}.")
    if name.path:
        folder = ImageFolder(
            name.path, image_size, test_fraction, test_seed, skip_broken, takes, user
        )
        kind, records, test_split = folder.features, folder.records, "test"
    elif test_fraction is not None or test_seed or skip_broken or user:
        raise UserError(
            "Flags --test_fraction, --test_seed, --skip_broken and --user belong to "
            f"--dataset={FOLDER}:PATH. Received: --dataset={name.text}."
        )
    else:
        folder, builder = None, open_builder(name, data_dir, download)
        kind = features(builder, name.full)
        records = functools.partial(image_sources.records, builder, features=kind)
        usual = "test" if "test" in builder.info.splits else "validation"
        test_split = name.entry.test_split or usual
    shape = tuple(own or known for own, known in zip(takes, kind.shape, strict=True))
    shape = _image_shape(shape, name, image_size)
    large = (round(train_scale * shape[0]), round(train_scale * shape[1]), shape[2])
    classes = _kept_classes(name, kind)

    train = _Split(records, "train", kind, classes, name)
    kept, held_out = _hold_out(train, validation)
    if eval_split == "validation":
        measured, rows = train, held_out
    else:
        measured = _Split(records, test_split, kind, classes, name)
        rows = measured.rows
    train_x, train_y = train.read(kept, large)
    eval_x, eval_y = measured.read(rows, shape)
    return ImageData(
        name=name.full,
        train_x=train_x,
        train_y=train_y,
        eval_x=eval_x,
        eval_y=eval_y,
        num_train=len(kept),
        image_shape=shape,
        eval_split=eval_split,
        class_names=kind.class_names[classes.start : classes.stop],
        centre=name.entry.centre,
        deviation=name.entry.deviation,
        notes=tuple(folder.notes) if folder else (),
        left_out=folder.left_out if folder else 0,
        train_users=train.users(kept),
    )


def load_for(settings, data_dir, download, takes=None, user=None):
    """As `load`, of what the `settings.RunSettings` of a run name; `takes` None is any images."""
    return load(
        settings.dataset,
        data_dir,
        settings.validation,
        download,
        eval_split=settings.eval_split,
        image_size=settings.image_size,
        train_scale=settings.augment_resize,
        test_fraction=settings.test_fraction,
        test_seed=settings.test_seed,
        skip_broken=settings.skip_broken,
        takes=takes or (None, None, None),
        user=user,
    )


class _Split:
    """The examples of a split that belong to some of the classes.

    Attributes:
        labels: int64 array `[num_records]`, or None for a large split of which all are taken.
        rows: Indices of the examples, an int array.
    """

    def __init__(self, records, split, kind, classes, name):
        self._records = records(split)
        self._name, self._classes = name, classes
        self.labels, count = None, len(self._records)
        pixels = math.prod(length or 256 for length in kind.shape)
        if count * pixels > image_sources.IN_MEMORY_BYTES and name.classes is None:
            self.rows = np.arange(count)
            return
        self.labels = self._records.labels()
        num_classes = len(kind.class_names)
        if self.labels.min() < 0 or self.labels.max() >= num_classes:
            raise UserError(
                f"The labels of the {split!r} split of {name.full!r} must lie in [0, {num_classes})"
                f". Received: labels from {self.labels.min()} to {self.labels.max()}."
            )
        inside = (self.labels >= classes.start) & (self.labels < classes.stop)
        self.rows = np.flatnonzero(inside)
        if not len(self.rows):
            raise UserError(f"The {split!r} split of {name.full!r} holds no image.")

    def users(self, rows):
        """Whose each of the examples `rows` is, an array; None where nobody's."""
        people = getattr(self._records, "people", None)
        return None if people is None else people[rows]

    def read(self, rows, shape):
        """Images and labels of the examples `rows` as arrays; or a `RandomAccess` and None."""
        classes = self._classes
        images = image_sources.Images(self._records, rows, shape, classes.start, len(classes))
        try:
            examples = tfdpx.RandomAccess(images)
            if len(rows) * math.prod(shape) > image_sources.IN_MEMORY_BYTES:
                return examples, None
            x, y, _ = examples.batch(tf.range(len(rows), dtype=tf.int64), len(rows))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise UserError(f"Cannot read --dataset={self._name.text}: {error}") from error
        return x.numpy(), y.numpy()


def _image_shape(shape, name, image_size):
    if image_size:
        return (image_size, image_size, shape[2])
    if None in shape:
        raise UserError(
            f"The images of {name.full!r} are of many sizes: give --image_size. Received: "
            f"--image_size={image_size}."
        )
    return shape


def _kept_classes(name, kind):
    known = range(len(kind.class_names))
    classes = known if name.classes is None else name.classes
    if len(classes) < 2 or classes.stop > known.stop:
        raise UserError(
            f"The data set {name.entry.source!r} has the classes 0 to {known.stop - 1}, and at "
            f"least two are needed. Received: --dataset={name.text}."
        )
    return classes


def _hold_out(split, validation):
    """Rows to train on, and rows held out."""
    rows = split.rows
    if not validation:
        return rows, rows[:0]
    if split.labels is not None:
        try:
            return model_selection.train_test_split(
                rows,
                test_size=validation if validation < 1 else int(validation),
                stratify=split.labels[rows],
                random_state=0,
            )
        except ValueError as error:  # Too few images for one of each class on both sides.
            raise UserError(
                f"Cannot hold out --validation={validation:g} of {len(rows)} training images: "
                f"{error}"
            ) from error
    count = math.ceil(validation * len(rows)) if validation < 1 else int(validation)
    if count >= len(rows):
        raise UserError(
            f"Cannot hold out --validation={validation:g} of {len(rows)} training images."
        )
    shuffled = np.random.default_rng(0).permutation(rows)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])
