"""Measures a trained model: accuracy, top-1 and top-5, of its averaged and of its raw weights."""

import dataclasses

import keras
import numpy as np

from tfdpx.heads.releases import Releases
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples
from tfdpx.train.data import tfds
from tfdpx.training.callbacks import steps_taken

BATCH_SIZE = 500
TOP = 5


@dataclasses.dataclass(frozen=True)
class Measured:
    """Predictions of a model for the examples to measure on, and their accuracy.

    Attributes:
        labels: int64 array `[count]`.
        predictions: int64 array `[count]`, the class of the largest logit.
        accuracy: Float, share of examples whose label has the largest logit.
        top5_accuracy: Float, share whose label is among the five; None with five classes or fewer.
    """

    labels: np.ndarray
    predictions: np.ndarray
    accuracy: float
    top5_accuracy: float | None


def is_public(data, public_test):
    """Returns whether the examples to measure on are public test images.

    Images that were held out of the training images are as private as these.

    Args:
        data: `images.ImageData`. The test images of the data sets in `tfds.ENTRIES` are
            public.
        public_test: Bool, the flag `--public_test`: the user declares that they are public.
    """
    public_test = public_test or tfds.Name.parse(data.name).entry in tfds.ENTRIES
    return data.eval_split == "test" and public_test


def batches(data):
    """Returns the examples to measure on as a `tf.data.Dataset` of batches, in their order.

    Args:
        data: `images.ImageData`.
    """
    return sampled_batches.in_order(as_examples(*data.eval_examples), BATCH_SIZE)


def measure(model, data):
    """Returns the `Measured` of a model on the examples of `data` to measure on.

    Args:
        model: A `keras.Model` from images to logits.
        data: `images.ImageData`.
    """
    labels, predictions, within = [], [], []
    for logits, y in predicted(model, data.eval_examples):
        labels.append(y)
        predictions.append(np.argmax(logits, axis=-1))
        if data.num_classes > TOP:
            within.append(keras.metrics.sparse_top_k_categorical_accuracy(y, logits, k=TOP))
    labels, predictions = np.concatenate(labels), np.concatenate(predictions)
    return Measured(
        labels=labels,
        predictions=predictions,
        accuracy=float(np.mean(labels == predictions)),
        top5_accuracy=float(np.mean(np.concatenate(within), dtype="float64")) if within else None,
    )


def predicted(model, examples):
    """Yields the logits of examples, batch by batch, in their order.

    Args:
        model: A `keras.Model` from images to logits.
        examples: Tuple of the arguments of `tfdpx.sampling.examples.as_examples`.

    Yields:
        Pairs of float32 logits `[rows, classes]` and int64 labels `[rows]`.
    """
    for x, y, _ in sampled_batches.in_order(as_examples(*examples), BATCH_SIZE):
        yield np.asarray(model.predict_on_batch(x), "float32"), np.reshape(y, [-1])


def noisy_count(right, noise_multiplier):
    """Returns `right` with Gaussian noise, a float.

    Guarantee: one Gaussian release; adding or removing one example changes the count by at most 1.

    Args:
        right: Number of examples that the model classifies correctly; rounded to a whole one.
        noise_multiplier: Float, standard deviation of the noise.
    """
    released = Releases({"right": (noise_multiplier, 1)})
    return float(released.gaussian("right", np.array([round(right)], "float64"), 1.0)[0])


class RawWeights(keras.callbacks.Callback):
    """Keeps the weights of the last update, over which Keras then writes their average.

    Args:
        steps: Int, updates of the whole training.

    Attributes:
        values: List of arrays as of `model.get_weights()`; None before the end.
    """

    def __init__(self, steps):
        super().__init__()
        self._steps = steps
        self.values = None

    def on_train_begin(self, logs=None):
        """Keeps them if the run was resumed after its last update, because no other follows."""
        self.on_epoch_end(None, logs)

    def on_epoch_end(self, epoch, logs=None):
        """Must be called before Keras averages the weights, as it is after Keras's epochs."""
        del epoch, logs
        if steps_taken(self.model.optimizer) >= self._steps:
            self.values = self.model.get_weights()
