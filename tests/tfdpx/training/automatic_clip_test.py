"""`l2_norm_clip="automatic"`: the update, its sensitivity, and the optimizers that accept it."""

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx import mechanism, noise
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training.clipping import AutomaticClip, ClipPolicy

X, Y = small.data()


def quiet_bench(clip="automatic", x=X, **arguments):
    """Returns a bench without noise, although its optimizer counts some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
        trainer = bench.Bench(l2_norm_clip=clip, **arguments)
        trainer.step(x, Y)
    return trainer


@pytest.fixture(scope="module", name="quiet")
def _quiet():
    return quiet_bench(microbatch_size=3)


def moved(trainer, scale=1e4):
    """Returns how far one example more moves the update, in units of 1/B."""
    x = X.copy()
    x[-1] *= np.float32(scale)
    trainer.restore()
    y = np.append(Y[:-1], trainer.model(x[-1:]).numpy().argmin())  # The worst label.
    return trainer.influence(x, y, 15)


def test_the_update_is_the_formula(quiet):
    quiet.restore()
    gradients = batch_of_one_gradients(quiet.model, tf.constant(X), tf.constant(Y), None, 1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    wanted = -(gradients / (norms + 0.01)).sum(0) / 16
    np.testing.assert_allclose(quiet.step(X, Y), wanted, atol=2e-6)


@pytest.mark.parametrize("scale", [1e4, 1.0, 1e15])
def test_an_example_moves_it_by_less_than_one(quiet, scale):
    assert 0.9 < moved(quiet, scale) <= 1 + 1e-5


def test_views_of_an_example_count_as_one():
    rng = np.random.default_rng(1)
    views = X[:, np.newaxis] + rng.normal(0, 0.1, (16, 3, 6)).astype("float32")
    views[-1] *= 1e4
    trainer = quiet_bench(x=views, augmult=3)
    trainer.restore()
    y = np.append(Y[:-1], trainer.model(views[-1]).numpy().sum(axis=0).argmin())
    assert 0.9 < trainer.influence(views, y, 15) <= 1 + 1e-5


def test_factors_bound_what_is_really_added():
    """In float32, for norms of any size: `norm * factor` is below 1, never above."""
    norms = (10.0 ** np.linspace(-22, 19, 200_001)).astype("float32")
    squares = np.nextafter(np.square(norms.astype("float64")).astype("float32"), np.float32(np.inf))
    for stability in (0.7, 0.01, 1e-9):
        policy = AutomaticClip(stability)
        factors = policy.clip(tf.constant(squares), tf.fill(norms.shape, True), 1, None).numpy()
        assert (factors.astype("float64") * norms < 1).all()
        normal = norms > 1e-15  # Smaller squares lose digits.
        wanted = 1 / (norms[normal].astype("float64") + stability)
        np.testing.assert_allclose(factors[normal], wanted, rtol=1e-5)


class TooLong(AutomaticClip):
    def clip(self, *args):
        return 1.01 * super().clip(*args)


class TooLongForSome(AutomaticClip):
    """`AutomaticClip` up to a norm that no example of the first step's check has."""

    sign = 1.0

    def clip(self, squared_norms, *args):
        factors = super().clip(squared_norms, *args)
        return tf.where(squared_norms > 1e10, self.sign * 100.0 * factors, factors)


class Backwards(TooLongForSome):
    sign = -1.0


class ByOthers(ClipPolicy):
    """A policy by which one example shortens the gradients of all others."""

    def clip(self, squared_norms, present, batch_size, clips):
        longest = tf.reduce_max(tf.where(present, tf.sqrt(squared_norms), 0.0))
        return tf.fill(present.shape, 1.0 / longest / batch_size)


def test_policies_that_bound_nothing_are_refused():
    with pytest.raises(UnfitForPrivacy, match="TooLong.*/ batch_size"):
        quiet_bench(TooLong(1e-6))
    with pytest.raises(UnfitForPrivacy, match="ByOthers decides on an example by the norms of oth"):
        quiet_bench(ByOthers(1.0))


@pytest.mark.parametrize("policy", [TooLongForSome, Backwards])
def test_the_step_bounds_what_the_check_does_not_see(policy):
    assert 0.9 < moved(quiet_bench(policy()), 1e8) <= 1 + 1e-5


@pytest.mark.planted("factors of a policy are not bounded")
@pytest.mark.parametrize("policy", [TooLongForSome, Backwards])
def test_a_step_without_a_bound_is_noticed(monkeypatch, policy):
    monkeypatch.setattr(mechanism, "cap_to_sensitivity", lambda factors, *rest: factors)
    assert moved(quiet_bench(policy()), 1e8) > 50


def test_configurations_and_files_keep_the_word(quiet, tmp_path):
    for make in (tfdpx.DPAdam, tfdpx.make_private(keras.optimizers.Lion)):
        optimizer = make(0.1, batch_size=16, noise_multiplier=1.0, l2_norm_clip="automatic")
        assert optimizer.l2_norm_clip == 1.0
        config = optimizer.get_config()
        assert config["l2_norm_clip"] == "automatic"
        assert type(make.from_config(config).clip_policy) is AutomaticClip
    quiet.step(X, Y)
    quiet.model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert type(again.clip_policy) is AutomaticClip
    assert again.ledger.steps == quiet.optimizer.ledger.steps > 0


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match='must be a float > 0, "automatic" or a clip policy'):
        small.model(l2_norm_clip="auto")
    for stability in (0.0, -1.0, np.inf, np.nan, "0.1", True):
        with pytest.raises(ValueError, match="`stability` must be a finite float >= 1e-09"):
            AutomaticClip(stability)
