"""A small folder of features like that of `classify --head`, from a Gaussian mixture."""

import keras

from experiments.heads.compare import mixture
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train.heads import FeatureFolder
from tfdpx.train.start_from import not_private

NUM_CLASSES, DIMENSION = 3, 12


def make(path):
    """Makes a `FeatureFolder` of 600 examples to train on and 200 to test on."""
    record = Record(
        "classify",
        DatasetId("mixture"),
        not_private(),
        None,
        settings={"num_classes": NUM_CLASSES},
        inputs={"class_names": ["a", "b", "c"]},
    )
    folder = FeatureFolder(path, record)
    folder.extractor = keras.Sequential(
        [keras.Input([DIMENSION]), keras.layers.UnitNormalization()]
    )
    for split, seed, count in (("train", 0, 600), ("test", 1, 200)):
        x, y = mixture(count, DIMENSION, NUM_CLASSES, seed=seed, separation=3.0)
        folder.extract(split, x, y)
    folder.extractor = None
    return folder
