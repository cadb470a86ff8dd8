"""Entries agree with TensorFlow Datasets in shape and classes; names are read as they are meant."""

import pytest
import tensorflow_datasets as tfds

from tfdpx.train.data import builders, datasets


@pytest.mark.parametrize("entry", datasets.ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_says_what_tensorflow_datasets_says(entry, tmp_path):
    found = builders.features(tfds.builder(entry.source, data_dir=tmp_path), entry.source)
    assert (found.shape, len(found.class_names)) == (entry.image_shape, entry.num_classes)
    assert entry.train_images > 1000
    for levels in (entry.centre, entry.deviation):
        assert isinstance(levels, float) or len(levels) == entry.image_shape[2]


def test_names_and_sources_find_the_same_entry():
    for entry in datasets.ENTRIES:
        assert datasets.find(entry.name) is datasets.find(entry.source) is entry
        assert datasets.Name.parse(f"{entry.name}:0-1").entry is entry
    assert datasets.find("digits:0-4") is None


def test_a_set_without_an_entry_is_mapped_to_plus_minus_one():
    entry = datasets.Name.parse("tiny_cifar").entry
    assert (entry.source, entry.centre, entry.deviation) == ("tiny_cifar", 127.5, 127.5)
    assert entry.train_images is None and not entry.made_here
