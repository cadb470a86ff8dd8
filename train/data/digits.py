"""The digits of scikit-learn as a TensorFlow dataset, made on the spot without a network."""

import numpy as np
import tensorflow_datasets as tfds
from sklearn import datasets, model_selection

# Pixels hold 0..16. Times 15 they span 0..240: whole numbers, so that PNG files keep them exactly.
PIXEL_SCALE = 15
TEST_EXAMPLES = 360


class SklearnDigits(tfds.core.GeneratorBasedBuilder):
    """1,797 handwritten digits, 8x8 pixels with 17 grey levels, 10 classes.

    Images are `[8, 8, 1]` uint8 and hold the pixel values of `sklearn.datasets.load_digits` times
    15, so that dividing by 15 gives them back exactly. The splits `"train"` (1,437 examples) and
    `"test"` (360) are those of `train_test_split(test_size=360, stratify=y, random_state=0)`.

    Importing this module is enough for `tfds.builder("sklearn_digits")` to find it.
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of scikit-learn, 8x8 pixels, stored as value * 15.",
            homepage="https://doi.org/10.24432/C50P49",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager):
        del dl_manager  # scikit-learn carries the data.
        digits = datasets.load_digits()
        train, test = model_selection.train_test_split(
            np.arange(len(digits.target)),
            test_size=TEST_EXAMPLES,
            stratify=digits.target,
            random_state=0,
        )
        return {
            "train": self._generate_examples(digits, train),
            "test": self._generate_examples(digits, test),
        }

    def _generate_examples(self, digits, indices):
        for index in indices:
            image = (digits.images[index] * PIXEL_SCALE).astype(np.uint8)
            yield int(index), {"image": image[..., None], "label": int(digits.target[index])}
