"""Broken or odd data: a broken example counts as zero, and training goes on."""

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx

N = 24
X, Y = small.data(N)


def without(rows):
    weight = np.ones(N, "float32")
    weight[rows] = 0.0
    return weight


BROKEN = {
    "images of NaN": lambda x, y: x.__setitem__(2, np.nan),
    "images of infinity": lambda x, y: x.__setitem__(2, -np.inf),
    "images that overflow": lambda x, y: x.__setitem__(2, 3e38),
    "labels of NaN": lambda x, y: y.__setitem__(2, np.nan),
    "labels of infinity": lambda x, y: y.__setitem__(2, np.inf),
    "negative labels": lambda x, y: y.__setitem__(2, -1),
    "labels that are too large": lambda x, y: y.__setitem__(2, 3),
}


def updates(broken, **arguments):
    """Returns an update for each function of `broken`, and one with row 2 absent.

    The functions change data in place. Each broken row is counted. Labels are floats.
    """
    optimizer = tfdpx.DPSGD(0.1, batch_size=N, noise_multiplier=0.0)
    trained, y = bench.Bench(optimizer, **arguments), Y.astype("float32")
    absent, changes = trained.step(X, y, without([2])), []
    for change in broken:
        now = X.copy(), y.copy()
        change(*now)
        changes.append(trained.step(*now))
        assert optimizer.nonfinite_examples == len(changes)
    assert optimizer.ledger.steps == 1 + len(changes)
    assert np.abs(absent).max() > 1e-3
    return changes, absent


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
def test_a_broken_example_counts_as_zero_and_is_counted():
    changes, absent = updates(BROKEN.values())
    for change, name in zip(changes, BROKEN, strict=True):
        np.testing.assert_allclose(change, absent, atol=1e-6, err_msg=name)


@tf.custom_gradient
def infinite_where_negative(x):
    return x, lambda upstream: tf.where(x < 0, np.inf, 1.0) * upstream


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
def test_an_infinite_gradient_of_a_finite_loss_counts_as_zero():
    class Steep(keras.layers.Layer):
        def call(self, x):
            return infinite_where_negative(x)

    x = np.abs(X) + 0.1
    x[2] *= -1
    first = keras.layers.Dense(6, kernel_initializer="identity", use_bias=False)
    optimizer = tfdpx.DPSGD(0.1, batch_size=N, noise_multiplier=0.0)
    change = bench.Bench(optimizer, [first, Steep(), keras.layers.Dense(3)]).step(x, Y)
    assert optimizer.nonfinite_examples > 0
    assert np.isfinite(change).all() and np.any(change)


def test_draws_and_passes_without_examples():
    plan = tfdpx.PrivacyPlan(N, batch_size=1, steps=20, noise_multiplier=1.0, delta=1e-3)
    sizes = [int(np.sum(weight)) for *_, weight in plan.batches(X, Y, seed=4)]
    assert 0 in sizes
    optimizer = tfdpx.DPSGD(0.1, plan=plan, microbatch_size=3)
    model = small.model(optimizer, compile_arguments={"metrics": ["accuracy"]})
    batches = plan.batches(X, Y, optimizer=optimizer, seed=4)
    history = model.fit(batches, verbose=0, callbacks=[tfdpx.callbacks.PrivacyBudget(plan)]).history
    assert model.optimizer.ledger.steps == 20  # An empty draw is an update too, so it costs.
    assert np.isfinite(small.weights(model)).all() and np.isfinite(history["loss"]).all()
