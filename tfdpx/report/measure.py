"""Measures trained models: computes metrics, and warnings about them."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from scipy import special, stats
from sklearn import metrics

from tfdpx.accounting import record as records
from tfdpx.heads.releases import Releases
from tfdpx.report import words
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples

# Probabilities are clipped to these limits, so log-odds are finite.
_LEAST_PROBABILITY, _LARGEST_PROBABILITY = 1e-30, 1 - 2.0**-24
BATCH_SIZE = 500
TOP = 5
THRESHOLD = 0.5
_MOST_NAMES = 5


@dataclasses.dataclass(frozen=True)
class Measured:
    """The outputs of a model for evaluation examples, and the metrics of these outputs.

    Attributes:
        targets: Array `[count]`: integer labels, or the values of a regression.
        outputs: float32 array: logits `[count, classes]`, or predicted values `[count]`.
        class_names: Names of the classes; empty for a regression.
        threshold: Float, see `predicted_classes`.
        split: "test" or "validation", the first word of the metrics' names.
        is_public: Bool, whether the examples are public.
    """

    targets: np.ndarray
    outputs: np.ndarray
    class_names: tuple = ()
    threshold: float = THRESHOLD
    split: str = "test"
    is_public: bool = False

    @property
    def predictions(self):
        """The predicted classes or values, an array `[count]`."""
        if not len(self.class_names):
            return self.outputs
        return predicted_classes(self.outputs, self.threshold)

    @property
    def margins(self):
        """For two classes, the log-odds of the second class, a float64 array `[count]`."""
        return np.diff(self.outputs.astype("float64"))[:, 0]

    @property
    def positive(self):
        """For two classes, the probability of the second class, a float64 array `[count]`."""
        return special.expit(self.margins)

    @property
    def top5_accuracy(self):
        """The share of examples with their label among the five largest outputs.

        None if there are at most five classes.
        """
        if len(self.class_names) <= TOP or not len(self.targets):
            return None
        pair = self.targets, self.outputs
        within = keras.metrics.sparse_top_k_categorical_accuracy(*pair, k=TOP)
        return float(np.mean(within, dtype="float64"))

    def results(self):
        """Returns a dict of the metrics, for a record. A metric that is undefined is None."""
        scores = {"accuracy": None} if len(self.class_names) else {"r2": None}
        if len(self.targets):
            scores = self._of_classes() if len(self.class_names) else self._of_values()
        results = {f"{self.split}_{name}": score for name, score in scores.items()}
        results |= {"top5_accuracy": self.top5_accuracy, "warnings": self.warnings()}
        if len(self.class_names) == 2:
            results["threshold"] = self.threshold
        results |= {"measured_on": self.split, "num_measured": len(self.targets)}
        exact = None if self.is_public else words.NOT_PROTECTED
        return records.plain(results | {"not_protected": exact})

    def warnings(self):
        """Returns a list with a warning if the model never predicts some of the classes."""
        names, predicted = np.array(self.class_names, str), np.unique(self.predictions)
        missing = np.setdiff1d(self.targets, predicted) if len(names) else ()
        if not len(missing):
            return []
        shown = names[predicted], names[missing[:_MOST_NAMES]]
        return words.listed("never_predicted", *shown, len(missing) - _MOST_NAMES, len(names))

    def _of_values(self):
        pair = self.targets, self.outputs
        if not np.isfinite(self.outputs).all():
            return {"r2": None, "mean_absolute_error": None}
        r2 = metrics.r2_score(*pair) if len(self.targets) > 1 else None
        return {"r2": r2, "mean_absolute_error": metrics.mean_absolute_error(*pair)}

    def _of_classes(self):
        labels, predictions = self.targets, self.predictions
        counts, pair = np.bincount(labels), (labels, predictions)
        right = stats.binomtest(int(np.sum(labels == predictions)), len(labels))
        scores = {
            "accuracy": metrics.accuracy_score(*pair),
            "accuracy_interval": list(right.proportion_ci(method="wilson")),
            "base_rate": counts.max() / len(labels),
            "most_frequent_class": str(self.class_names[counts.argmax()]),
        }
        shown = dict(labels=range(len(self.class_names)), zero_division=np.nan)
        precision, recall, f1, _ = metrics.precision_recall_fscore_support(*pair, **shown)
        if len(self.class_names) != 2:
            by_class = dict(zip(map(str, self.class_names), recall, strict=True))
            return scores | {"macro_f1": np.nanmean(f1), "recall_by_class": by_class}
        is_ranked = np.isfinite(self.margins).all() and len(np.unique(labels)) == 2
        rankings = {"auc": metrics.roc_auc_score}
        rankings["average_precision"] = metrics.average_precision_score
        scores |= {
            n: rank(labels, self.margins) if is_ranked else None for n, rank in rankings.items()
        }
        scores |= {"f1": f1[1], "precision": precision[1], "recall": recall[1]}
        scores["positive_class"] = str(self.class_names[1])
        return scores | {"mean_probability": np.mean(self.positive)}


def probabilities(logits):
    """Converts logits to probabilities of classes, float64 `[rows, classes]`."""
    return special.softmax(np.asarray(logits, "float64"), axis=1)


def predicted_classes(logits, threshold=THRESHOLD):
    """Returns the predicted classes, an integer array `[rows]`.

    Args:
        logits: Float array `[rows, classes]`.
        threshold: Float in (0, 1). With two classes, the second is predicted if its probability is
            at least the threshold. With more classes, the class with the largest logit is
            predicted.
    """
    if logits.shape[1] == 2:
        return (probabilities(logits)[:, 1] >= threshold).astype("int64")
    return logits.argmax(axis=1)


def batches(data):
    """Returns the evaluation examples as a `tf.data.Dataset` of batches, in order.

    Args:
        data: `images.ImageData`.
    """
    return sampled_batches.in_order(as_examples(*data.eval_examples), BATCH_SIZE)


def measure(model, data, is_public=False, threshold=THRESHOLD):
    """Measures a model on `data.eval_examples`, and returns a `Measured`.

    Args:
        model: A `keras.Model` from images to logits.
        data: `images.ImageData`.
        is_public: Bool, whether the examples are public.
        threshold: Float, see `predicted_classes`.
    """
    pairs = zip(*predicted(model, data.eval_examples), strict=True)
    logits, labels = map(np.concatenate, pairs)
    about = dict(split=data.eval_split, is_public=is_public)
    return Measured(labels, logits, data.class_names, threshold, **about)


def predicted(model, examples):
    """Yields the logits of examples, batch by batch, in order.

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

    Guarantee: the result is one Gaussian release with `noise_multiplier`. Adding or removing one
    example changes the count by at most 1.

    Args:
        right: Number of examples that the model classifies correctly. It is rounded before noise is
            added.
        noise_multiplier: Float, the standard deviation of the noise.
    """
    released = Releases({"right": (noise_multiplier, 1)})
    return float(released.gaussian("right", np.array([round(right)], "float64"), 1.0)[0])


def measure_keras(model, test):
    """Measures any Keras model on test examples.

    Args:
        model: A `keras.Model`.
        test: Arrays `(x, y)`, or a `tf.data.Dataset` of batches of pairs.

    Returns:
        A pair. First, `Measured`, or None if the model predicts neither classes nor one number.
        Second, a dict of the results for a record.

    Raises:
        ValueError: If `test` is neither a pair nor a data set.
    """
    is_pair = isinstance(test, tuple) and len(test) == 2
    if not is_pair and not isinstance(test, tf.data.Dataset):
        raise ValueError(
            "Argument `test` must be a pair (x, y) or a tf.data.Dataset of batches of pairs. "
            f"Received: a {type(test).__name__}."
        )
    batches = sampled_batches.in_order(as_examples(*test), BATCH_SIZE) if is_pair else test
    outputs, labels = [], []
    for x, y, _ in map(keras.utils.unpack_x_y_sample_weight, batches):
        parts = model.predict(x, batch_size=BATCH_SIZE, verbose=0), y
        if any(tf.nest.is_nested(part) or len(part.shape) > 2 for part in parts):
            return None, _evaluate(model, test if is_pair else (test,))
        outputs.append(np.asarray(parts[0], "float32").reshape(len(y), -1))
        labels.append(np.asarray(y).reshape(len(y), -1))
    targets, values = np.concatenate(labels), np.concatenate(outputs)
    classes = _class_indices(targets, values.shape[1])
    if classes is not None:
        logits = _logits(values, model.loss if model.compiled else None)
        measured = Measured(classes, logits, tuple(map(str, range(logits.shape[1]))))
    elif targets.shape[1] == values.shape[1] == 1 and targets.dtype.kind in "fiu":
        measured = Measured(targets[:, 0], values[:, 0])
    else:
        return None, _evaluate(model, test if is_pair else (test,))
    return measured, measured.results()


def _class_indices(targets, num_outputs):
    """Returns the labels, integers [n], of targets [n, 1] or one-hot targets [n, classes].

    Returns None if the targets are not classes.
    """
    if targets.dtype.kind not in "biuf":
        return None
    if targets.shape[1] == num_outputs > 1:
        is_one_hot = np.isin(targets, (0, 1)).all() and (targets.sum(axis=1) == 1).all()
        return targets.argmax(axis=1) if is_one_hot else None
    if targets.shape[1] > 1 or not np.isin(targets, range(max(num_outputs, 2))).all():
        return None
    return targets[:, 0].astype("int64")


def _logits(outputs, loss):
    """Converts a model's outputs to logits [n, classes]. The outputs are logits or probabilities.

    A single column of outputs belongs to class 1 of the two classes 0 and 1.
    """
    if outputs.shape[1] > 1:
        is_sure = (outputs >= 0).all() and np.allclose(outputs.sum(axis=1), 1, atol=1e-2)
        return np.log(np.maximum(outputs, _LEAST_PROBABILITY)) if is_sure else outputs
    if not getattr(loss, "from_logits", ((outputs < 0) | (outputs > 1)).any()):
        shares = np.clip(outputs.astype("float64"), _LEAST_PROBABILITY, _LARGEST_PROBABILITY)
        outputs = special.logit(shares)
    return np.concatenate([np.zeros_like(outputs), outputs], axis=1)


def _evaluate(model, test):
    """Computes the metrics that `compile` sets, and returns a dict of results for a record."""
    scores = model.evaluate(*test, return_dict=True, verbose=0) if model.compiled else {}
    results = {f"test_{name}": float(score) for name, score in scores.items()}
    return records.plain(results | {"measured_on": "test", "not_protected": words.NOT_PROTECTED})
