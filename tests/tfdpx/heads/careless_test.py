"""What careless users give to heads: refused by name before anything is released, or harmless."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx.heads import FeatureCovariance, FirstOrder, LeastSquares, Newton
from tfdpx.heads.releases import Releases

CLASSES, WIDTH, COUNT = 3, 4, 90
KINDS = {
    "ls": lambda **kwargs: LeastSquares(CLASSES, 1.0, **kwargs),
    "fc": lambda **kwargs: FeatureCovariance(CLASSES, 1.0, steps=2, **kwargs),
    "newton": lambda **kwargs: Newton(CLASSES, 1.0, steps=2, **kwargs),
    "first": lambda **kwargs: FirstOrder(CLASSES, 1.0, steps=2, **kwargs),
}


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(COUNT, WIDTH)).astype("float32")
    return x, rng.integers(0, CLASSES, COUNT)


def dataset(*arrays, batch=7):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch)


def generated(function):
    signature = tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64)
    return tf.data.Dataset.from_generator(function, output_signature=signature)


X, Y = data()


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (X, None, "`labels` must be given"),
        (X, Y.astype("float32"), "must hold integers.*astype"),
        (X, np.where(np.arange(COUNT) == 80, 3, Y), r"must lie in \[0, 3\).*to 3"),
        (X, Y - 1, "labels from -1"),
        (X, np.eye(CLASSES)[Y] * 0.9, "zeros and ones"),
        (X, np.float32(1), "as many examples"),
        (X[:0], Y[:0], "takes 1 to .* examples.*Received: 0"),
        (X[:, :0], Y, "positive width"),
        (X[0], Y, "must have the shape"),
        (dataset(X, Y), Y, "`labels` must be left out"),
        (dataset(X), None, "batches .features, labels."),
        (dataset(X, Y, Y), None, "takes no sample weights"),
        (tf.data.Dataset.from_tensor_slices((X, Y)), None, r"shape \[n, d\]"),
        (dataset({"x": X}, Y), None, "dense tensors"),
        (dataset(X, Y).take(0), None, "takes 1 to"),
        (dataset(X, Y).repeat(2), None, "repeat"),
        (dataset(X, Y).repeat().take(20).prefetch(1), None, "repeat"),
        (tf.data.Dataset.zip(dataset(X).repeat(2), dataset(Y)), None, "repeat"),
    ],
)
def test_unfit_data_are_refused_before_anything_is_released(features, labels, message):
    for kind in ("ls", "fc"):
        head = KINDS[kind]()
        with pytest.raises(ValueError, match=message):
            head.fit(features, labels)
        assert head.kernel is None and head.ledger.steps == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_is_read_once(kind):
    calls = []

    def generate():
        calls.append(1)
        yield X, Y

    head = KINDS[kind](seed=1).fit(generated(generate))
    assert len(calls) == 1
    np.testing.assert_array_equal(head.kernel, KINDS[kind](seed=1).fit(X, Y).kernel)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_harmless_oddities(kind):
    x = X.astype("float64")
    x[3], x[4, 0], x[5, 1] = np.nan, np.inf, 1e300
    for features, labels in (
        (x, Y.astype("uint8")),
        (x.tolist(), Y.tolist()),
        (X, Y[:, None]),
        (X, np.zeros(COUNT, int)),  # One class alone.
        (X, np.ones([COUNT, CLASSES])),  # More positives than `max_positives`.
        (X, np.zeros([COUNT, CLASSES])),
        (X[:1], Y[:1]),
        (np.zeros_like(X), Y),
        ((100 * X).astype("int8"), Y),
        (X[:, :1], Y),
    ):
        head = KINDS[kind]().fit(features, labels)
        assert np.isfinite(head.kernel).all() and np.isfinite(head.bias).all()
        assert 0.99 < head.epsilon_spent() <= 1.0
        assert np.isfinite(head.predict(np.asarray(features, "float32")[:1])).all()
    # The last batch is shorter.
    assert KINDS[kind]().fit(dataset(X, Y, batch=64)).epsilon_spent() <= 1.0


def test_an_interrupted_fit_pays_for_what_was_released(monkeypatch):
    draw, calls = Releases._noise, []

    def interrupt(self, shape, deviation):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(self, shape, deviation)

    monkeypatch.setattr(Releases, "_noise", interrupt)
    head = KINDS["fc"]()
    with pytest.raises(KeyboardInterrupt):
        head.fit(X, Y)
    assert head.ledger.steps == 2 and 0 < head.epsilon_spent() < 1 and head.kernel is None


def test_a_stream_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr("tfdpx.heads.features.MOST_EXAMPLES", 1000)

    def endless():
        while True:
            yield X, Y

    with pytest.raises(ValueError, match="takes 1 to 1000 examples"):
        KINDS["fc"]().fit(generated(endless))


def test_numbers_of_numpy_are_plain_in_the_config():
    head = FeatureCovariance(
        np.int64(3), np.float32(1), steps=np.int32(2), covariance_share=np.float32(0.5)
    )
    assert json.loads(json.dumps(head.get_config())) == head.get_config()
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(head))
    assert again.get_config() == head.get_config() and again.kernel is None


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (LeastSquares, {"epsilon": None}, "Exactly one of `epsilon` and `noise_multiplier`"),
        (LeastSquares, {"noise_multiplier": 1.0}, "Exactly one of"),
        (LeastSquares, {"epsilon": 0}, "`epsilon` must be a positive number. Received: epsilon=0"),
        (LeastSquares, {"epsilon": math.nan}, "`epsilon` must be a positive number"),
        (LeastSquares, {"delta": 1}, "`delta` must lie"),
        (LeastSquares, {"num_classes": 1}, "integer >= 2. Received: num_classes=1. Two classes"),
        (LeastSquares, {"num_classes": 2.0}, "integer >= 2"),
        (LeastSquares, {"num_classes": True}, "integer >= 2"),
        (LeastSquares, {"l2_norm_clip": 0}, "`l2_norm_clip` must be a number >="),
        (LeastSquares, {"l2_norm_clip": None}, "`l2_norm_clip` must be a number >="),
        (LeastSquares, {"l2_norm_clip": math.nan}, "`l2_norm_clip` must be a number"),
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
    ],
)
def test_unfit_arguments_are_refused(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**{"num_classes": 3, "epsilon": 1.0, **arguments})


def test_evaluate_needs_labels_and_predict_none():
    head = KINDS["ls"]()
    with pytest.raises(ValueError, match="call `fit` first"):
        head.predict(X)
    head.fit(X, Y)
    with pytest.raises(ValueError, match="`labels` must be given"):
        head.evaluate(X)
    with pytest.raises(ValueError, match="features.* have a width of 4"):
        head.predict(X[:, :3])
    np.testing.assert_allclose(
        head.predict(dataset(X).map(lambda x: x)), head.predict(X), rtol=1e-5
    )


def test_the_layer_in_a_saved_model_predicts_the_same_without_tfdpx_objects(tmp_path):
    head = KINDS["fc"]().fit(X, Y)
    inputs = keras.Input([WIDTH])
    model = keras.Model(inputs, head.to_layer(name="head")(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("head")) is keras.layers.Dense
    np.testing.assert_allclose(loaded(X), head.predict(X), rtol=1e-5, atol=1e-5)
