"""Entries agree with TensorFlow Datasets in shape and classes, and names are read correctly."""

import pytest
import tensorflow_datasets

from tfdpx.train.data import tfds


@pytest.mark.parametrize("entry", tfds.ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_what_tensorflow_datasets_says(entry, tmp_path):
    source = tfds.read_digits()
    if entry.source != tfds.DIGITS:
        builder = tensorflow_datasets.builder(entry.source, data_dir=tmp_path)
        source = tfds.described_by(builder, entry.source)
    assert (source.shape, len(source.class_names)) == (entry.image_shape, entry.num_classes)
    assert entry.train_images > 1000
    for levels in (entry.centre, entry.deviation):
        assert isinstance(levels, float) or len(levels) == entry.image_shape[2]
    assert tfds.find(entry.name) is tfds.find(entry.source) is entry
    assert tfds.Name.parse(f"{entry.name}:0-1").entry is entry


def test_a_set_without_an_entry_is_mapped_to_plus_minus_one():
    entry = tfds.Name.parse("tiny_cifar").entry
    assert (entry.source, entry.centre, entry.deviation) == ("tiny_cifar", 127.5, 127.5)
    assert entry.train_images is None and tfds.find("digits:0-4") is None
