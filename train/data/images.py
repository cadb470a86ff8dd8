"""Loads images for training and evaluation into memory, or prepares to read them from disk."""

import dataclasses
import functools
import io
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps
from sklearn import model_selection

import tfdpx
from tfdpx.train.data import folder, tfds
from tfdpx.train.errors import UserError
from tfdpx.train.objects import view_scale


@dataclasses.dataclass(frozen=True)
class ImageData:
    """Images with labels, and the properties of the images that a model needs.

    Training and evaluation examples are pairs of arrays: uint8 images `[count, height, width,
    channels]`, and int64 labels `[count]` in `[0, num_classes)`. If the arrays would take more than
    `tfds.IN_MEMORY_BYTES`, the images are replaced by a `tfdpx.RandomAccess` that reads images and
    labels from disk, and the labels by None. `plan.batches(data.train_x, data.train_y)` accepts
    both forms.

    Attributes:
        name: Name of the data set.
        train_x, train_y: The private data. The images may be larger than `image_shape`, see the
            argument `train_scale` of `load`.
        eval_x, eval_y: The evaluation examples, on which accuracy is measured.
        num_train: Number of training examples.
        image_shape: `(height, width, channels)` of the images that the model takes.
        eval_split: `"test"`, or `"validation"` for held-out training images.
        class_names: Tuple with a name for each class.
        centre: Grey level that the model maps to 0, or a tuple with one for each channel.
        deviation: Divisor of grey levels after the model has subtracted `centre`; a number, or a
            tuple with one for each channel.
        notes: Tuple of sentences to print about the images, for example how their size was chosen.
        left_out: Number of images that were left out because they could not be read.
        train_users: Array with the person of each training example; None without people.
        center_crop: See `decode`.
        names_of: Function from "train" or "eval" to a list with a name of each example: the path of
            its file in the folder, or SPLIT/ROW for other data sets.
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
    center_crop: float = 0.0
    names_of: Callable | None = None

    @property
    def largest_grey(self):
        """The largest grey level of the format, not of the images, as that would be private."""
        return 255 if isinstance(self.centre, tuple) else 2 * self.centre

    @property
    def num_protected(self):
        """The number of training examples, or of people if people are protected."""
        return self.num_train if self.train_users is None else len(set(self.train_users))

    @property
    def num_classes(self):
        """Number of classes."""
        return len(self.class_names)

    @property
    def num_eval(self):
        """The number of examples on which accuracy is measured."""
        return self.eval_x.count if self.eval_y is None else len(self.eval_y)

    @property
    def eval_examples(self):
        """The evaluation examples as a tuple of arguments for `Model.evaluate`."""
        return (self.eval_x,) if self.eval_y is None else (self.eval_x, self.eval_y)

    def is_public(self, public_test=False):
        """Returns whether the evaluation examples are public test images.

        Held-out training images are as private as the training images.

        Args:
            public_test: Bool, the flag `--public_test`, by which the user declares test images
                public.
        """
        return self.eval_split == "test" and (public_test or tfds.is_known(self.name))


def load(
    name,
    data_dir=None,
    validation=0.0,
    download=False,
    *,
    eval_split=None,
    image_size=None,
    center_crop=None,
    train_scale=1.0,
    takes=(None, None, None),
    in_memory=tfds.IN_MEMORY_BYTES,
    **of_folder,
):
    """Reads the training images of a data set, and the images to measure accuracy on.

    Args:
        name: `"digits"`, any image classification data set of TensorFlow Datasets, or
            `"folder:PATH"` with images as `PATH/CLASS/NAME.jpg`, or as `PATH/train/CLASS/NAME.jpg`
            and `PATH/test/...`. `"NAME:FIRST-LAST"` keeps only the classes FIRST to LAST of a small
            data set, and numbers them from 0.
        data_dir: Folder with prepared data sets; `None` is the default of TensorFlow Datasets.
        validation: Training images to hold out: a fraction below 1, or a number. The same images
            are held out each time, which makes runs comparable. In memory, the held-out images are
            stratified by class. On disk they are not, because labels are unknown until all images
            are read. For a folder, `validation` must be a fraction, see `folder.read`.
        download: Whether to fetch and prepare a data set that is not in `data_dir`.
        eval_split: `"validation"` (the held-out images) or `"test"`. None is `"validation"` if
            images are held out, else `"test"`.
        image_size: Height and width in pixels to resize to. None keeps the size if all images have
            the same one; for a folder, a size is chosen.
        center_crop: Int, the side in pixels of the square that is cut out of the middle of an
            image. Before that, the shorter side of the image is scaled to `image_size` or, if this
            is None, to `center_crop`. With None, nothing is cut off: the whole image is resized,
            which may change its aspect ratio.
        train_scale: Float >= 1, the factor by which training images are larger than the model's
            input. Views of the right size are then cut from them.
        takes: `(height, width, channels)` of the images that a model takes. A value is None if any
            value fits. Images are resized, and converted to gray or colour.
        in_memory: Int, the largest number of bytes of decoded images to hold in memory.
        **of_folder: `test_fraction`, `test_seed`, `skip_broken` and `user` for a folder, see
            `folder.read`.

    Returns:
        `ImageData`. For ImageNet and Places-365, the test images are the official validation
        images, as in Table 11 of De et al. 2022.

    Raises:
        UserError: If the data set does not exist or is not prepared, or its examples are not pairs
            of a uint8 image and a label.
    """
    name = tfds.Name.parse(name)
    share = center_crop / (image_size or center_crop) if center_crop else 0.0
    image_size = center_crop or image_size
    if image_size and any(side not in (None, image_size) for side in takes[:2]):
        raise UserError(
            f"The model takes images of {takes[0]}x{takes[1]} pixels, to which they are resized: "
            f"leave out --image_size. Received: --image_size={image_size}."
        )
    if any(value not in (None, 0, folder.NONE) for value in of_folder.values()) and not name.path:
        raise UserError(
            "Flags --test_fraction, --test_seed, --skip_broken and --user belong to "
            f"--dataset={tfds.FOLDER}:PATH. Received: --dataset={name.text}."
        )
    if name.path:
        source = folder.read(name.path, validation, **of_folder)
    elif name.entry.source == tfds.DIGITS:
        source = tfds.read_digits()
    else:
        source = tfds.read(name, data_dir, download)
    sizes = [length or image_size for length in takes[:2]]
    shape = tuple(a or b for a, b in zip((*sizes, takes[2]), source.shape, strict=True))
    if None in shape:
        raise UserError(
            f"The images of {name.full!r} are of many sizes: give --image_size. Received: "
            f"--image_size={image_size}."
        )
    large = (round(train_scale * shape[0]), round(train_scale * shape[1]), shape[2])
    count = len(source.class_names)
    classes = range(count) if name.classes is None else name.classes
    if len(classes) < 2 or classes.stop > count:
        raise UserError(
            f"The data set {name.entry.source!r} has the classes 0 to {count - 1}, and at "
            f"least two are needed. Received: --dataset={name.text}."
        )

    def rows_of(split):
        records = source.records(split)
        rows = np.arange(records.count)
        if name.classes:
            rows = np.flatnonzero(np.isin(records.labels(), classes))
        if not len(rows):
            raise UserError(
                f"There is no {split} image in --dataset={name.text}. Hold out some training "
                "images by --validation, or add images; for a folder, change --test_fraction "
                "or --test_seed."
            )
        return records, rows

    def examples(records, rows, shape):
        images = Images(records, rows, shape, classes.start, len(classes), share)
        try:
            source = tfdpx.RandomAccess(images)
            if len(rows) * math.prod(shape) > in_memory:
                return source, None
            x, y, _ = source.batch(tf.range(len(rows), dtype=tf.int64), len(rows))
        except (OSError, ValueError, tf.errors.OpError) as error:
            raise UserError(f"Cannot read --dataset={name.text}: {error}") from error
        return x.numpy(), y.numpy()

    eval_split = eval_split or ("validation" if validation else "test")
    train, train_rows = measured, rows = rows_of("train")
    if validation and not name.path:
        train_rows, rows = _hold_out(train, train_rows, validation, math.prod(shape))
    if name.path or eval_split == "test" or not validation:
        measured, rows = rows_of(eval_split)
    train_x, train_y = examples(train, train_rows, large)
    eval_x, eval_y = examples(measured, rows, shape)

    def names_of(part):
        split, places = (train, train_rows) if part == "train" else (measured, rows)
        if split.names is not None:
            return [split.names[row] for row in places]
        return [f"{'train' if split is train else eval_split}/{row}" for row in places]

    return ImageData(
        name=name.full,
        train_x=train_x,
        train_y=train_y,
        eval_x=eval_x,
        eval_y=eval_y,
        num_train=len(train_rows),
        image_shape=shape,
        eval_split=eval_split,
        class_names=source.class_names[classes.start : classes.stop],
        centre=name.entry.centre,
        deviation=name.entry.deviation,
        notes=(*source.notes, _size_note(shape, takes, image_size)) if name.path else (),
        left_out=source.left_out,
        train_users=None if train.people is None else train.people[train_rows],
        center_crop=share,
        names_of=names_of,
    )


_SETTINGS = (
    *("validation", "eval_split", "image_size", "center_crop"),
    *("test_fraction", "test_seed", "skip_broken"),
)


def load_for(settings, data_dir, download, takes=None, in_memory=tfds.IN_MEMORY_BYTES):
    """Loads images like `load`, with the settings of a run.

    Args:
        settings: A `settings.Settings`.
        data_dir: See `load`.
        download: See `load`.
        takes: See `load`. None if the model takes images of any shape.
        in_memory: See `load`.
    """
    # Without privacy, the people in the images are irrelevant.
    is_private = settings.private and settings.epsilon != math.inf
    return load(
        settings.dataset,
        data_dir,
        download=download,
        train_scale=view_scale(settings.augment),
        takes=takes or (None, None, None),
        user=settings.user if is_private else settings.user or folder.NONE,
        in_memory=in_memory,
        **{name: getattr(settings, name) for name in _SETTINGS},
    )


def decode(encoded, shape, center_crop=0.0):
    """Returns an image of `shape`, uint8, from the bytes of a file or from an array.

    Args:
        encoded: Bytes of an image file, or a uint8 array `[h, w, channels]`.
        shape: `(height, width, channels)`, with 1 or 3 channels.
        center_crop: Float, the side of the square that is cut out of the middle, divided by the
            shorter side of the image. The square is then resized. 0 resizes the whole image,
            without keeping its aspect ratio.
    """
    height, width, channels = shape
    if isinstance(encoded, np.ndarray):
        image = Image.fromarray(encoded[..., 0] if encoded.shape[2] == 1 else encoded)
    else:
        image = Image.open(io.BytesIO(encoded))
    image = folder.eight_bits(image, channels)
    if center_crop:
        bleed = (1 - center_crop) / 2
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR, bleed)
    elif image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(shape)


class Images:
    """The examples of a split, in a form that `tfdpx.RandomAccess` can read.

    Args:
        records: Object with `read(rows)`, for example `tfds.Records`.
        rows: Int array, the row numbers in `records` of the examples to take.
        shape: `(height, width, channels)` of the images to return.
        first_class: The label that becomes 0.
        num_classes: Int. Labels must be below it.
        center_crop: See `decode`.
    """

    def __init__(self, records, rows, shape, first_class, num_classes, center_crop=0.0):
        self._records, self._rows = records, rows
        self._first_class, self._num_classes = first_class, num_classes
        self._decode = functools.partial(decode, shape=shape, center_crop=center_crop)

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """Returns a list of pairs: a uint8 image and its int64 label."""
        rows = [int(self._rows[index]) for index in indices]
        pairs = zip(rows, self._records.read(rows), strict=True)
        return [self._example(row, *record) for row, record in pairs]

    def _example(self, row, encoded, label):
        try:
            image = self._decode(encoded)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(
                f"Example {row} cannot be decoded: {error}. Replace or remove it."
            ) from error
        label -= self._first_class
        if not 0 <= label < self._num_classes:
            raise ValueError(f"Example {row} has label {label}, not in [0, {self._num_classes}).")
        return image, np.int64(label)


def public_split(labels, shots, seed):
    """Chooses public examples at random. Returns two int arrays: public and private indices.

    Args:
        labels: Integers `[n]`.
        shots: Int, the number of public examples of each class.
        seed: Int, the seed of the random choice.

    Raises:
        ValueError: If a class has at most `shots` examples, so none of them would be private.
    """
    order = np.random.default_rng([seed, 17]).permutation(len(labels))
    public = []
    for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
        if count <= shots:
            raise ValueError(
                f"Argument `shots` must leave private examples of each class. Received: "
                f"shots={shots}, and class {label} has {count} examples."
            )
        public.extend(order[np.asarray(labels)[order] == label][:shots])
    return np.sort(np.array(public, int)), np.setdiff1d(order, public)


def _size_note(shape, takes, image_size):
    reason = "chosen from the files; --image_size changes it"
    if image_size or any(takes[:2]):
        reason = "--image_size" if image_size else "the size that --init_from takes"
    colours = "gray" if shape[2] == 1 else "in colour"
    return f"Read as {shape[0]}x{shape[1]} pixels, {colours} ({reason})."


def _hold_out(records, rows, validation, values):
    """Returns two arrays of row numbers: to train on, and to hold out.

    Data that fit in memory are split class by class.

    Args:
        records: `tfds.Records`.
        rows: Int array, the row numbers to split.
        validation: See `load`.
        values: Int, the number of values of an image: height times width times channels.
    """
    is_small = records.count * values <= tfds.IN_MEMORY_BYTES
    try:
        return model_selection.train_test_split(
            rows,
            test_size=validation if validation < 1 else int(validation),
            stratify=records.labels()[rows] if is_small else None,
            random_state=0,
        )
    except ValueError as error:  # There are too few images of a class to split them.
        raise UserError(
            f"Cannot hold out --validation={validation:g} of {len(rows)} training images: {error}"
        ) from error
