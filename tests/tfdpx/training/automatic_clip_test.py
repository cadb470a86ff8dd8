"""`l2_norm_clip="automatic"`: the update, its sensitivity, and what takes it."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx import audit, mechanism, noise
from tfdpx.accounting import statement
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training.automatic_clip import AutomaticClip
from tfdpx.training.clip_policy import ClipPolicy

X, Y = small.data()


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))


def model(clip="automatic", **kwargs):
    return small.model(l2_norm_clip=clip, **kwargs)


def expected(built, stability=0.01):
    built.build(X.shape)
    gradients = batch_of_one_gradients(built, tf.constant(X), tf.constant(Y), None, 1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return -(gradients / (norms + stability)).sum(0) / 16


@pytest.mark.parametrize("arguments", [
    {}, {"microbatch_size": 3, "compile_arguments": {"jit_compile": True}},
    slow({"per_example_engine": "vmap"}),
])  # fmt: skip
def test_the_update_is_the_formula(without_noise, arguments):
    built = model(**arguments)
    np.testing.assert_allclose(expected(built), small.step(built, X, Y), atol=2e-6)


def test_another_constant(without_noise):
    built = model(AutomaticClip(stability=0.7))
    np.testing.assert_allclose(expected(built, 0.7), small.step(built, X, Y), atol=2e-6)


def moved(clip="automatic", scale=1e4, **arguments):
    """How far one example more moves the update, in units of 1/B."""
    x = X.copy()
    x[-1] *= scale
    y = np.append(Y[:-1], model()(x[-1:]).numpy().argmin())  # The worst for it.
    weight = np.append(np.ones(15, "float32"), 0.0)
    steps = [small.step(model(clip, **arguments), x, y, *w) for w in ((), (weight,))]
    return np.linalg.norm(steps[0].astype("float64") - steps[1]) * 16


@pytest.mark.parametrize("scale", [1e4, slow(1.0), slow(1e15)])
def test_an_example_moves_it_by_less_than_one(without_noise, scale):
    assert 0.9 < moved(scale=scale) <= 1 + 1e-5


@pytest.mark.slow
def test_views_of_an_example_count_as_one(without_noise):
    views = dict(augmult=3, augment=tfdpx.augment.LayerViews(keras.layers.GaussianNoise(0.1)))
    assert 0.9 < moved(**views) <= 1 + 1e-5


def test_factors_bound_what_is_really_added():
    """In float32, for norms of any size: `norm * factor` is below 1, never above."""
    norms = (10.0 ** np.linspace(-22, 19, 200_001)).astype("float32")
    squares = np.nextafter(np.square(norms.astype("float64")).astype("float32"), np.float32(np.inf))
    for stability in (0.01, 1e-9):
        policy = AutomaticClip(stability)
        factors = policy.factors(tf.constant(squares), tf.fill(norms.shape, True), 1).numpy()
        assert (factors.astype("float64") * norms < 1).all()


class TooLong(AutomaticClip):
    def factors(self, *args):
        return 1.01 * super().factors(*args)


class TooLongForSome(AutomaticClip):
    """As `AutomaticClip` up to a norm that no example of the first step's check has."""

    sign = 1.0

    def factors(self, squared_norms, *args):
        factors = super().factors(squared_norms, *args)
        return tf.where(squared_norms > 1e4, self.sign * 100.0 * factors, factors)


class Backwards(TooLongForSome):
    sign = -1.0


class ByOthers(ClipPolicy):
    """An example more makes the gradients of all others shorter."""

    def factors(self, squared_norms, present, batch_size, *clips):
        longest = tf.reduce_max(tf.where(present, tf.sqrt(squared_norms), 0.0))
        return tf.fill(present.shape, 1.0 / longest / batch_size)


def test_factors_above_one_over_b_are_refused():
    with pytest.raises(UnfitForPrivacy, match="TooLong.*/ batch_size"):
        small.step(model(TooLong(1e-6)), X, Y)


@pytest.mark.parametrize("policy", [TooLongForSome, Backwards])
def test_the_step_bounds_what_the_check_does_not_see(without_noise, monkeypatch, policy):
    assert 0.9 < moved(policy()) <= 1 + 1e-5
    monkeypatch.setattr(mechanism, "bounded", lambda factors, *rest: factors)
    assert moved(policy()) > 50


def test_a_policy_that_looks_at_others_is_refused():
    with pytest.raises(UnfitForPrivacy, match="ByOthers decides on an example by the norms of oth"):
        small.step(model(ByOthers(1.0)), X, Y)


def test_nonfinite_examples_add_nothing(without_noise):
    x = X.copy()
    x[3] = np.nan
    built = model()
    assert np.isfinite(small.step(built, x, Y)).all() and built.optimizer.nonfinite_examples == 1


@pytest.mark.parametrize("made", [tfdpx.DPAdam, slow(tfdpx.make_private(keras.optimizers.Lion))])
def test_configurations_and_files_keep_the_word(made, tmp_path):
    optimizer = made(0.1, batch_size=16, noise_multiplier=1.0, l2_norm_clip="automatic")
    assert optimizer.l2_norm_clip == 1.0 and optimizer.get_config()["l2_norm_clip"] == "automatic"
    built = small.model(optimizer)
    built.train_on_batch(X, Y)
    built.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert type(again.clip_policy) is AutomaticClip and again.ledger.steps == 1


def test_another_constant_is_in_the_configuration():
    config = model(AutomaticClip(0.5)).optimizer.get_config()
    assert tfdpx.DPSGD.from_config(config).clip_policy.stability == 0.5


@pytest.mark.slow
def test_the_audit_finds_a_tight_bound():
    built = model(batch_size=8, noise_multiplier=2.0, seed=None)
    built.build((None, 6))
    report = audit.check_optimizer(built, built.optimizer, trials=150)
    assert report.passed, str(report)
    assert 0.5 * report.epsilon < report.epsilon_lower_bound <= report.epsilon


@pytest.mark.parametrize(("arguments", "error"), [
    ({"clip": "auto"}, '`l2_norm_clip` must be a float > 0, "automatic" or a clip policy'),
    ({"clip": "automatic", "public_data": (X, Y)}, "public_data.*makes a clip policy"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        model(**arguments)


@pytest.mark.parametrize("stability", [0.0, -1.0, np.inf, np.nan, "0.1", True])
def test_a_stability_that_bounds_nothing_is_refused(stability):
    with pytest.raises(ValueError, match="`stability` must be a finite float >= 1e-09"):
        AutomaticClip(stability)


def test_the_statement_names_what_is_done():
    ledger = tfdpx.PrivacyPlan(
        60, batch_size=10, steps=3, noise_multiplier=2.0, delta=1e-3
    ).ledger_at(3)
    text = " ".join(statement.text(ledger, 1e-3, l2_norm_clip="automatic").split())
    assert "gradient of each example is divided by its L2 norm plus a constant" in text
