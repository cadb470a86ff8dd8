"""Microbatches hold every present example once, at its place; and the size of each."""

import bench
import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdpx
from tfdpx import mechanism, noise
from tfdpx.training import microbatches
from tfdpx.training import step as training_step
from tfdpx.training.microbatches import Batch, MicrobatchSize, Totals


def totals_of(counts, examples, loss):
    return Totals([counts], examples, tf.zeros([]), loss=loss, squared_norms=tf.zeros([1]))


ZERO = totals_of(tf.zeros([5]), tf.zeros([]), tf.zeros([]))


def adding(batch, index):
    """Returns sums of `x`, of `x` times choices and places, and counts of passes, weights, rows."""
    (x, _, weights), present, choices = batch.data, batch.present, batch.choices
    rows = tf.cast(tf.shape(x)[0], "float32")
    present = tf.ones(tf.shape(x)[:1]) if present is None else tf.cast(present, "float32")
    total = tf.reduce_sum(x * present)
    drawn = tf.reduce_sum(x * choices * present)
    weight = tf.zeros([]) if weights is None else tf.reduce_sum(weights)
    places = 100.0 * tf.cast(index, "float32") + tf.range(rows)
    placed = tf.reduce_sum(x * places * present)
    counts = tf.stack([drawn, placed, tf.ones([]), weight, rows])
    return totals_of(counts, tf.reduce_sum(present), total), {"logs": total}


BATCHES = dict(
    present=st.lists(st.booleans(), min_size=1, max_size=12),
    size=st.integers(1, 14),
    multiple=st.integers(1, 14),
)


@settings(max_examples=15, deadline=None)
@given(**BATCHES)
def test_every_example_once_and_no_pass_too_many(present, size, multiple):
    check_passes(present, size, multiple)


def check_passes(present, size, multiple, jit_compile=False):
    present = np.array(present)
    sizes = MicrobatchSize(size, size if jit_compile else min(multiple, size))
    x = np.arange(1.0, len(present) + 1, dtype="float32")

    @tf.function(jit_compile=jit_compile, autograph=False)
    def total(x, present):
        data = (x, None, tf.cast(present, "float32"))
        batch = Batch(data, present, choices=10 * x)
        return microbatches.run(adding, batch, sizes, ZERO)[0]

    totals = total(x, present)
    assert totals.examples == present.sum()
    np.testing.assert_allclose(totals.loss, x[present].sum())
    last = max(np.flatnonzero(present), default=-1) + 1
    rows = np.arange(len(present))
    placed = (x * (100 * (rows // size) + rows % size))[present].sum()
    drawn = 10 * (x**2)[present].sum()
    expected = [drawn, placed, -(-last // size), present.sum(), sizes.rows(last)]
    np.testing.assert_allclose(totals.sums[0], expected)


@pytest.fixture(scope="module", name="noisy")
def _noisy():
    return bench.Bench(seed=5)


def test_an_empty_draw_gives_noise_alone(noisy):
    model = noisy.model
    x, y = small.data()
    noisy.restore()
    before = small.weights(model)
    seed = tf.constant(model.optimizer.step_key())
    logs = model.train_on_batch(x, y, sample_weight=np.zeros(len(x), "float32"), return_dict=True)
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    drawn = mechanism.privatize(zeros, 1.0, 16, noise.fold_in(seed, training_step._NOISE))
    wanted = np.concatenate([np.ravel(g.tensor) for g in drawn])
    np.testing.assert_allclose(before - small.weights(model), wanted, atol=1e-6)
    assert logs["loss"] == 0


def metrics_model(size):
    entropy = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
    metrics = {"metrics": [entropy], "weighted_metrics": ["accuracy"]}
    return small.model(microbatch_size=size, learning_rate=0.1, seed=5, compile_arguments=metrics)


@pytest.mark.slow
def test_absent_rows_anywhere_change_nothing_and_are_in_no_metric():
    x, y = small.data()
    present = np.arange(len(x)) % 3 != 1
    few = metrics_model(5)
    wanted = small.step(few, x[present], y[present])
    x = np.where(present[:, np.newaxis], x, np.float32("nan"))
    # If one pass suffices, flags are the weights.
    for size, weights in ((5, present.astype("float32")), (16, tf.constant(present))):
        model = metrics_model(size)
        change = small.step(model, x, y, sample_weight=weights)
        np.testing.assert_allclose(change, wanted, rtol=1e-4, atol=1e-7)
        logs = model.get_metrics_result()
        assert logs.keys() == few.get_metrics_result().keys()
        for name, value in few.get_metrics_result().items():
            np.testing.assert_allclose(logs[name], value, rtol=1e-5, err_msg=name)


def test_the_last_pass_counts_no_row_twice():
    """It contains rows that were counted before, if the size does not divide the batch."""
    x, y = small.data()
    cut, whole = (small.step(small.model(microbatch_size=size), x, y) for size in (5, None))
    np.testing.assert_allclose(cut, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.planted("the last pass counts rows twice")
def test_rows_that_are_counted_twice_are_noticed(monkeypatch):
    zero_invalid = mechanism.zero_invalid

    def unmasked(factors, squared_norms, present):
        return zero_invalid(factors, squared_norms, tf.ones_like(present))

    monkeypatch.setattr(mechanism, "zero_invalid", unmasked)
    with pytest.raises(AssertionError):
        test_the_last_pass_counts_no_row_twice()


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.slow
def test_own_metrics_count_every_row_once():
    seeds.fix(7)
    inputs = keras.Input((6,))
    model = OwnMetrics(inputs, keras.layers.Dense(3)(inputs))
    optimizer = tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0, microbatch_size=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])
    x, y = small.data(7)
    wanted = np.mean(np.argmax(model(x).numpy(), axis=1) == y)
    logs = model.train_on_batch(x, y, return_dict=True)
    np.testing.assert_allclose(logs["accuracy"], wanted, rtol=1e-6)
