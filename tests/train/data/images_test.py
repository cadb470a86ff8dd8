"""Data sets: images are read as they were written, and unfit sets are refused with the remedy."""

import types

import numpy as np
import pytest
import sklearn.datasets
import tensorflow_datasets as tfds
import tiny_datasets
from PIL import Image
from sklearn import model_selection

import tfdpx
from tfdpx.report import measure
from tfdpx.train import predict
from tfdpx.train.data import images
from tfdpx.train.errors import UserError


def as_set(x, y):
    """Sorts examples: writing a data set does not keep their order."""
    return sorted(zip(map(tuple, x.reshape(len(x), -1).tolist()), y.tolist(), strict=True))


def test_digits_are_sklearns_with_sklearns_split():
    data, bunch = images.load("digits"), sklearn.datasets.load_digits()
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        bunch.images, bunch.target, test_size=360, stratify=bunch.target, random_state=0
    )
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10 and data.eval_split == "test"
    # Equality after division shows that storing as bytes loses nothing.
    np.testing.assert_array_equal(data.train_x[..., 0] / 15, train_x)
    np.testing.assert_array_equal(data.eval_x[..., 0] / 15, test_x)
    assert (data.train_y == train_y).all() and (data.eval_y == test_y).all()


def test_validation_is_a_stratified_part_of_the_training_images():
    whole, data = images.load("digits"), images.load("digits", validation=0.2)
    assert data.eval_split == "validation" and len(data.eval_y) == 288
    parts = as_set(data.train_x, data.train_y) + as_set(data.eval_x, data.eval_y)
    assert sorted(parts) == as_set(whole.train_x, whole.train_y)
    assert np.abs(np.bincount(data.eval_y) - 0.2 * np.bincount(whole.train_y)).max() <= 1
    np.testing.assert_array_equal(images.load("digits", validation=0.2).eval_x, data.eval_x)


def test_some_of_the_classes():
    low, high = images.load("digits:0-4"), images.load("digits:5-9")
    whole = images.load("digits")
    assert low.name == "sklearn_digits:0-4" and high.class_names == ("5", "6", "7", "8", "9")
    assert low.centre == 120
    both = as_set(low.train_x, low.train_y) + as_set(high.train_x, high.train_y + 5)
    assert sorted(both) == as_set(whole.train_x, whole.train_y)
    for part in ("3-3", "5-10", "7-2"):
        with pytest.raises(UserError, match=f"classes 0 to 9.*digits:{part}"):
            images.load(f"digits:{part}")


def test_a_download_is_asked_for_and_its_failure_explained(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=f"mnist.*not prepared: {tmp_path}.*--download.*tfds build"):
        images.load("mnist", tmp_path)
    assert not any(tmp_path.iterdir())

    def fail(builder):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    with pytest.raises(UserError, match=f"not be prepared under {tmp_path}.*Name or service"):
        images.load("mnist", tmp_path, download=True)


MATRIX = tfds.features.Tensor(shape=(32, 32), dtype=np.uint8)
UNFIT = [
    ({"image": MATRIX}, (32, 32), 0, "uint8 image of shape"),
    ({"label": tfds.features.Scalar(dtype=np.int64)}, (32, 32, 3), 0, "a class label"),
    ({}, (32, 32, 3), -1, r"Example . has label -1, not in \[0, 3\)"),
    ({}, (32, 32, 3), 0, "no test image in --dataset=tiny.*--validation"),
]


def test_sets_that_are_no_image_classification(tmp_path):
    for number, (features, shape, least_label, message) in enumerate(UNFIT):
        pixels, labels = tiny_datasets.random_images(9, shape)
        labels[4], folder = least_label, tmp_path / str(number)
        splits = {"train": (pixels, labels)} | ({"test": (pixels, labels)} if least_label else {})
        tiny_datasets.write(folder, "tiny", splits, **features)
        with pytest.raises(UserError, match=message):
            images.load("tiny", folder)


def gradients(count):
    """Returns images of many sizes, with brightness that rises from left to right."""
    ramps = [np.linspace(0, 240, 40 + 3 * i)[None, :, None] for i in range(count)]
    photographs = [np.tile(ramp, (30 + i, 1, 3)).astype("uint8") for i, ramp in enumerate(ramps)]
    return photographs, np.arange(count) % 3


def test_photographs_are_resized_or_cropped_and_training_images_larger(tmp_path):
    splits = {"train": gradients(7), "validation": gradients(4)}
    image = tfds.features.Image(shape=(None, None, 3))
    tiny_datasets.write(tmp_path, "tiny_imagenet", splits, image=image)
    with pytest.raises(UserError, match="many sizes: give --image_size"):
        images.load("tiny_imagenet", tmp_path)
    squeezed, cropped = (
        images.load("tiny_imagenet", tmp_path, image_size=20, train_scale=1.2, center_crop=crop)
        for crop in (None, 20)
    )
    assert squeezed.image_shape == cropped.image_shape == (20, 20, 3) and cropped.center_crop
    assert squeezed.train_x.shape == (7, 24, 24, 3) and squeezed.eval_x.shape == (4, 20, 20, 3)
    # Brightness rises over its whole range, or over the middle of it if cropped.
    assert np.ptp(squeezed.train_x, axis=(1, 2, 3)).min() > 225
    assert np.ptp(cropped.train_x, axis=(1, 2, 3)).max() < 180
    [wide], _ = gradients(1)
    decoded = images.decode(wide, (20, 20, 3), center_crop=1.0)
    np.testing.assert_allclose(decoded, images.decode(wide[:, 5:35], (20, 20, 3)), atol=1)
    # The paper on heads cuts 256 pixels out of 384.
    part = images.load("tiny_imagenet", tmp_path, image_size=30, center_crop=20)
    assert part.image_shape == (20, 20, 3) and part.center_crop == 20 / 30
    middle = images.decode(wide[5:25, 10:30], (20, 20, 3))
    np.testing.assert_allclose(images.decode(wide, (20, 20, 3), 20 / 30), middle, atol=1)
    # Images to predict are cropped too, as the darkest and the brightest pixel show.
    files = [tmp_path / "wide.png"]
    Image.fromarray(wide).save(files[0])
    model = types.SimpleNamespace(
        predict_on_batch=lambda x: np.stack([x.min(), x.max()])[None] / 99
    )
    whole, middle = (
        predict.logits(
            model, types.SimpleNamespace(image_shape=(20, 20, 3), center_crop=crop), files
        )[0, 1]
        for crop in (0.0, 1.0)
    )
    assert whole > middle + 0.05


def test_large_sets_stay_on_disk(tmp_path, monkeypatch):
    train, test = tiny_datasets.random_images(40), tiny_datasets.random_images(12, seed=1)
    splits = {"train": train, "test": test}
    tiny_datasets.write(tmp_path, "tiny_imagenet", splits, file_format="array_record")
    monkeypatch.setattr(images.tfds, "IN_MEMORY_BYTES", 20_000)
    small = {"in_memory": 20_000}
    data = images.load("tiny_imagenet", tmp_path, validation=10, eval_split="test", **small)
    assert isinstance(data.train_x, tfdpx.RandomAccess) and data.train_y is None
    assert isinstance(data.eval_x, tfdpx.RandomAccess) and data.eval_examples == (data.eval_x,)
    assert (data.num_train, data.train_x.count, data.num_eval) == (30, 30, 12)

    def pairs(examples):
        x, y, _ = examples.batch(np.arange(examples.count), examples.count)
        return as_set(x.numpy(), y.numpy())

    held_out = images.load("tiny_imagenet", tmp_path, validation=0.25, **small)
    assert pairs(data.train_x) == pairs(held_out.train_x)  # Always the same part.
    assert sorted(pairs(held_out.train_x) + pairs(held_out.eval_x)) == as_set(*train)
    assert pairs(data.eval_x) == as_set(*test)
    # Data on disk are measured too; three classes have no top five.
    model = types.SimpleNamespace(predict_on_batch=lambda x: np.ones((len(x), 3)))
    measured = measure.measure(model, data)
    results = measured.results()
    assert (results["test_accuracy"], measured.top5_accuracy) == (np.mean(test[1] == 0), None)
    half = images.load("tiny_imagenet:1-2", tmp_path)  # Labels are read in parts.
    assert half.num_train == np.isin(train[1], [1, 2]).sum() > 0
    with pytest.raises(UserError, match="Cannot hold out --validation=40"):
        images.load("tiny_imagenet", tmp_path, validation=40)
    tiny_datasets.write(tmp_path, "tiny_cifar", splits)
    with pytest.raises(UserError, match="tfds build tiny_cifar --file_format=array_record"):
        images.load("tiny_cifar", tmp_path)
