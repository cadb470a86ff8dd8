"""Small data sets on disk in the files of TensorFlow Datasets, which is all that readers need."""

import numpy as np
import tensorflow_datasets as tfds


def write(folder, name, splits, image=None, label=None, file_format="tfrecord"):
    """Writes a data set `name`.

    Args:
        folder: The data_dir.
        name: String.
        splits: Dict from split to a pair (images, labels).
        image: Feature of the images; 32 x 32 x 3 if left out.
        label: Feature of the labels; three classes if left out.
        file_format: String, a file format of TensorFlow Datasets.
    """

    class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
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

    Tiny.name = name
    Tiny(data_dir=folder, file_format=file_format).download_and_prepare()


def random_images(count, shape=(32, 32, 3), seed=0):
    """Returns random noise of `shape` and labels of three classes."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (count, *shape)).astype("uint8")
    return images, generator.integers(0, 3, count)
