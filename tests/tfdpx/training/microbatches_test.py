"""Passes hold every example that is present once, at its place, and end with the last."""

import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf
from cases import slow
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdpx
from tfdpx import mechanism
from tfdpx.training import _microbatches
from tfdpx.training._microbatches import BatchTotals
from tfdpx.training.microbatch_size import MicrobatchSize

ZERO = BatchTotals([tf.zeros([5])], tf.zeros([]), [], tf.zeros([]), tf.zeros([]))


def adding(data, choices, present, index):
    """Sums of `x`, of `x` times choices and places, and numbers of passes, of weights, of rows."""
    x, _, weights = data
    rows = tf.cast(tf.shape(x)[0], "float32")
    present = tf.ones(tf.shape(x)[:1]) if present is None else tf.cast(present, "float32")
    total = tf.reduce_sum(x * present)
    drawn = tf.reduce_sum(x * choices * present)
    weight = tf.zeros([]) if weights is None else tf.reduce_sum(weights)
    places = 100.0 * tf.cast(index, "float32") + tf.range(rows)
    placed = tf.reduce_sum(x * places * present)
    counts = tf.stack([drawn, placed, tf.ones([]), weight, rows])
    return BatchTotals([counts], total, [], tf.reduce_sum(present), tf.zeros([])), {"logs": total}


@pytest.mark.parametrize("jit_compile", [False, slow(True)])
@settings(max_examples=15, deadline=None)
@given(
    present=st.lists(st.booleans(), min_size=1, max_size=12),
    size=st.integers(1, 14),
    multiple=st.integers(1, 14),
)
def test_every_example_once_and_no_pass_too_many(jit_compile, present, size, multiple):
    present = np.array(present)
    sizes = MicrobatchSize(size, size if jit_compile else min(multiple, size))
    x = np.arange(1.0, len(present) + 1, dtype="float32")

    @tf.function(jit_compile=jit_compile, autograph=False)
    def total(x, present):
        data = (x, None, tf.cast(present, "float32"))
        return _microbatches.run(adding, data, 10 * x, present, sizes, ZERO)[0]

    found = total(x, present)
    assert found.examples == present.sum()
    np.testing.assert_allclose(found.loss, x[present].sum())
    last = max(np.flatnonzero(present), default=-1) + 1
    rows = np.arange(len(present))
    placed = (x * (100 * (rows // size) + rows % size))[present].sum()
    drawn = 10 * (x**2)[present].sum()
    expected = [drawn, placed, -(-last // size), present.sum(), sizes.rows(last)]
    np.testing.assert_allclose(found.sums[0], expected)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 40])
def test_passes_of_any_size_never_know_it(count):
    """What was proved for any number of rows must not be traced for one."""
    seen = []

    def looking(data, *rest):
        seen.append(data[0].shape[0])
        return adding(data, *rest)

    def total(x, present=None):
        size = MicrobatchSize(8, 2)
        return _microbatches.run(looking, (x, None, None), x, present, size, ZERO)[0]

    data = tf.range(float(count)), tf.ones([count], tf.bool)
    for length, tensors in ((None, data[:1]), (None, data), (count, data)):
        traced = tf.function(total, autograph=False)
        found = traced.get_concrete_function(*(tf.TensorSpec([length], t.dtype) for t in tensors))
        found = found(*tensors)
        assert found.examples == count and found.loss == np.arange(count).sum()
    assert seen == [None, None, None]


def test_a_batch_without_weights_that_fits_is_one_pass_as_it_is():
    x = tf.constant([1.0, 2.0, 3.0])
    found, logs = _microbatches.run(adding, (x, None, None), x, None, MicrobatchSize(3, 3), ZERO)
    assert found.loss == 6 and logs["logs"] == 6
    found, logs = _microbatches.run(adding, (x, None, None), x, None, MicrobatchSize(2, 2), ZERO)
    assert found.loss == 6 and logs is None and found.sums[0][2] == 2


def model(**arguments):
    return small.model(
        tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0, seed=5, **arguments),
        compile_arguments={"weighted_metrics": ["accuracy"]},
    )


@pytest.mark.parametrize(
    "compile_arguments", [{}, slow({"jit_compile": True}), slow({"run_eagerly": True})]
)
def test_an_empty_draw_gives_noise_alone(compile_arguments):
    made = small.model(
        tfdpx.DPSGD(1.0, batch_size=16, noise_multiplier=1.0, seed=5),
        compile_arguments=compile_arguments,
    )
    x, y = small.data()
    made.build(x.shape)
    before = small.weights(made)
    seed = tf.constant(made.optimizer.step_key())
    logs = made.train_on_batch(x, y, sample_weight=np.zeros(len(x)), return_dict=True)
    zeros = [tf.zeros(v.shape) for v in made.trainable_variables]
    from tfdpx import noise
    from tfdpx.training import _train_step

    drawn = mechanism.privatize(zeros, 1.0, 16, noise.fold_in(seed, _train_step._NOISE))
    wanted = np.concatenate([np.ravel(g.tensor) for g in drawn])
    np.testing.assert_allclose(before - small.weights(made), wanted, atol=1e-6)
    assert logs["loss"] == 0


@pytest.mark.parametrize("size", [5, *map(slow, (1, 16, None))])
@pytest.mark.slow
def test_absent_rows_anywhere_change_nothing(size):
    x, y = small.data()
    weights = (np.arange(len(x)) % 3 != 1).astype("float32")
    few, all_rows = model(microbatch_size=size), model(microbatch_size=size)
    kept = weights > 0
    wanted = small.step(few, x[kept], y[kept])
    x = np.where(kept.reshape([-1] + [1] * (x.ndim - 1)), x, np.nan)
    found = small.step(all_rows, x, y, sample_weight=weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)
    few, other = (m.get_metrics_result() for m in (few, all_rows))
    assert few.keys() == other.keys()
    for name, value in few.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-5)


@pytest.mark.slow
def test_the_last_pass_counts_no_row_twice(monkeypatch):
    """What a pass takes along beyond the examples present must be masked."""
    x, y = small.data()
    wanted = small.step(model(microbatch_size=5), x, y)
    counted = mechanism.counted

    def unmasked(factors, squared_norms, present):
        return counted(factors, squared_norms, tf.ones_like(present))

    monkeypatch.setattr(mechanism, "counted", unmasked)
    assert np.abs(small.step(model(microbatch_size=5), x, y) - wanted).max() > 1e-3


def test_draws_views_and_noise_are_the_same_for_any_size():
    plan = tfdpx.PrivacyPlan(30, batch_size=21, steps=3, noise_multiplier=1.0, delta=1e-3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 6, 6, 1)).astype("float32"), rng.integers(0, 3, 30)
    weights = []
    for size, execution in ((None, 1), (4, 1), (30, 3)):
        seeds.fix(7)
        made = keras.Sequential(
            [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
        )
        optimizer = tfdpx.DPSGD(
            1.0, plan=plan, seed=1, microbatch_size=size, augmult=2,
            augment=tfdpx.augment.RandomCropFlip(2),
        )  # fmt: skip
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(optimizer, loss, steps_per_execution=execution)
        made.fit(plan.batches(x, y, optimizer=made.optimizer, seed=3), verbose=0)
        weights.append(small.weights(made))
    for other in weights[1:]:
        np.testing.assert_allclose(other, weights[0], rtol=1e-5, atol=1e-6)


class CountsRows(keras.metrics.Metric):
    """Only as Keras counts: it fails where a weight a row is given."""

    def __init__(self):
        super().__init__(name="counts_rows")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        assert sample_weight is None
        self.total.assign_add(tf.cast(tf.shape(y_pred)[0], "float32"))

    def result(self):
        return self.total


@pytest.mark.parametrize("rows", [slow(16), 13])
def test_without_weights_metrics_count_as_in_keras(rows):
    made = small.model(compile_arguments={"metrics": [CountsRows()]})
    x, y = small.data(rows)
    made.fit(x, y, batch_size=rows, verbose=0)
    assert made.get_metrics_result()["counts_rows"] == rows


class OwnMetrics(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("size", [3, *map(slow, (1, 7, None))])
def test_own_metrics_count_every_row_once(size):
    seeds.fix(7)
    inputs = keras.Input((6,))
    made = OwnMetrics(inputs, keras.layers.Dense(3)(inputs))
    optimizer = tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0, microbatch_size=size)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, weighted_metrics=["accuracy"])
    x, y = small.data(7)
    wanted = np.mean(np.argmax(made.predict(x, verbose=0), axis=1) == y)
    logs = made.train_on_batch(x, y, return_dict=True)
    np.testing.assert_allclose(logs["accuracy"], wanted, rtol=1e-6)


@pytest.mark.slow
def test_what_absent_rows_hold_is_in_no_metric():
    x, y = small.data()
    weights = (y > 0).astype("float32")
    x = np.where(weights[:, np.newaxis] > 0, x, np.nan)
    for size in (5, 16):
        entropy = keras.metrics.SparseCategoricalCrossentropy("entropy", from_logits=True)
        made = small.model(microbatch_size=size, compile_arguments={"metrics": [entropy]})
        logs = made.train_on_batch(x, y, weights, return_dict=True)
        assert np.isfinite(logs["entropy"]), size


@pytest.mark.slow
def test_weights_may_be_flags():
    x, y = small.data()
    changes = [
        small.step(small.model(), x, y, sample_weight=weights)
        for weights in (tf.constant(y > 0), (y > 0).astype("float32"))
    ]
    np.testing.assert_allclose(*changes, rtol=1e-5, atol=1e-7)


def test_a_batch_without_rows_gives_noise_alone():
    x, y = small.data()
    made = small.model()
    made.build(x.shape)
    before = small.weights(made)
    made.train_step((tf.constant(x[:0]), tf.constant(y[:0])))
    assert np.isfinite(small.weights(made)).all() and (small.weights(made) != before).any()
