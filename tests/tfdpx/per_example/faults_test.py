"""Data that are broken or odd: each example counts as zero where it must, and training goes on."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow, slow_but

import tfdpx

N, B, STEPS = 24, 8, 6
PLAN = tfdpx.PrivacyPlan(N, batch_size=B, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
X, Y = small.data(N)


def train(x=X, y=Y, weight=None, plan=PLAN, **arguments):
    """A trained model of known noise and draws."""
    model = small.model(tfdpx.DPSGD(0.1, plan=plan, seed=3), **arguments)
    model.fit(plan.batches(x, y, weight, seed=4), verbose=0)
    return model


def without(rows):
    weight = np.ones(N, "float32")
    weight[rows] = 0.0
    return weight


def drawn(rows):
    return sum(
        int(weight.numpy()[x.numpy()[:, 0] == X[row, 0]].sum())
        for x, _, weight in PLAN.batches(X, Y, seed=4)
        for row in rows
    )


BROKEN = {
    "images of NaN": lambda x, y: x.__setitem__(2, np.nan),
    "images of infinity": lambda x, y: x.__setitem__(2, -np.inf),
    "images that overflow": lambda x, y: x.__setitem__(2, 3e38),
    "labels of NaN": lambda x, y: y.__setitem__(2, np.nan),
    "labels of infinity": lambda x, y: y.__setitem__(2, np.inf),
    "negative labels": lambda x, y: y.__setitem__(2, -1),
    "labels that are too large": lambda x, y: y.__setitem__(2, 3),
}


@pytest.fixture(scope="module")
def absent():
    return small.weights(train(weight=without([2])))


@pytest.mark.parametrize("how", slow_but(BROKEN, "images of NaN", "labels of NaN"))
def test_a_broken_example_counts_as_zero_and_is_counted(absent, how):
    x, y = X.copy(), Y.astype("float32")
    BROKEN[how](x, y)
    model = train(x, y)
    np.testing.assert_allclose(small.weights(model), absent, atol=1e-6)
    assert model.optimizer.nonfinite_examples == drawn([2]) > 0
    assert model.optimizer.ledger.steps == STEPS


@pytest.mark.parametrize("compiled", [slow({"jit_compile": True}), {"run_eagerly": True}])
def test_labels_that_are_none_however_it_is_compiled(absent, compiled):
    y = Y.copy()
    y[2] = 77
    model = train(y=y, compile_arguments=compiled)
    np.testing.assert_allclose(small.weights(model), absent, atol=1e-6)
    assert model.optimizer.nonfinite_examples == drawn([2])


@pytest.mark.parametrize("classes", [slow(256), 300])
def test_bytes_as_labels_of_more_classes_than_a_byte_has(classes):
    def of_bytes(y_true, y_pred):
        y_true = tf.cast(y_true + 250, "uint8")
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    model = train(layers=[keras.layers.Dense(classes, kernel_initializer="zeros")], loss=of_bytes)
    assert model.optimizer.nonfinite_examples == 0


@tf.custom_gradient
def infinite_where_negative(x):
    return x, lambda upstream: tf.where(x < 0, np.inf, 1.0) * upstream


def test_an_infinite_gradient_of_a_finite_loss_counts_as_zero():
    class Steep(keras.layers.Layer):
        def call(self, x):
            return infinite_where_negative(x)

    x = np.abs(X) + 0.1
    x[2] *= -1
    first = keras.layers.Dense(6, kernel_initializer="identity", use_bias=False)
    model = train(x, layers=[first, Steep(), keras.layers.Dense(3)])
    assert model.optimizer.nonfinite_examples > 0
    assert np.isfinite(small.weights(model)).all()
    assert model.optimizer.ledger.steps == STEPS


@pytest.mark.parametrize("microbatch_size", [slow(1), 3])
def test_draws_and_passes_without_examples(microbatch_size):
    plan = tfdpx.PrivacyPlan(N, batch_size=1, steps=20, noise_multiplier=1.0, delta=1e-3)
    sizes = [int(np.sum(weight)) for *_, weight in plan.batches(X, Y, seed=4)]
    assert 0 in sizes
    optimizer = tfdpx.DPSGD(0.1, plan=plan, microbatch_size=microbatch_size)
    model = small.model(optimizer, compile_arguments={"metrics": ["accuracy"]})
    batches = plan.batches(X, Y, optimizer=optimizer, seed=4)
    history = model.fit(batches, verbose=0, callbacks=[tfdpx.callbacks.PrivacyBudget(plan)]).history
    assert model.optimizer.ledger.steps == 20  # An empty draw is an update too: it costs.
    assert np.isfinite(small.weights(model)).all() and np.isfinite(history["loss"]).all()


@pytest.mark.slow
def test_a_data_set_of_absent_examples_and_one_of_a_single_example():
    model = train(weight=np.zeros(N, "float32"))
    assert model.optimizer.ledger.steps == STEPS
    plan = tfdpx.PrivacyPlan(1, batch_size=1, steps=3, noise_multiplier=1.0, delta=1e-3)
    assert plan.capacity == 1
    model = train(X[:1], Y[:1], plan=plan)
    assert model.optimizer.ledger.steps == 3


def test_a_batch_that_is_larger_than_declared_is_refused():
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN))
    with pytest.raises(ValueError, match="have 24 examples.*batch_size=8"):
        model.train_on_batch(X, Y)
    assert model.optimizer.ledger.steps == 0
