"""`check_optimizer` passes honest optimizers with a close bound, and fails planted bugs."""

import random
from unittest import mock

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx
from tfdpx import audit, mechanism
from tfdpx.audit import white_box
from tfdpx.training import microbatches, preflight

QUICK = dict(compile_arguments={"jit_compile": False})
layers = keras.layers


def built(optimizer, features=6):
    inputs = keras.Input((features,))
    return small.model(optimizer, [inputs, layers.Dense(5, "relu"), layers.Dense(3)], **QUICK)


@pytest.mark.slow
def test_an_honest_optimizer_passes_with_a_close_bound_and_without_its_plan():
    plan = tfdpx.PrivacyPlan(100, batch_size=20, steps=5, noise_multiplier=4.0, delta=1e-3)
    individual = tfdpx.accounting.IndividualAccountant(plan)
    optimizer = tfdpx.DPSGD(0.5, plan=plan, l2_norm_clip=0.5, individual=individual, momentum=0.9)
    report = audit.check_optimizer(built(optimizer), optimizer, trials=600)
    assert report.passed, str(report)
    assert 0.7 * report.epsilon < report.epsilon_lower_bound <= report.epsilon
    assert 4.0 <= report.noise_multiplier_upper_bound < 4.0 / 0.7
    assert report.confidence == 0.999 and optimizer.individual.plan == plan
    exact = tfdpx.accounting.epsilon(4.0, 1.0, 1, 1e-3, "gdp")
    assert report.epsilon == pytest.approx(exact, rel=1e-3)
    assert "PASSED" in str(report) and f"{report.epsilon:.4g}" in str(report)


def scaled_noise(factor):
    def privatize(original, sums, noise_multiplier, batch_size, seed):
        return original(sums, noise_multiplier * factor, batch_size, seed)

    return mechanism, "privatize", privatize


def noise_of_one_seed(original, sums, noise_multiplier, batch_size, seed):
    return original(sums, noise_multiplier, batch_size, tf.constant([1, 2], tf.int64))


def none_on_one_variable(original, sums, *arguments):
    gradients = original(sums, *arguments)
    gradients[0].tensor = sums[0]
    return gradients


def forgotten_layer(original, optimizer, engine, update, inputs):
    result, sums = original(optimizer, engine, update, inputs)
    whole = result.clipped_sums(tf.ones_like(result.squared_norms) / optimizer.batch_size)
    return result, [whole[0], *sums[1:]]


def whole_batch(original, squared_norms, *arguments):
    rows = tf.cast(tf.shape(squared_norms)[0], "float32")
    return original(squared_norms * rows**2, *arguments)


def views_one_by_one(original, *arguments):
    result, sums = original(*arguments)
    return result, [4 * part for part in sums]


def weights_not_divided(original, weights, largest):
    return weights


def padding_counts(original, optimizer, model, data):
    x, y, weights = data
    return original(optimizer, model, (x, y, tf.ones_like(weights)))


PLANTED = {
    "half the noise": (scaled_noise(0.5), "noise on variable"),
    "two thirds": (scaled_noise(2 / 3), "noise on variable"),
    "too much": (scaled_noise(1.5), "noise on variable"),
    "one seed": ((mechanism, "privatize", noise_of_one_seed), "Noise repeats"),
    "one variable": ((mechanism, "privatize", none_on_one_variable), "noise on variable"),
    "one layer": ((microbatches, "compute", forgotten_layer), "Clipping does not bound"),
    "whole batch": ((mechanism, "clip_factors", whole_batch), "clipped as a whole"),
    "views": ((microbatches, "compute", views_one_by_one), "Clipping does not bound"),
    "class weights": (
        (mechanism, "weight_factors", weights_not_divided),
        "Clipping does not bound",
    ),
    "padding": (None, "Padding counts"),
}


def broken(name):
    """Returns a subclass with this bug."""
    where, _ = PLANTED[name]

    class Broken(tfdpx.DPSGD):
        def private_train_step(self, model, data):
            step = super().private_train_step
            if where is None:
                return padding_counts(lambda o, *rest: step(*rest), self, model, data)
            owner, attribute, planted = where
            original = getattr(owner, attribute)
            bug = mock.patch.object(owner, attribute, lambda *a: planted(original, *a))
            # The trace of the step is not checked: both checks would report the bug.
            check = mock.patch.object(preflight, "problems_of_microbatch", lambda *_: [])
            refusal = mock.patch("tfdpx.training.step.check_update", lambda *_: None)
            with bug, check, refusal:
                return step(model, data)

    return Broken


IN_CI = ("padding", "half the noise")
AT_NIGHT = pytest.mark.planted("an optimizer that is audited")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=AT_NIGHT) for name in PLANTED]
)
def test_planted_bugs_fail(name):
    views = 4 if name == "views" else 0
    optimizer = broken(name)(0.5, batch_size=16, noise_multiplier=1.0, augmult=views)
    few = ("one seed", "one variable", "whole batch", "padding")
    trials = 150 if name in few else 1000 if name == "two thirds" else 600
    report = audit.check_optimizer(built(optimizer), optimizer, trials=trials, seconds=15.0)
    assert not report.passed, str(report)
    assert PLANTED[name][1] in str(report) and "FAILED" in str(report)
    if name in ("half the noise", "two thirds", "one layer", "views", "class weights"):
        # The attack suffices to show it.
        assert report.epsilon_lower_bound > report.epsilon


@pytest.mark.slow
def test_model_optimizer_account_and_noise_stay_as_they_are():
    x, y = small.data()

    def train(check):
        model = small.model(noise_multiplier=1.0, seed=5, **QUICK)
        model.train_on_batch(x, y)
        optimizer, state = model.optimizer, random.getstate()
        held = [optimizer.ledger, optimizer.state.number]
        numbers = [v.numpy() for v in [*model.variables, *optimizer.variables]]
        if check:
            audit.check_optimizer(model, optimizer, trials=20)
        after = [v.numpy() for v in [*model.variables, *optimizer.variables]]
        assert all(map(np.array_equal, numbers, after))
        assert [optimizer.ledger, optimizer.state.number] == held
        assert random.getstate() == state and model.optimizer is optimizer
        model.train_on_batch(x, y)
        assert optimizer.ledger.steps == 2
        return small.weights(model)

    np.testing.assert_array_equal(train(False), train(True))


class Simulated:
    """Canaries of a simulated mechanism: one variable of 30 values."""

    factor = 1.0
    variables = (keras.Variable(np.zeros(30), name="v"),)

    def __init__(self, model, optimizer, count, x=None):
        self.count, self._generator = count, np.random.default_rng(self.seed)

    def updates(self, noise_multiplier):
        def update(present, direction):
            noise = self._generator.normal(size=30) * noise_multiplier * self.factor
            added = noise + np.eye(30)[0] * (self.count if present else 0)
            along = added @ np.asarray(direction[0], "float64")
            return [tf.constant(added, "float32")], along, tf.constant([added @ added]), 0.0

        return update


def failures(monkeypatch, audits, confidence, **arguments):
    monkeypatch.setattr(white_box, "Canaries", Simulated)
    optimizer = tfdpx.DPSGD(0.5, batch_size=16, noise_multiplier=2.0)
    model, failed = built(optimizer), 0
    for seed in range(audits):
        monkeypatch.setattr(Simulated, "seed", seed, raising=False)
        report = white_box.check_optimizer(model, optimizer, confidence=confidence, **arguments)
        failed += not report.passed
    return failed


def test_false_alarms_are_as_rare_as_stated(monkeypatch):
    # At most 10% of 100: 19 or more have a probability of 0.2%.
    assert failures(monkeypatch, 100, 0.9, trials=50) < 19


def test_less_noise_is_noticed_in_each_audit(monkeypatch):
    monkeypatch.setattr(Simulated, "factor", 2 / 3)
    assert failures(monkeypatch, 20, 0.999, trials=300) == 20


def test_unfit_audits_are_refused():
    model = built(tfdpx.DPSGD(0.5, batch_size=16, noise_multiplier=1.0))
    for other in (keras.optimizers.SGD(), tfdpx.heads.AdaMix(num_classes=3, epsilon=1.0)):
        with pytest.raises(TypeError, match="`optimizer` must be a tfdpx optimizer"):
            audit.check_optimizer(model, other)
    with pytest.warns(UserWarning, match="no noise"):
        without = tfdpx.DPSGD(0.5, batch_size=16, noise_multiplier=0.0)
    with pytest.raises(ValueError, match="noise_multiplier=0"):
        audit.check_optimizer(model, without)
    for name, value in dict(delta=1.0, confidence=0.0, trials=0, seconds=-1.0).items():
        with pytest.raises(ValueError, match=f"`{name}`"):
            audit.check_optimizer(model, model.optimizer, **{name: value})
    unbuilt = small.model(noise_multiplier=1.0, **QUICK)
    with pytest.raises(ValueError, match="pass `x`"):
        audit.check_optimizer(unbuilt, unbuilt.optimizer)
