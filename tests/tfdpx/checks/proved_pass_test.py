"""What is proved to keep apart is not run as well; what is not proved still is."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdpx
from tfdpx import checks
from tfdpx.checks.training_pass import TrainingPass
from tfdpx.per_example import GenericRule, register
from tfdpx.per_example.layerwise import LayerwiseEngine


@pytest.fixture(name="runs")
def fixture_runs(monkeypatch):
    """List of the batches that training passes of the checks were run on."""
    runs, run = [], TrainingPass.__call__

    def counted(self, batch):
        runs.append(batch)
        return run(self, batch)

    monkeypatch.setattr(TrainingPass, "__call__", counted)
    return runs


def fitted(layers, **arguments):
    """The optimizer of a network that was fitted for one step."""
    model = keras.Sequential([keras.Input([6]), *layers, keras.layers.Dense(2)])
    optimizer = tfdpx.DPSGD(0.1, batch_size=8, noise_multiplier=1.0, l2_norm_clip=1.0)
    model.compile(optimizer, keras.losses.MeanSquaredError(), **arguments)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[8, 6]), rng.normal(size=[8, 2])
    model.fit(x, y, batch_size=8, verbose=0)
    return optimizer


@pytest.mark.parametrize("layers", [[], [keras.layers.Dropout(0.5)]])
def test_a_proved_pass_is_not_run(runs, layers):
    assert fitted(layers).independence[0].verdict == "proved"
    assert not runs


def test_a_pass_that_is_not_proved_is_run(runs):
    assert fitted([], run_eagerly=True).independence[0].verdict == "tried"
    assert len(runs) >= 3


def test_a_pass_without_fingerprints_cannot_be_run():
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(2)])
    engine = LayerwiseEngine(model, tf.ones([4, 6]), 1)
    looked_at = TrainingPass(model, engine, tf.ones([4, 6]), 4)
    # It would show no difference between any two batches.
    with pytest.raises(ValueError, match="fingerprints=True"):
        looked_at(None)


class MixesByMean(keras.layers.Layer):
    """Adds a hundredth of the mean over the batch."""

    def call(self, x):
        """Mixes."""
        return x + 0.01 * keras.ops.mean(x, axis=0)

    def compute_output_shape(self, input_shape):
        """As it is."""
        return input_shape


def test_a_pass_that_mixes_is_run_and_refused(runs):
    with pytest.raises(ValueError, match="depend on the other examples"):
        fitted([MixesByMean()])
    assert runs


@pytest.mark.parametrize("mixes", [lambda x: x[::-1], lambda x: x - tf.reduce_mean(x, axis=0)])
def test_where_a_proof_is_wrong_norms_show_it(runs, monkeypatch, mixes):
    monkeypatch.setattr(checks, "independence_of_pass", lambda *_: checks.Independence())
    with pytest.raises(checks.UnfitForPrivacy, match="batches of one example"):
        fitted([keras.layers.Dense(4), keras.layers.Lambda(mixes)])
    assert not runs


class Halved(keras.layers.Dense):
    """A dense layer whose rule below is wrong for one example."""


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_rule_that_is_wrong_for_one_example_is_refused(place):
    class OneWrong(GenericRule):
        def per_example_gradients(self):
            """Half of the gradient at `place`."""
            return [self._halved(g) for g in super().per_example_gradients()]

        def _halved(self, gradients):
            flags = tf.range(tf.shape(gradients)[0]) == place
            flags = tf.reshape(flags, [-1] + [1] * (gradients.shape.rank - 1))
            return tf.where(flags, 0.5 * gradients, gradients)

    register(Halved)(OneWrong)
    with pytest.raises(checks.UnfitForPrivacy, match="batches of one example"):
        fitted([Halved(4)])
