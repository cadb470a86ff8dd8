"""Passes with a varying number of rows: the models that allow them, and a check of metrics."""

import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf

import tfdpx
from tfdpx import checks
from tfdpx.per_example import rowwise
from tfdpx.training import microbatches

layers = keras.layers


def model(**arguments):
    return small.model(layers=[layers.Dense(3)], **arguments)


def fitted(model):
    """Calls `fit` on batches that may hold padding; returns the `MicrobatchSize`s."""
    x, y = small.data()
    model.fit(x, y, sample_weight=np.ones(len(x), "float32"), verbose=0)
    return microbatches.chosen_sizes(model)


@pytest.mark.planted("a model that mixes is batched")
def test_a_mixing_model_that_is_batched_shows_in_the_comparison(monkeypatch):
    monkeypatch.setattr(rowwise, "find_obstacle", lambda model: None)
    mixer = layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True))
    with pytest.raises(checks.UnfitForPrivacy, match="batches of one"):
        fitted(small.model(layers=[mixer, layers.Dense(3)]))


class Writes(keras.Sequential):
    """A model with metrics that write data into a trained weight if `told(number of rows)`."""

    told = None

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        if self.told(y.shape[0]):
            kernel = self.layers[-1].kernel
            kernel.assign_add(1e3 * tf.reduce_mean(x) * tf.ones_like(kernel))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.mark.parametrize("told", [lambda rows: rows is None, lambda rows: rows == 16])
def test_metrics_do_not_write_for_the_number_that_runs(told):
    seeds.fix(7)
    model = Writes([layers.Dense(3)])
    model.told = told
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.0, batch_size=16, noise_multiplier=1.0, seed=1), loss)
    x, y = small.data()
    model.build(x.shape)
    before = small.weights(model)
    runs = model.train_on_batch if told(16) else lambda *_: fitted(model)
    with pytest.raises(checks.UnfitForPrivacy, match="compute_metrics"):
        runs(x, y)
    np.testing.assert_array_equal(small.weights(model), before)
