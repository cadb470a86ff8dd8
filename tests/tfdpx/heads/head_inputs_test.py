"""Inputs of heads: refused by name before anything is released, or harmless."""

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from head_cases import CLASSES, FIRST, WIDTH, data, make

from tfdpx.heads import AdaMix, FeatureCovariance, FirstOrder, LeastSquares, Newton
from tfdpx.heads.releases import Releases

PRIVATE_ALONE = [name for name in FIRST if name != "adamix"]
COUNT = 90
X, Y = data(COUNT)


def dataset(*arrays, batch=7):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch)


def generated(function):
    signature = tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(function, output_signature=signature)


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (X, None, "`labels` is required"),
        (X, Y.astype("float32"), "must hold integers.*astype"),
        (X, np.where(np.arange(COUNT) == 80, 4, Y), r"must lie in \[0, 4\).*to 4"),
        (X, Y - 1, "labels from -1"),
        (X, np.eye(CLASSES)[Y] * 1.5, r"must hold numbers in \[0, 1\].*float64"),
        (X, np.full([COUNT, CLASSES], np.nan), r"must hold numbers in \[0, 1\]"),
        (X, np.float32(1), "must have the same length"),
        (X[:0], Y[:0], "takes 1 to .* examples.*Received: 0"),
        (X[:, :0], Y, "positive width"),
        (X[0], Y, "must have the shape"),
        (dataset(X, Y), Y, "`labels` must be left out"),
        (dataset(X), None, "batches .features, labels."),
        (dataset(X, Y, Y), None, "accepts no sample weights"),
        (tf.data.Dataset.from_tensor_slices((X, Y)), None, r"shape \[n, d\]"),
        (dataset({"x": X}, Y), None, "dense tensors"),
        (dataset(X, Y).take(0), None, "takes 1 to"),
        (dataset(X, Y).repeat().take(20).prefetch(1), None, "repeat"),
        (tf.data.Dataset.zip(dataset(X).repeat(2), dataset(Y)), None, "repeat"),
    ],
)
def test_unfit_data_are_refused_before_anything_is_released(features, labels, message):
    for name in ("least squares", "covariance"):
        head = make(name)
        with pytest.raises(ValueError, match=message):
            head.fit(features, labels)
        assert head.kernel is None and head.ledger.steps == 0


@pytest.mark.parametrize("name", PRIVATE_ALONE)
def test_a_dataset_is_read_once_and_must_end(name, monkeypatch):
    calls = []

    def generate():
        for _ in range(100 if endless else 1):
            calls.append(1)
            yield X, Y

    endless = False
    head = make(name, seed=1).fit(generated(generate))
    assert len(calls) == 1
    np.testing.assert_array_equal(head.kernel, make(name, seed=1).fit(X, Y).kernel)
    endless = True
    monkeypatch.setattr("tfdpx.heads.features.MOST_EXAMPLES", 1000)
    with pytest.raises(ValueError, match="takes 1 to 1000 examples"):
        make(name).fit(generated(generate))
    assert len(calls) < 50


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIVATE_ALONE)
def test_harmless_oddities(name):
    x = X.astype("float64")
    x[3], x[4, 0], x[5, 1] = np.nan, np.inf, 1e300
    for features, labels in (
        (x, Y.astype("uint8")),
        (x.tolist(), Y.tolist()),
        (X, Y[:, None]),
        (X, np.zeros(COUNT, int)),  # Only one class.
        (X, np.ones([COUNT, CLASSES])),  # More positives than `max_positives`.
        (X, np.zeros([COUNT, CLASSES])),
        (X[:1], Y[:1]),
        (np.zeros_like(X), Y),
        ((100 * X).astype("int8"), Y),
        (X[:, :1], Y),
    ):
        head = make(name).fit(features, labels)
        assert np.isfinite(head.kernel).all() and np.isfinite(head.bias).all()
        assert 0.99 < head.epsilon_spent() <= 1.0
    # The last batch is shorter.
    assert make(name).fit(dataset(X, Y, batch=64)).epsilon_spent() <= 1.0


@pytest.mark.parametrize(("method", "last", "releases"), [("_noise", 2, 2), ("ledger", 1, 4)])
def test_an_interrupted_fit_pays_for_what_was_released(monkeypatch, method, last, releases):
    """If it is interrupted as it ends, it pays for all that was planned."""
    original, calls = getattr(Releases, method), itertools.count(1)

    def interrupt(*arguments):
        if next(calls) == last:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(Releases, method, interrupt)
    head = make("covariance")
    with pytest.raises(KeyboardInterrupt):
        head.fit(X, Y)
    assert head.ledger.steps == releases and 0 < head.epsilon_spent() <= 1 and head.kernel is None


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (LeastSquares, {"epsilon": None}, "Exactly one of `epsilon` and `noise_multiplier`"),
        (LeastSquares, {"noise_multiplier": 1.0}, "Exactly one of"),
        (LeastSquares, {"epsilon": 0}, "`epsilon` must be a positive number. Received: epsilon=0"),
        (LeastSquares, {"delta": 1}, "`delta` must lie"),
        (LeastSquares, {"num_classes": 1}, "integer >= 2. Received: num_classes=1. For a binary"),
        (LeastSquares, {"l2_norm_clip": 0}, "`l2_norm_clip` must be a number >="),
        (LeastSquares, {"l2_norm_clip": math.inf}, "must be finite"),
        (LeastSquares, {"max_positives": 4}, "not exceed num_classes=3"),
        (LeastSquares, {"accountant": "best"}, "`accountant` must be one of"),
        (LeastSquares, {"seed": 1.5}, "`seed` must be an int or None"),
        (LeastSquares, {"l2_regularization": -1}, "`l2_regularization` must be a finite number"),
        (FeatureCovariance, {"feature_norm_clip": math.inf}, "`feature_norm_clip` must be finite"),
        (FeatureCovariance, {"initial_bias": math.inf}, "`initial_bias` must be a finite"),
        (FeatureCovariance, {"steps": 0}, "`steps` must be a positive integer"),
        (FeatureCovariance, {"covariance_share": 1}, "strictly between 0 and 1"),
        (FeatureCovariance, {"start": "best"}, "`start` must be one of"),
        (FirstOrder, {"optimizer": "lion"}, "`optimizer` must be one of"),
        (FirstOrder, {"average": 1}, "`average` must be True or False"),
        (Newton, {"learning_rate": 0}, "`learning_rate` must be a positive"),
        (AdaMix, {"steps": 3}, "Exactly one of `epsilon` and `steps`"),
        (AdaMix, {"epsilon": math.inf}, "`epsilon` must be a positive, finite"),
        (AdaMix, {"noise_multiplier": 0.0}, "`noise_multiplier` must be a positive"),
        (AdaMix, {"quantile": 90}, "`quantile` must lie in"),
        (AdaMix, {"projection": 0}, "`projection`"),
        (AdaMix, {"decay_to": "end"}, "`decay_to` must be one of"),
        (AdaMix, {"l2_norm_clip": math.inf}, "must be finite"),
        (AdaMix, {"initial_weights": np.ones(3)}, "`initial_weights`"),
        (AdaMix, {"l2_regularization": 0.0}, "`l2_regularization`"),
    ],
)
def test_unfit_arguments_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"num_classes": 3, "epsilon": 1.0, **arguments})


def test_evaluate_needs_labels_and_predict_none():
    head = make("least squares")
    with pytest.raises(ValueError, match="call `fit` first"):
        head.predict(X)
    head.fit(X, Y)
    scores = head.predict(X)
    right = np.mean(scores.argmax(1) == Y)
    assert head.evaluate(X, Y) == head.evaluate(dataset(X, Y)) == {"accuracy": right}
    assert head.evaluate(X, 0.8 * np.eye(CLASSES)[Y])["accuracy"] == pytest.approx(0.8 * right)
    np.testing.assert_allclose(head.predict(dataset(X).map(lambda x: x)), scores, rtol=1e-5)
    with pytest.raises(ValueError, match="`labels` is required"):
        head.evaluate(X)
    with pytest.raises(ValueError, match="features.* have a width of 6"):
        head.predict(X[:, :3])
