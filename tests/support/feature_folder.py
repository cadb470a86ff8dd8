"""A small folder of features as `tfdpx.train.features` leaves one, of a Gaussian mixture."""

from experiments.heads.compare import mixture
from tfdpx.accounting.record import Data, Record
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.run import provenance

NUM_CLASSES, DIMENSION = 3, 12


def record_of(settings):
    """What an extraction writes down."""
    return Record("features", Data("mixture"), provenance.not_private(), None, settings=settings)


def make(path):
    """A `FeatureFolder` of 600 examples to train on and 200 to test on."""
    made = FeatureFolder(path, record_of({"num_classes": NUM_CLASSES}))
    for split, seed, count in (("train", 0, 600), ("test", 1, 200)):
        x, y = mixture(count, DIMENSION, NUM_CLASSES, seed=seed, separation=3.0)
        made.write(split, 0, x, y, x)
    return made
