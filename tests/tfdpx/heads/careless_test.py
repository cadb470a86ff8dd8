"""What careless users give to heads: refused by name before anything is released, or harmless."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx.heads import FeatureCovariance, FirstOrder, LeastSquares, Newton
from tfdpx.heads._feature_source import FeatureSource, Pass

CLASSES, WIDTH, COUNT = 3, 4, 90
KINDS = {
    "ls": lambda **kwargs: LeastSquares(CLASSES, 1.0, class_memory=1, **kwargs),
    "fc": lambda **kwargs: FeatureCovariance(CLASSES, 1.0, steps=2, **kwargs),
    "newton": lambda **kwargs: Newton(CLASSES, 1.0, steps=2, class_memory=1, **kwargs),
    "first": lambda **kwargs: FirstOrder(CLASSES, 1.0, steps=2, **kwargs),
}


def data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(COUNT, WIDTH)).astype("float32")
    return x, rng.integers(0, CLASSES, COUNT)


def dataset(*arrays, batch=7):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch)


X, Y = data()


def raised(scale):
    return lambda x, y: (x + scale * tf.random.normal(tf.shape(x)), y)


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


@pytest.mark.parametrize(
    "changing",
    [
        dataset(X, Y).map(raised(0.5)),
        # Labels dealt anew: an example counts in another class in each pass.
        tf.data.Dataset.zip(
            tf.data.Dataset.from_tensor_slices(X),
            tf.data.Dataset.from_tensor_slices(Y).shuffle(COUNT),
        ).batch(9),
        dataset(X, Y).map(lambda x, y: (x, tf.random.uniform([tf.size(y)], 0, 3, tf.int64))),
        tf.data.Dataset.from_tensor_slices((X, Y))
        .filter(lambda x, y: tf.random.uniform([]) < 0.9)
        .batch(9),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_examples_that_change_between_passes_are_refused(kind, changing):
    head = KINDS[kind]()
    with pytest.raises(ValueError, match="A pass over `features` met"):
        head.fit(changing)
    assert head.kernel is None
    # What was released before the change was seen is paid for.
    assert head.ledger.steps < head.num_releases


def test_order_and_rounding_of_features_may_change_between_passes():
    stream = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT).batch(8)
    for changed in (stream, stream.map(raised(1e-4))):
        assert KINDS["ls"](seed=0).fit(changed).ledger.steps == 3


def test_passes_in_another_order_are_the_same_pass():
    rng, targets = np.random.default_rng(0), np.eye(CLASSES)[Y]
    for _ in range(20):
        order, x = rng.permutation(COUNT), X * 10.0 ** rng.integers(-5, 5)
        met, again, other = (Pass(WIDTH, CLASSES) for _ in range(3))
        met.add(x, targets)
        again.add(x[order[:50]], targets[order[:50]])
        again.add(x[order[50:]], targets[order[50:]])
        other.add(x, targets[order])
        assert not met.differs(again)
        assert met.differs(other)


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


def test_a_failed_pass_pays_for_what_was_released():
    calls = []

    def generate():
        calls.append(1)
        yield X, Y if len(calls) < 2 else Y + 5

    stream = tf.data.Dataset.from_generator(
        generate, output_signature=(tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64))
    )
    head = KINDS["ls"]()
    with pytest.raises(ValueError, match="must lie in"):
        head.fit(stream)
    assert head.ledger.steps == 1 and 0 < head.epsilon_spent() < 1


def test_a_stream_that_does_not_end_is_stopped(monkeypatch):
    monkeypatch.setattr("tfdpx.heads._moments.MOST_EXAMPLES", 1000)

    def endless():
        while True:
            yield X, Y

    stream = tf.data.Dataset.from_generator(
        endless, output_signature=(tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64))
    )
    with pytest.raises(ValueError, match="takes 1 to 1000 examples"):
        KINDS["fc"]().fit(stream)


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
        (LeastSquares, {"class_memory": 0}, "`class_memory` must be a positive integer"),
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


def test_the_passes_of_arrays_are_not_compared():
    examples = FeatureSource(X, Y, CLASSES)
    for _ in range(2):
        assert sum(len(x) for x, _ in examples.chunks(40)) == COUNT == examples.count
