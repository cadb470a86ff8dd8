"""Passes whose number of rows varies: taken only where a proof holds for every number."""

import keras
import mixers
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf
from cases import slow
from mixers import mean

import tfdpx
from tfdpx import checks
from tfdpx.independence import Independence
from tfdpx.training import microbatch_size

layers = keras.layers


class Between(layers.Layer):
    """A function of the rows and of how many of them Python is told of."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x, x.shape[0])

    def compute_output_shape(self, shape):
        return shape


def in_groups(x, rows):
    """A slip: where the number is unknown, all rows are one group."""
    groups = tf.reshape(x, [rows or 1, -1, x.shape[1]])
    return tf.reshape(groups - tf.reduce_mean(groups, axis=1, keepdims=True), tf.shape(x))


def model(function=None, **arguments):
    def stack():
        return [*([] if function is None else [Between(function)]), layers.Dense(3)]

    return small.model(layers=stack, **arguments)


def fitted(made):
    """A `fit` whose batches may hold padding; returns the `MicrobatchSize`s."""
    x, y = small.data()
    made.fit(x, y, sample_weight=np.ones(len(x), "float32"), verbose=0)
    return microbatch_size.chosen(made)


def test_what_is_proved_for_every_number_varies():
    made = model()
    assert fitted(made) == [microbatch_size.MicrobatchSize(16, 1)]
    assert str(made.optimizer.independence[0]) == "proved, for any number of rows"


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x, rows: x - mean(x) if rows is None else x,
        slow(lambda x, rows: in_groups(x, rows) if rows is None else x),
        slow(lambda x, rows: tf.reshape(x, [rows, -1])),
    ],
    ids=["mixes", "groups", "needs the number"],
)
def test_what_is_not_proved_has_passes_of_one_size(function):
    """It is checked for that size, and what it does for an unknown one never runs."""
    made, plain = model(function), model()
    made(small.data()[0])
    [size] = fitted(made)
    assert not size.varies
    assert made.optimizer.independence[0].rows == size.examples
    fitted(plain)
    np.testing.assert_allclose(small.weights(made), small.weights(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_mixing_in_passes_of_known_size_does_not_run_in_others():
    """What a pass that varies would do is proved; a pass of all rows is another graph."""
    made, plain = model(in_large_passes), model()
    for each in (made, plain):
        assert fitted(each)[0].varies
    np.testing.assert_allclose(small.weights(made), small.weights(plain), rtol=1e-4, atol=1e-6)
    with pytest.warns(UserWarning, match="computed alone"):
        made.train_on_batch(*small.data())


def in_large_passes(x, rows):
    return x - mean(x) if rows and rows > 8 else x


@pytest.mark.planted("a proof is taken for granted")
def test_a_proof_that_is_wrong_shows_in_the_comparison(monkeypatch):
    """A planted bug: the proof is taken for granted."""
    monkeypatch.setattr(
        "tfdpx.training.preparation.independence_of_microbatch", lambda *_: Independence()
    )
    with pytest.raises(checks.UnfitForPrivacy, match="batches of one"):
        fitted(model(lambda x, rows: x - mean(x) if rows is None else x))


class Writes(keras.Sequential):
    """Metrics that write what they see into a trained weight, where `told(number of rows)`."""

    told = None

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if self.told(y.shape[0]):
            kernel = self.layers[-1].kernel
            kernel.assign_add(1e3 * tf.reduce_mean(x) * tf.ones_like(kernel))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("told", [lambda rows: rows is None, lambda rows: rows == 16])
def test_metrics_do_not_write_for_the_number_that_runs(told):
    seeds.fix(7)
    made = Writes([layers.Dense(3)])
    made.told = told
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(tfdpx.DPSGD(0.0, batch_size=16, noise_multiplier=1.0, seed=1), loss)
    x, y = small.data()
    made.build(x.shape)
    before = small.weights(made)
    runs = made.train_on_batch if told(16) else lambda *_: fitted(made)
    with pytest.raises(checks.UnfitForPrivacy, match="compute_metrics"):
        runs(x, y)
    np.testing.assert_array_equal(small.weights(made), before)


class WritesIfWeighted(Writes):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.told = lambda rows: sample_weight is not None
        return super().compute_metrics(x, y, y_pred, sample_weight)


def writes_if_weighted(microbatch_size):
    """Such a model, and data."""
    seeds.fix(7)
    made, (x, y) = WritesIfWeighted([layers.Dense(3)]), small.data()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpx.DPSGD(
        0.0, batch_size=16, noise_multiplier=1.0, microbatch_size=microbatch_size
    )
    made.compile(optimizer, loss)
    made.build(x.shape)
    return made, x, y


@pytest.mark.parametrize("size", [5, "auto"])
def test_metrics_do_not_write_where_rows_may_be_absent(size, monkeypatch):
    """Only then they are given weights where `fit` has none."""
    monkeypatch.setattr(microbatch_size.MicrobatchAutotuner, "__call__", lambda *_: 5)
    made, x, y = writes_if_weighted(size)
    with pytest.raises(checks.UnfitForPrivacy, match="compute_metrics"):
        made.train_on_batch(x, y)


def test_metrics_are_looked_at_with_weights_too():
    """After batches without any, in passes of the same size."""
    made, x, y = writes_if_weighted(16)
    made.train_on_batch(x, y)
    before = small.weights(made)
    with pytest.raises(checks.UnfitForPrivacy, match="compute_metrics"):
        made.train_on_batch(x, y, sample_weight=np.ones(len(x), "float32"))
    np.testing.assert_array_equal(small.weights(made), before)


def test_losses_do_not_write_where_an_axis_is_unknown():
    kept = tf.Variable(0.0)

    def loss(y, y_pred):
        wanted = tf.reduce_mean(tf.cast(y, "float32"), axis=-1)
        errors = tf.square(tf.reduce_mean(y_pred, axis=-1) - wanted)
        if y.shape[-1] is None:
            kept.assign_add(tf.reduce_mean(errors))
        return errors

    made, (x, y) = model(loss=loss), small.data()
    specs = tf.TensorSpec([16, *x.shape[1:]]), tf.TensorSpec([16, None])
    y = np.stack([y, y], axis=1).astype("float32")
    batches = tf.data.Dataset.from_generator(lambda: iter([(x, y)]), output_signature=specs)
    with pytest.raises(checks.UnfitForPrivacy, match="changes state"):
        made.fit(batches, verbose=0)
    assert kept.numpy() == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("counted_as_its_own", [slow(False), True])
def test_metrics_of_a_later_compile_are_looked_at(counted_as_its_own):
    """Also one whose attribute is a trained weight: Keras lists that among its variables."""

    class Leak(keras.metrics.Mean):
        def __init__(self, kernel):
            super().__init__("leak")
            self.kernel = kernel if counted_as_its_own else lambda: kernel

        def update_state(self, y_true, y_pred, sample_weight=None):
            kernel = self.kernel if counted_as_its_own else self.kernel()
            kernel.assign_add(1e3 * tf.reduce_mean(y_pred) * tf.ones_like(kernel))
            return super().update_state(y_pred)

    made = model(learning_rate=0.0)
    fitted(made)
    before = small.weights(made)
    leak = Leak(made.layers[-1].kernel)
    assert counted_as_its_own == any(v is made.layers[-1].kernel for v in leak.variables)
    made.compile(made.optimizer, made.loss, metrics=[leak])
    with pytest.raises(checks.UnfitForPrivacy, match="compute_metrics"):
        fitted(made)
    np.testing.assert_array_equal(small.weights(made), before)


@pytest.mark.slow
def test_the_rules_of_others_are_told_the_number():
    """It is what they were compared with batches of one for."""

    class Mine(layers.Dense):
        pass

    class Rule(tfdpx.per_example.GenericRule):
        def per_example_gradients(self):
            inputs, gradients = self.call.args[0], self.output_gradients[0]
            products = tf.einsum("bi,bo->bio", inputs, gradients)
            return [tf.reshape(products, [inputs.shape[0], *self.layer.kernel.shape])]

    tfdpx.per_example.register(Mine)(Rule)
    made = small.model(layers=[Mine(3, use_bias=False)])
    assert [size.varies for size in fitted(made)] == [False]


@pytest.mark.slow
def test_the_operation_and_the_cost_are_said_and_a_proof_can_be_required():
    mixer = mixers.Between(lambda x: x - mean(x), name="culprit")
    stack = [layers.Dense(4), mixer, layers.Dense(3)]
    made = small.model(layers=stack, batch_size=6)
    with pytest.warns(UserWarning, match="computed alone.*culprit.*twice the time"):
        made.fit(*small.data(6), batch_size=6, verbose=0)
    strict = small.model(layers=stack, batch_size=6, require_proof=True)
    with pytest.raises(checks.UnfitForPrivacy, match="not proved.*culprit"):
        strict.fit(*small.data(6), batch_size=6, verbose=0)
    assert int(strict.optimizer.iterations) == 0
    proved = small.model(layers=[layers.Dense(3)], batch_size=6, require_proof=True)
    proved.fit(*small.data(6), batch_size=6, verbose=0)
    assert proved.optimizer.independence[0].verdict == "proved"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eager", [slow(False), True])
def test_what_is_proved_for_one_number_trains_at_that_number(eager):
    """A model that mixes from eight rows on: Python looks at the number."""
    optimizer = tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0)
    stack = [mixers.Between(mixers.only_in_large_batches), layers.Dense(3)]
    made = small.model(optimizer, layers=stack, compile_arguments={"run_eagerly": eager})
    x, y = small.data(16)
    made.train_on_batch(x[:4], y[:4])
    assert str(optimizer.independence[0]) == "proved, for microbatches of 4 rows"
    made.train_on_batch(x, y)
    assert optimizer.independence[1].verdict == "alone"
