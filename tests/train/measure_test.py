"""Accuracies against scikit-learn's, of examples in memory and on disk."""

import types

import numpy as np
import pytest
from sklearn import metrics

import tfdpx
from tfdpx.train import measure


def measured(logits, labels, on_disk=False):
    """The accuracies of a model that looks its logits up by the value of the input."""
    x = np.arange(len(labels), dtype="float32")[:, None]
    examples = (tfdpx.RandomAccess(list(zip(x, labels, strict=True))),) if on_disk else (x, labels)
    data = types.SimpleNamespace(eval_examples=examples, num_classes=logits.shape[1])
    look_up = types.SimpleNamespace(
        predict_on_batch=lambda x: logits[np.asarray(x)[:, 0].astype(int)]
    )
    return measure.measure(look_up, data)


@pytest.mark.parametrize("on_disk", [False, True])
def test_accuracies_are_those_of_scikit_learn(on_disk):
    generator, count = np.random.default_rng(0), measure.BATCH_SIZE + 7
    logits, labels = generator.normal(size=(count, 12)), generator.integers(0, 12, count)
    result = measured(logits, labels, on_disk)
    assert result.accuracy == metrics.accuracy_score(labels, logits.argmax(axis=1))
    expected = metrics.top_k_accuracy_score(labels, logits, k=5, labels=range(12))
    assert result.top5_accuracy == pytest.approx(expected)
    np.testing.assert_array_equal(result.labels, labels)
    np.testing.assert_array_equal(result.predictions, logits.argmax(axis=1))


def test_five_classes_have_no_top_five_and_nan_is_never_right():
    assert measured(np.eye(5)[:3], np.array([1, 0, 2])).top5_accuracy is None
    result = measured(np.full((3, 9), np.nan), np.array([2, 1, 3]))
    assert result.top5_accuracy == result.accuracy == 0
