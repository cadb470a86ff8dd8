"""Random access to the images of a split: encoded on disk, decoded and resized when they are read.

Decoding leaves 8-bit images `[height, width, channels]` of one size. The resize is Pillow's
antialiased bilinear one, which does not keep the aspect ratio (De et al. 2022, appendix C.2).
"""

import io

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from tfdpx.train.data.image_files import eight_bits
from tfdpx.train.errors import UserError

# What is held in memory: decoded images up to this, or encoded ones that cannot be read at random.
IN_MEMORY_BYTES = 2**30


class Images:
    """Some examples of a split, as `tfdpx.RandomAccess` reads them.

    Args:
        records: Sequence of (encoded image, label), of bytes (or a uint8 array) and int.
        rows: Indices of `records` to take, an int array.
        shape: `(height, width, channels)` of the images to give.
        first_class: The label that becomes 0.
        num_classes: Int. Labels given lie below.
    """

    def __init__(self, records, rows, shape, first_class, num_classes):
        self._records, self._rows, self.shape = records, rows, tuple(shape)
        self._first_class, self._num_classes = first_class, num_classes

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """List of pairs of an image, uint8 of `shape`, and its label, int64."""
        rows = [int(self._rows[index]) for index in indices]
        return [
            (self._image(encoded, row), self._label(label, row))
            for row, (encoded, label) in zip(rows, self._records.__getitems__(rows), strict=True)
        ]

    def _image(self, encoded, row):
        try:
            return decode(encoded, self.shape)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ValueError(
                f"{self._records.name(row)} cannot be decoded: {error}. Replace or remove it."
            ) from error

    def _label(self, label, row):
        label -= self._first_class
        if not 0 <= label < self._num_classes:
            raise ValueError(f"Example {row} has label {label}, not in [0, {self._num_classes}).")
        return np.int64(label)


def decode(encoded, shape):
    """An image of `shape`, uint8, from the bytes of a file or from an array.

    Args:
        encoded: Bytes of an image file, or a uint8 array `[h, w, channels]`.
        shape: `(height, width, channels)`, of 1 channel or 3.
    """
    height, width, channels = shape
    if isinstance(encoded, np.ndarray) and encoded.shape == shape:
        return encoded
    if isinstance(encoded, np.ndarray):
        image = Image.fromarray(encoded[..., 0] if encoded.shape[2] == 1 else encoded)
    else:
        image = Image.open(io.BytesIO(encoded))
    image = eight_bits(image, channels)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(shape)


def records(builder, split, features):
    """The records of a split: has `__len__`, `__getitems__` (see `Images`), `labels`, `name`.

    Args:
        builder: Of TensorFlow Datasets, prepared.
        split: String.
        features: `builders.Features`.

    Raises:
        UserError: If there is no such split, or it is large and of a format that has to be read
            from beginning to end.
    """
    if split not in builder.info.splits or not builder.info.splits[split].num_examples:
        raise UserError(
            f"The data set {builder.name!r} has no {split!r} split. Received: splits="
            f"{sorted(builder.info.splits)}. Training needs 'train', measuring needs 'test' or "
            "'validation' (or hold out a part of 'train' with --validation)."
        )
    decoders = None
    if isinstance(builder.info.features[features.keys[0]], tfds.features.Image):
        decoders = {features.keys[0]: tfds.decode.SkipDecoding()}
    if builder.info.available_file_formats() & tfds.core.FileFormat.with_random_access():
        return _DataSource(builder.as_data_source(split, decoders=decoders), features.keys)
    size = builder.info.splits[split].num_bytes
    if size > IN_MEMORY_BYTES:
        raise UserError(
            f"The data set {builder.name!r} is too large to be held in memory ({size} bytes), and "
            f"its format {builder.info.file_format.value} cannot be read in any order. Prepare it "
            f"by `tfds build {builder.name} --file_format=array_record`, or convert it by `tfds "
            "convert_format`."
        )
    examples = tfds.as_numpy(builder.as_dataset(split, decoders=decoders))
    return _InMemory(tuple(example[key] for key in features.keys) for example in examples)


class _DataSource:
    """Of files that can be read in any order."""

    def __init__(self, source, keys):
        self._source, self._keys = source, keys

    def __len__(self):
        return len(self._source)

    def __getitems__(self, rows):
        examples = self._source.__getitems__(rows)
        return [tuple(example[key] for key in self._keys) for example in examples]

    def labels(self):
        """int64 array, by reading all of the split, a part at a time."""
        parts = (range(len(self))[at : at + 1024] for at in range(0, len(self), 1024))
        return np.array([label for part in parts for _, label in self.__getitems__(list(part))])

    def name(self, row):
        """What to call an example."""
        return f"Example {row}"


class _InMemory(_DataSource):
    """Of files that cannot be: encoded images in memory."""

    def __init__(self, pairs):
        self._source = list(pairs)

    def __getitems__(self, rows):
        return [self._source[row] for row in rows]
