"""Accuracies against scikit-learn's; raw weights against what the optimizer left."""

import types

import numpy as np
import pytest
from sklearn import metrics

import tfdpx
from tfdpx.train.run import evaluation


class Table:
    """A model whose logits are looked up by the value of the input."""

    def __init__(self, logits):
        self.logits = logits

    def predict_on_batch(self, x):
        return self.logits[np.asarray(x)[:, 0].astype(int)]


def data(labels, num_classes, on_disk=False):
    x = np.arange(len(labels), dtype="float32")[:, None]
    examples = (x, labels)
    if on_disk:
        examples = (tfdpx.RandomAccess(list(zip(x, labels, strict=True))),)
    return types.SimpleNamespace(eval_examples=examples, num_classes=num_classes)


@pytest.mark.parametrize("on_disk", [False, True])
def test_accuracies_are_those_of_scikit_learn(on_disk):
    generator = np.random.default_rng(0)
    count = evaluation.BATCH_SIZE + 7
    logits, labels = generator.normal(size=(count, 12)), generator.integers(0, 12, count)
    measured = evaluation.measure(Table(logits), data(labels, 12, on_disk))
    assert measured.accuracy == metrics.accuracy_score(labels, logits.argmax(axis=1))
    expected = metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(12))
    assert measured.top5_accuracy == pytest.approx(expected)
    np.testing.assert_array_equal(measured.labels, labels)
    np.testing.assert_array_equal(measured.predictions, logits.argmax(axis=1))


def test_five_classes_have_no_top_five_and_nan_is_never_right():
    labels = np.array([1, 0, 2])
    assert evaluation.measure(Table(np.eye(5)[:3]), data(labels, 5)).top5_accuracy is None
    measured = evaluation.measure(Table(np.full((3, 9), np.nan)), data(labels + 1, 9))
    assert measured.top5_accuracy == measured.accuracy == 0
