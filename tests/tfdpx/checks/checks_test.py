"""Models that cannot be trained privately are refused before the first step, and others are not."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx
from tfdpx import checks, per_example
from tfdpx.checks import batches_of_one
from tfdpx.per_example import Rule, register

layers = keras.layers


class AddsALoss(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


class Counts(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x, training=None):
        if training:
            self.count.assign_add(1.0)
        return x


UNFIT = [
    (
        lambda: [layers.BatchNormalization(), layers.Dense(3)],
        "batch_normalization.*replace_batch_norm",
    ),
    (lambda: [layers.Dense(3, activity_regularizer="l2")], "activity_regularizer"),
    (lambda: [AddsALoss(name="adds"), layers.Dense(3)], "add_loss.*adds"),
    (lambda: [Counts(), layers.Dense(3)], "changes state.*counts"),
    (lambda: [layers.Dense(3, trainable=False)], "no trainable variables"),
]


@pytest.mark.parametrize("make, message", UNFIT)
def test_unfit_models_are_refused_before_the_first_step(make, message):
    x, y = small.data()
    model = small.model(layers=make())
    with pytest.raises(checks.UnfitForPrivacy, match=message):
        model.fit(x, y, verbose=0)
    assert int(model.optimizer.iterations) == 0


class Wrong(layers.Dense):
    pass


@register(Wrong)
class WrongGradients(Rule):
    def per_example_gradients(self):
        [inputs], [gradients] = self.call.args, self.output_gradients
        exact = [tf.einsum("bi,bo->bio", inputs, gradients), gradients]
        return [self.changed(gradient) for gradient in exact]

    changed = None


WRONG_GRADIENTS = {
    "of the row before": lambda g: tf.roll(g, 1, 0),
    "from the fifth row on": lambda g: tf.concat([g[:4], 2.0 * g[4:]], 0),
    "too short by half a percent": lambda g: 0.995 * g,
}


@pytest.mark.parametrize("wrong", WRONG_GRADIENTS)
def test_rows_that_are_exchanged_or_wrong_are_found_out(monkeypatch, wrong):
    monkeypatch.setattr(WrongGradients, "changed", staticmethod(WRONG_GRADIENTS[wrong]))
    x, y = small.data()
    weights = np.ones(len(x), "float32")  # With weights, a microbatch may have any number of rows.
    for sample_weight in (None, weights):
        model = small.model(layers=[Wrong(3)])
        with pytest.raises(checks.UnfitForPrivacy, match="disagree with norms from batches of one"):
            model.train_on_batch(x, y, sample_weight=sample_weight)


def test_random_numbers_of_no_seed_generator_are_refused():
    noisy = layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x)))
    model = small.model(layers=[noisy, layers.Dense(3)])
    with pytest.raises(checks.UnfitForPrivacy, match="SeedGenerator"):
        model.fit(*small.data(), verbose=0)


def test_the_comparison_leaves_no_trace():
    model = small.model(
        tfdpx.DPSGD(0.0, batch_size=16, noise_multiplier=1.0),
        layers=[layers.Dense(4), layers.Dropout(0.5), layers.Dense(3)],
    )
    x, y = small.data()
    model.build(x.shape)
    before = [v.numpy() for v in model.variables]
    model.train_on_batch(x, y)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


class Shifted(keras.layers.Layer):
    """Scale and shift, of one shape."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros")

    def call(self, inputs):
        return inputs * self.scale + self.shift


class ShiftedRule(Rule):
    def per_example_gradients(self):
        [inputs], [gradients] = self.call.args, self.output_gradients
        return [gradients * inputs, gradients]

    def clipped_sum(self, factors):
        return self.changed(super().clipped_sum, factors)


WRONG_SUMS = {
    "not clipped": lambda self, total, factors: total(tf.ones_like(factors)),
    "in another order": lambda self, total, factors: total(factors)[::-1],
}


@pytest.mark.parametrize("wrong", WRONG_SUMS)
def test_a_rule_whose_sum_is_wrong_is_refused(monkeypatch, wrong):
    monkeypatch.setattr(per_example.rule, "_RULES", dict(per_example.rule._RULES))
    register(Shifted)(type("Rule", (ShiftedRule,), {"changed": WRONG_SUMS[wrong]}))
    model = small.model(layers=[Shifted(), layers.Dense(3)])
    with pytest.raises(checks.UnfitForPrivacy, match="clipped sum.*disagrees"):
        model.fit(*small.data(), verbose=0)


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_an_example_at_a_kink_is_not_a_wrong_rule(monkeypatch, num_wrong):
    """A depthwise network with GroupNormalization was refused for one of five seeds."""
    exact, calls = batches_of_one._mean_gradient, []

    def at_kink(*args):
        *gradients, last = exact(*args)
        calls.append(last)
        is_wrong = len(calls) <= num_wrong
        return [
            *gradients,
            last + is_wrong * 0.004 * np.linalg.norm(last) * np.eye(1, last.size)[0],
        ]

    monkeypatch.setattr(batches_of_one, "_mean_gradient", at_kink)
    x, y = small.data()
    if num_wrong == 2:
        with pytest.raises(checks.UnfitForPrivacy, match="clipped sum.*disagrees"):
            small.model().fit(x, y, batch_size=len(x), verbose=0)
    else:
        small.model().fit(x, y, batch_size=len(x), verbose=0)
    assert len(calls) == 2


def test_only_a_rule_can_be_registered():
    with pytest.raises(TypeError, match="subclass of tfdpx.per_example.Rule"):
        register(Shifted)(int)
