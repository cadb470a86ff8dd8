"""Data sets: what is read is what was written, and what is unfit is refused with its fix."""

import numpy as np
import pytest
import sklearn.datasets
import tensorflow_datasets as tfds
import tiny_datasets
from cases import slow
from sklearn import model_selection

import tfdpx
from tfdpx.train.data import images
from tfdpx.train.data.tfds import find
from tfdpx.train.errors import UserError


def as_set(images, labels):
    """Examples without their order, which writing a data set does not keep."""
    flat = images.reshape(len(images), -1)
    return sorted(zip(map(tuple, flat.tolist()), labels.tolist(), strict=True))


@pytest.fixture(scope="module")
def digits_dir(finished_runs):
    return finished_runs.data_dir


def test_digits_are_sklearns_with_sklearns_split(digits_dir):
    data = images.load("digits", digits_dir)
    bunch = sklearn.datasets.load_digits()
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        bunch.images, bunch.target, test_size=360, stratify=bunch.target, random_state=0
    )
    assert data.train_x.shape == (1437, 8, 8, 1) and data.train_x.dtype == np.uint8
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10
    # Equality after division shows that storing as bytes loses nothing.
    assert as_set(data.train_x / 15, data.train_y) == as_set(train_x, train_y)
    assert as_set(data.eval_x / 15, data.eval_y) == as_set(test_x, test_y)
    assert data.eval_split == "test"


def test_validation_is_a_stratified_part_of_the_training_images(digits_dir):
    whole = images.load("digits", digits_dir)
    data = images.load("digits", digits_dir, validation=0.2)
    assert data.eval_split == "validation"
    parts = as_set(data.train_x, data.train_y) + as_set(data.eval_x, data.eval_y)
    assert sorted(parts) == as_set(whole.train_x, whole.train_y)
    assert len(data.eval_y) == 288
    expected = np.bincount(whole.train_y) * 0.2
    assert np.abs(np.bincount(data.eval_y) - expected).max() <= 1
    again = images.load("digits", digits_dir, validation=0.2)
    np.testing.assert_array_equal(again.eval_x, data.eval_x)


def test_unprepared_dataset_is_not_downloaded_unasked(tmp_path):
    with pytest.raises(UserError, match="mnist.*not prepared.*--download.*tfds build") as error:
        images.load("mnist", tmp_path)
    assert str(tmp_path) in str(error.value)
    assert not any(tmp_path.iterdir())


def test_failed_download_says_why_and_where(tmp_path, monkeypatch):
    def fail(builder):
        del builder
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    with pytest.raises(UserError, match="could not be prepared.*Name or service") as error:
        images.load("mnist", tmp_path, download=True)
    assert str(tmp_path) in str(error.value)


PHOTOGRAPHS = tfds.features.Image(shape=(None, None, 3))


def gradients(count):
    """Photographs of as many sizes, whose resize is known: brightness rises from left to right."""
    images = []
    for i in range(count):
        ramp = np.linspace(0, 240, 40 + 3 * i)
        images.append(np.tile(ramp[None, :, None], (30 + i, 1, 3)).astype("uint8"))
    return images, np.arange(count) % 3


MATRIX = tfds.features.Tensor(shape=(32, 32), dtype=np.uint8)
UNFIT = [
    ({"image": MATRIX}, (32, 32), 0, "uint8 image of shape"),
    ({"label": tfds.features.Scalar(dtype=np.int64)}, (32, 32, 3), 0, "a class label"),
    ({}, (32, 32, 3), -1, r"Example . has label -1, not in \[0, 3\)"),
    ({}, (32, 32, 3), 0, "no 'validation' split.*--validation"),
]


def test_sets_that_are_no_image_classification(tmp_path):
    for number, (features, shape, least_label, message) in enumerate(UNFIT):
        pixels, labels = tiny_datasets.random_images(9, shape)
        labels[4], folder = least_label, tmp_path / str(number)
        splits = {"train": (pixels, labels)} | ({"test": (pixels, labels)} if least_label else {})
        tiny_datasets.write(folder, "tiny", splits, **features)
        with pytest.raises(UserError, match=message):
            images.load("tiny", folder)


def test_photographs_are_resized_and_training_images_larger(tmp_path):
    splits = {"train": gradients(7), "validation": gradients(4)}
    tiny_datasets.write(tmp_path, "tiny_imagenet", splits, image=PHOTOGRAPHS)
    with pytest.raises(UserError, match="many sizes: give --image_size"):
        images.load("tiny_imagenet", tmp_path)
    data = images.load("tiny_imagenet", tmp_path, image_size=20, train_scale=1.2)
    assert data.image_shape == (20, 20, 3)
    assert data.train_x.shape == (7, 24, 24, 3) and data.eval_x.shape == (4, 20, 20, 3)
    squeezed, data = (
        images.load("tiny_imagenet", tmp_path, image_size=20, center_crop=crop)
        for crop in (False, True)
    )
    assert data.center_crop and data.image_shape == (20, 20, 3)
    # Brightness rises over its whole range, or where cropped over the middle of it.
    assert np.ptp(squeezed.train_x, axis=(1, 2, 3)).min() > 225
    assert np.ptp(data.train_x, axis=(1, 2, 3)).max() < 180
    [wide], _ = gradients(1)
    cropped = images.decode(wide, (20, 20, 3), center_crop=True)
    np.testing.assert_allclose(cropped, images.decode(wide[:, 5:35], (20, 20, 3)), atol=1)


def test_large_sets_stay_on_disk(tmp_path, monkeypatch):
    train, test = tiny_datasets.random_images(40), tiny_datasets.random_images(12, seed=1)
    splits = {"train": train, "test": test}
    tiny_datasets.write(tmp_path, "tiny_imagenet", splits, file_format="array_record")
    monkeypatch.setattr(images, "IN_MEMORY_BYTES", 20_000)
    data = images.load("tiny_imagenet", tmp_path, validation=10, eval_split="test")
    assert isinstance(data.train_x, tfdpx.RandomAccess) and data.train_y is None
    assert isinstance(data.eval_x, tfdpx.RandomAccess) and data.eval_examples == (data.eval_x,)
    assert (data.num_train, data.train_x.count, data.eval_x.count) == (30, 30, 12)
    held_out = images.load("tiny_imagenet", tmp_path, validation=0.25)
    assert held_out.eval_split == "validation" and held_out.eval_x.count == 10

    def pairs(examples):
        x, y, _ = examples.batch(np.arange(examples.count), examples.count)
        return as_set(x.numpy(), y.numpy())

    assert pairs(data.train_x) == pairs(held_out.train_x)  # Always the same part.
    assert sorted(pairs(held_out.train_x) + pairs(held_out.eval_x)) == as_set(*train)
    assert pairs(data.eval_x) == as_set(*test)
    half = images.load("tiny_imagenet:1-2", tmp_path)  # Labels are read in parts.
    assert half.num_train == np.isin(train[1], [1, 2]).sum() > 0
    with pytest.raises(UserError, match="Cannot hold out --validation=40"):
        images.load("tiny_imagenet", tmp_path, validation=40)


def test_large_sets_that_cannot_be_read_at_random(tmp_path, monkeypatch):
    tiny_datasets.write(tmp_path, "tiny_imagenet", {"train": tiny_datasets.random_images(40)})
    monkeypatch.setattr(images, "IN_MEMORY_BYTES", 20_000)
    with pytest.raises(UserError, match="tfds build tiny_imagenet --file_format=array_record"):
        images.load("tiny_imagenet", tmp_path, validation=10)


@pytest.mark.parametrize(
    ("name", "shape", "test", "num_classes", "is_standardized", "file_format"),
    [
        ("cifar10", (32, 32, 3), "test", 10, True, "tfrecord"),
        ("cifar100", (32, 32, 3), "test", 100, True, "array_record"),
        ("mnist", (28, 28, 1), "test", 10, False, "array_record"),
        ("imagenet32", (32, 32, 3), "validation", 1000, False, "tfrecord"),
        slow("places365_small", (256, 256, 3), "validation", 365, True, "array_record"),
    ],
)
def test_known_sets_of_one_size(
    name, shape, test, num_classes, is_standardized, file_format, tmp_path
):
    train = tiny_datasets.random_images(30, shape)
    held = tiny_datasets.random_images(9, shape, seed=1)
    full = find(name).source
    tiny_datasets.write_known(tmp_path, full, {"train": train, test: held}, file_format)
    data = images.load(name, tmp_path, validation=6)
    assert (data.num_train, len(data.eval_y), data.num_classes) == (24, 6, num_classes)
    data = images.load(name, tmp_path, validation=6, eval_split="test")
    assert data.num_train == 24 and data.name == full
    assert as_set(data.eval_x, data.eval_y) == as_set(*held)
    assert (data.centre != 127.5) == is_standardized


@pytest.mark.slow
def test_some_of_the_classes(digits_dir):
    low, high = (images.load(f"digits:{part}", digits_dir) for part in ("0-4", "5-9"))
    whole = images.load("digits", digits_dir)
    assert low.name == "sklearn_digits:0-4" and high.class_names == ("5", "6", "7", "8", "9")
    assert high.num_classes == 5 and high.train_y.min() == 0 and high.train_y.max() == 4
    both = as_set(low.train_x, low.train_y) + as_set(high.train_x, high.train_y + 5)
    assert sorted(both) == as_set(whole.train_x, whole.train_y)
    assert low.centre == 120
    for part in ("3-3", "5-10", "7-2"):
        with pytest.raises(UserError, match=f"classes 0 to 9.*digits:{part}"):
            images.load(f"digits:{part}", digits_dir)
