"""Models that cannot be trained privately are refused before the first step, and others are not."""

import types

import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf

import tfdpx
from tfdpx import checks, per_example
from tfdpx.checks import batches_of_one
from tfdpx.per_example import Rule, register, rowwise

layers = keras.layers


class AddsALoss(layers.Layer):
    def call(self, x):
        self.add_loss(tf.reduce_mean(x**2))
        return x


def refused(model, match):
    with pytest.raises(checks.UnfitForPrivacy, match=match) as error:
        model.fit(*small.data(), verbose=0)
    assert int(model.optimizer.iterations) == 0
    return str(error.value)


UNFIT = [
    (
        lambda: [layers.BatchNormalization(), layers.Dense(3)],
        "batch_normalization.*replace_batch_norm.*`training=False` in the call is not enough",
    ),
    (
        lambda: [
            keras.Sequential([layers.BatchNormalization(name=name) for name in "abc"]),
            layers.Dense(3),
        ],
        r"training: \S*a/moving_mean, \S*a/moving_variance, \S*b/moving_mean, ... \(3 more\)",
    ),
    (lambda: [layers.Dense(3, activity_regularizer="l2")], "activity_regularizer"),
    (lambda: [AddsALoss(name="adds"), layers.Dense(3)], "add_loss.*adds"),
    (lambda: [layers.Dense(3, trainable=False)], "no trainable variables"),
    (
        lambda: [layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x))), layers.Dense(3)],
        "SeedGenerator",
    ),
]


@pytest.mark.parametrize("make, message", UNFIT)
def test_unfit_models_are_refused_before_the_first_step(make, message):
    refused(small.model(layers=make()), message)


OVERRIDES = {
    "train_step": lambda model: lambda data: keras.Model.train_step(model, data),
    "train_function": lambda model: lambda iterator: model.train_step(next(iterator)),
    "make_train_function": lambda model: types.MethodType(keras.Model.make_train_function, model),
}


@pytest.mark.parametrize("method", OVERRIDES)
def test_methods_of_an_instance_that_see_the_batch_first_are_refused(method):
    model = small.model(layers=[layers.Dense(3)])
    setattr(model, method, OVERRIDES[method](model))
    refused(model, f"overrides `{method}`")


class Mixes:
    def train_step(self, data):
        return super().train_step((0.5 * (data[0] + data[0][::-1]), data[1]))


class Derived(Mixes, keras.Sequential):
    """A model with the step of a base class that is no model."""


def test_a_step_of_a_base_class_is_refused():
    like, model = small.model(), Derived([layers.Dense(3)])
    model.compile(optimizer=like.optimizer, loss=like.loss)
    refused(model, "overrides `train_step`")


def test_float8_layers_are_refused_by_name():
    model = small.model(layers=[layers.Dense(3, name="head")])
    model.build((None, 6))
    optimizer, loss = model.optimizer, model.loss
    model.quantize("float8")
    model.compile(optimizer=optimizer, loss=loss)
    refused(model, "'head'.*float8")


def test_all_problems_are_listed_with_their_remedies():
    stack = [
        layers.SpectralNormalization(layers.Dense(4), name="spectral"),
        layers.Dense(3, activity_regularizer="l2", name="head"),
    ]
    model = small.model(layers=stack)
    wanted = [
        ("There are 2 problems:",),
        ("1. ", "'spectral'", "SpectralNormalization", "overwrites", "kernel_constraint"),
        ("2. ", "'head'", "without `activity_regularizer`"),
    ]
    lines = refused(model, "There are 2 problems").splitlines()
    assert len(lines) == len(wanted)
    for line, parts in zip(lines, wanted, strict=True):
        assert all(part in line for part in parts), line


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
    refused(small.model(layers=[Shifted(), layers.Dense(3)]), "clipped sum.*disagrees")


@pytest.mark.parametrize("num_wrong", [1, 2])
def test_an_example_at_a_kink_is_not_a_wrong_rule(monkeypatch, num_wrong):
    """A depthwise network with GroupNormalization was refused for one of five seeds."""
    exact, calls = batches_of_one._mean_gradient, []

    def at_kink(*args):
        *gradients, last = exact(*args)
        calls.append(last)
        is_wrong = len(calls) <= num_wrong
        shift = 0.004 * np.linalg.norm(last) * np.eye(1, last.size)[0]
        return [*gradients, last + is_wrong * shift]

    monkeypatch.setattr(batches_of_one, "_mean_gradient", at_kink)
    if num_wrong == 2:
        refused(small.model(), "clipped sum.*disagrees")
    else:
        small.model().train_on_batch(*small.data())
    assert len(calls) == 2


def test_only_a_rule_can_be_registered():
    with pytest.raises(TypeError, match="subclass of tfdpx.per_example.Rule"):
        register(Shifted)(int)


def fit_with_weights(model):
    """Calls `fit` on batches that may hold padding, so a pass may have any number of rows."""
    x, y = small.data()
    model.fit(x, y, sample_weight=np.ones(len(x), "float32"), verbose=0)


@pytest.mark.planted("a model that mixes is batched")
def test_a_mixing_model_that_is_batched_shows_in_the_comparison(monkeypatch):
    monkeypatch.setattr(rowwise, "find_obstacle", lambda model: None)
    mixer = layers.Lambda(lambda x: x - tf.reduce_mean(x, axis=0, keepdims=True))
    with pytest.raises(checks.UnfitForPrivacy, match="batches of one"):
        fit_with_weights(small.model(layers=[mixer, layers.Dense(3)]))


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
    model.build((None, 6))
    before = small.weights(model)
    run = model.train_on_batch if told(16) else lambda x, y: fit_with_weights(model)
    with pytest.raises(checks.UnfitForPrivacy, match="compute_metrics"):
        run(*small.data())
    np.testing.assert_array_equal(small.weights(model), before)
