"""Data sets: what is read is what was written, and what is unfit is refused with its mend."""

import numpy as np
import pytest
import tensorflow_datasets as tfds
from sklearn import datasets, model_selection

from tfdpx.train import input_pipeline
from tfdpx.train.errors import UserError


def as_set(images, labels):
    """Examples without their order, which writing a data set does not keep."""
    flat = images.reshape(len(images), -1)
    return sorted(zip(map(tuple, flat.tolist()), labels.tolist(), strict=True))


@pytest.fixture(scope="module")
def digits_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    input_pipeline.load("digits", folder)
    return folder


def write_dataset(folder, dataset, splits, image=None, label=None):
    """Writes a data set as TensorFlow Datasets does; only its files are known to the reader."""

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = dataset
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": image or tfds.features.Image(shape=(32, 32, 3)),
                "label": label or tfds.features.ClassLabel(names=["cat", "dog", "frog"]),
            }
            return tfds.core.DatasetInfo(
                builder=self,
                features=tfds.features.FeaturesDict(features),
                supervised_keys=("image", "label"),
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(*pair) for split, pair in splits.items()}

        def _generate_examples(self, images, labels):
            for key, (x, y) in enumerate(zip(images, labels, strict=True)):
                yield key, {"image": x, "label": y}

    Tiny(data_dir=folder).download_and_prepare()


def random_images(count, shape=(32, 32, 3), seed=0):
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (count, *shape)).astype("uint8")
    return images, generator.integers(0, 3, count)


def test_digits_are_sklearns_with_sklearns_split(digits_dir):
    data = input_pipeline.load("digits", digits_dir)
    digits = datasets.load_digits()
    train_x, test_x, train_y, test_y = model_selection.train_test_split(
        digits.images, digits.target, test_size=360, stratify=digits.target, random_state=0
    )
    assert data.train_x.shape == (1437, 8, 8, 1) and data.train_x.dtype == np.uint8
    assert data.image_shape == (8, 8, 1) and data.num_classes == 10
    # Equality after division shows that storing as bytes loses nothing.
    assert as_set(data.train_x / 15, data.train_y) == as_set(train_x, train_y)
    assert as_set(data.eval_x / 15, data.eval_y) == as_set(test_x, test_y)
    assert data.eval_split == "test"


def test_digits_are_normalised_to_plus_minus_one(digits_dir):
    data = input_pipeline.load("digits", digits_dir)
    values = np.unique(data.train_x) / data.centre - 1
    np.testing.assert_allclose(values, np.arange(17) / 8 - 1, atol=1e-12)


def test_digits_are_a_builder_of_tensorflow_datasets(digits_dir):
    builder = tfds.builder("sklearn_digits", data_dir=digits_dir)
    assert isinstance(builder, tfds.core.GeneratorBasedBuilder)
    assert builder.info.splits["train"].num_examples == 1437
    assert builder.info.splits["test"].num_examples == 360


def test_validation_is_a_stratified_part_of_the_training_images(digits_dir):
    whole = input_pipeline.load("digits", digits_dir)
    data = input_pipeline.load("digits", digits_dir, validation=0.2)
    assert data.eval_split == "validation"
    parts = as_set(data.train_x, data.train_y) + as_set(data.eval_x, data.eval_y)
    assert sorted(parts) == as_set(whole.train_x, whole.train_y)
    assert len(data.eval_y) == 288
    expected = np.bincount(whole.train_y) * 0.2
    assert np.abs(np.bincount(data.eval_y) - expected).max() <= 1
    again = input_pipeline.load("digits", digits_dir, validation=0.2)
    np.testing.assert_array_equal(again.eval_x, data.eval_x)


def test_validation_too_small_for_every_class(digits_dir):
    with pytest.raises(UserError, match="--validation=0.001"):
        input_pipeline.load("digits", digits_dir, validation=0.001)


def test_any_dataset_on_disk_is_read_by_the_same_path(tmp_path):
    train, test = random_images(40), random_images(12, seed=1)
    write_dataset(tmp_path, "tiny_cifar", {"train": train, "test": test})
    data = input_pipeline.load("tiny_cifar", tmp_path)
    assert as_set(data.train_x, data.train_y) == as_set(*train)
    assert as_set(data.eval_x, data.eval_y) == as_set(*test)
    assert data.class_names == ("cat", "dog", "frog")
    assert data.centre == 127.5


def test_a_validation_split_stands_in_for_a_missing_test_split(tmp_path):
    held_out = random_images(12, seed=1)
    write_dataset(tmp_path, "tiny_imagenet", {"train": random_images(9), "validation": held_out})
    data = input_pipeline.load("tiny_imagenet", tmp_path)
    assert as_set(data.eval_x, data.eval_y) == as_set(*held_out)


def test_no_split_to_measure_on(tmp_path):
    write_dataset(tmp_path, "tiny_train_only", {"train": random_images(9)})
    with pytest.raises(UserError, match="no 'validation' split.*--validation"):
        input_pipeline.load("tiny_train_only", tmp_path)


@pytest.mark.parametrize("name", ["no_such_dataset", "", "../etc", "a b", "mnist:99.0.0"])
def test_unknown_dataset_lists_the_known_ones(name, tmp_path):
    with pytest.raises(UserError, match="digits, mnist.*any other image classification") as error:
        input_pipeline.load(name, tmp_path)
    assert repr(name) in str(error.value)


def test_unprepared_dataset_is_not_downloaded_unasked(tmp_path):
    with pytest.raises(UserError, match="mnist.*not prepared.*--download.*tfds build") as error:
        input_pipeline.load("mnist", tmp_path)
    assert str(tmp_path) in str(error.value)
    assert not any(tmp_path.iterdir())


def test_failed_download_says_why_and_where(tmp_path, monkeypatch):
    def fail(builder):
        del builder
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", fail)
    with pytest.raises(UserError, match="could not be prepared.*Name or service") as error:
        input_pipeline.load("mnist", tmp_path, download=True)
    assert str(tmp_path) in str(error.value)


def test_data_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "data"
    with pytest.raises(UserError) as error:
        input_pipeline.load("digits", folder)
    assert str(folder) in str(error.value)


def test_labels_out_of_range(tmp_path):
    images, labels = random_images(9)
    labels[4] = -1
    write_dataset(tmp_path, "tiny_unlabelled", {"train": (images, labels)})
    with pytest.raises(UserError, match=r"must lie in \[0, 3\).*from -1"):
        input_pipeline.load("tiny_unlabelled", tmp_path, validation=0.3)


@pytest.mark.parametrize(
    ("feature", "shape", "dtype"),
    [
        (tfds.features.Tensor(shape=(32, 32), dtype=np.uint8), (32, 32), "uint8"),
        (tfds.features.Tensor(shape=(32, 32, 3), dtype=np.float32), (32, 32, 3), "float32"),
        (tfds.features.Image(shape=(None, None, 3)), (32, 32, 3), "uint8"),
    ],
)
def test_images_that_are_not_uint8_of_one_shape(feature, shape, dtype, tmp_path):
    images, labels = random_images(5, shape)
    splits = {"train": (images.astype(dtype), labels)}
    write_dataset(tmp_path, "tiny_odd", splits, image=feature)
    with pytest.raises(UserError, match="must be uint8, all of one shape"):
        input_pipeline.load("tiny_odd", tmp_path)


def test_labels_that_are_not_classes(tmp_path):
    feature = tfds.features.Scalar(dtype=np.int64)
    write_dataset(tmp_path, "tiny_regression", {"train": random_images(5)}, label=feature)
    with pytest.raises(UserError, match="not class labels"):
        input_pipeline.load("tiny_regression", tmp_path)
