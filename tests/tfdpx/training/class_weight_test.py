"""`class_weight` acts after the clip: the formula, its bound, and the numbers that Keras shows."""

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx import mechanism
from tfdpx.sampling.class_weights import ClassWeights
from tfdpx.training import fit

X, Y = small.data()
ONE_HOT = np.eye(3, dtype="float32")[Y]
BINARY = (Y > 1).astype("float32")
pytestmark = pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")


def make(outputs=3, loss=None, **arguments):
    def layers():
        return [keras.layers.Dense(5, "relu"), keras.layers.Dense(outputs)]

    return bench.Bench(None, layers, loss, noise_multiplier=0.0, **arguments)


def column():
    return make(microbatch_size=3, l2_norm_clip=0.3)


@pytest.fixture(scope="module", name="trainer")
def _made():
    return column()


def binary():
    return make(1, keras.losses.BinaryCrossentropy(from_logits=True))


def soft():
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    return make(loss=loss, l2_norm_clip="automatic")


@pytest.mark.parametrize(
    "maker, y, class_weight, factors",
    [
        (None, Y, {0: 4.0, 1: 0.5}, [1.0, 0.125, 0.25]),
        (column, Y[:, np.newaxis], {0: 0.0, 1: 0.5}, [0.0, 0.5, 1.0]),
        (soft, ONE_HOT, {0: 0.1, 1: 0.2, 2: 0.4}, [0.25, 0.5, 1.0]),
        (binary, BINARY[:, np.newaxis], {1: 25.0}, [0.04, 1.0, 0.0]),
        (None, Y, {0: 0.0, 1: 0.0, 2: 0.0}, [0.0, 0.0, 0.0]),
    ],
    ids=["classes", "column", "one-hot, automatic", "binary", "all zero"],
)
def test_the_update_is_the_formula(trainer, maker, y, class_weight, factors):
    trainer = maker() if maker else trainer
    trainer.class_weight = class_weight
    moved = trainer.step(X, y)
    trainer.restore()
    gradients = batch_of_one_gradients(trainer.model, tf.constant(X), tf.constant(y), None, 1)
    norms, clip = np.linalg.norm(gradients, axis=1), trainer.optimizer.l2_norm_clip
    is_automatic = maker is soft
    clipped = 1 / (norms + 0.01) if is_automatic else 1 / np.maximum(norms, clip)
    labels = Y if maker in (None, column, soft) else BINARY.astype(int)
    wanted = -(np.array(factors)[labels] * clipped) @ gradients / 16
    np.testing.assert_allclose(moved, wanted, atol=2e-6)


def influence(trainer, monkeypatch, by_class):
    """Returns the largest influence of an example under class weights that were not checked."""
    monkeypatch.setattr(fit, "read_class_weight", lambda _: ClassWeights(by_class))
    return max(trainer.influence(3 * X, Y, example) for example in (0, 1, 2, 4, 15))


@pytest.mark.parametrize("by_class", [{0: 1e30}, {0: -1e30, 1: 1e-30}, {0: np.inf, 2: np.nan}])
def test_no_weights_let_an_example_move_an_update_by_more_than_one(trainer, monkeypatch, by_class):
    assert 0.9 < influence(trainer, monkeypatch, by_class) <= 1 + 1e-5
    invalid = [label for label, weight in by_class.items() if not 0 <= weight < np.inf]
    before = trainer.optimizer.nonfinite_examples
    trainer.step(X, Y)
    assert trainer.optimizer.nonfinite_examples - before == np.isin(Y, invalid).sum()


@pytest.mark.planted("class weights that are not divided")
def test_weights_that_are_not_divided_are_found(monkeypatch):
    monkeypatch.setattr(mechanism, "weight_factors", lambda weights, largest: weights)
    assert influence(make(), monkeypatch, {0: 4.0}) > 1.5


def test_losses_and_metrics_are_those_of_keras():
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    plan = tfdpx.PrivacyPlan(16, batch_size=16, steps=1, noise_multiplier=1.0, delta=1e-3)
    private = tfdpx.DPSGD(1.0, plan=plan, microbatch_size=3)
    logs = [
        small.model(optimizer, compile_arguments=metrics)
        .fit(X, Y, batch_size=16, class_weight={0: 4.0, 1: 0.5}, verbose=0)
        .history
        for optimizer in (private, keras.optimizers.SGD(1.0))
    ]
    assert len(logs[1]) == 3
    for name, values in logs[1].items():
        np.testing.assert_allclose(logs[0][name], values, rtol=1e-5)


def test_one_label_an_example():
    model = small.model(layers=[keras.layers.Reshape([2, 3]), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=r"one label per example.*\(16, 2, 3\)"):
        model.train_on_batch(X, np.zeros([16, 2]), class_weight={0: 2.0})
    with pytest.raises(ValueError, match="finite and >= 0"):
        model.train_on_batch(X, Y, class_weight={0: -2.0})
