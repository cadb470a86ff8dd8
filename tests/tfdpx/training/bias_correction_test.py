"""`DPAdam(bias_correction="noise")`: unbiased on pure noise, and Adam's own update without it."""

import math

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow

import tfdpx
from tfdpx import mechanism
from tfdpx._keras import model_internals

X, Y = small.data()
ABSENT = np.zeros(16, "float32")


def bias_bench(optimizer=tfdpx.DPAdam, clip=1.0, width=5, **arguments):
    arguments = {"bias_correction": "noise", "batch_size": 16, "noise_multiplier": 2.0} | arguments
    private = optimizer(0.01, l2_norm_clip=clip, seed=1, **arguments)

    def layers():
        return [keras.layers.Dense(width, "relu"), keras.layers.Dense(3)]

    return bench.Bench(private, layers, compile_arguments={"jit_compile": False})


WIDTH, UPDATES = 200, 30
# Five deviations of an average of 30 squares of each of 2,003 values.
CHANCE = 5 * math.sqrt(2 / UPDATES / (10 * WIDTH + 3))
COSTLY = tfdpx.AdaptiveClip(noise_multiplier=1.05)  # Gradients have three times the noise.


def mean_of_second_moments(**arguments):
    """Returns the mean second moment of updates without examples, over the noise's variance."""
    trainer = bias_bench(width=WIDTH, **arguments)
    for _ in range(UPDATES):
        trainer.continue_step(X, Y, ABSENT)
    variables = trainer.model.trainable_variables
    pairs = [model_internals.adam_moments(trainer.optimizer, v) for v in variables]
    seconds = np.concatenate([np.ravel(second.numpy()) for _, second in pairs])
    return seconds.mean() / (1 - 0.999**UPDATES) / (2.0 / 16) ** 2


@pytest.mark.parametrize(("optimizer", "clip", "times"), [
    (tfdpx.DPAdam, COSTLY, 3.28), (tfdpx.DPAdamW, COSTLY, 3.28),
    slow(tfdpx.DPAdam, 0.01, 1.0),
])  # fmt: skip
def test_pure_noise_leaves_nothing(optimizer, clip, times):
    mean = mean_of_second_moments(clip=clip, optimizer=optimizer)
    assert abs(mean) < CHANCE * times**2


@pytest.mark.planted("the second moments keep the noise")
def test_without_the_correction_the_variance_is_left():
    mean = mean_of_second_moments(bias_correction=None)
    assert abs(mean - 1) < CHANCE


@pytest.mark.planted("another variance is taken off")
@pytest.mark.parametrize(("clip", "times", "planted"), [
    pytest.param(COSTLY, 3.28, lambda d: 2.0 / 16, id="the optimizer's, not the gradients'"),
    pytest.param(1.0, 1.0, lambda d: d * 16, id="the sum's"),
])  # fmt: skip
def test_another_variance_is_noticed(monkeypatch, clip, times, planted):
    original = tfdpx.DPAdam.check_gradient

    def check_gradient(self, gradient):
        result = original(self, gradient)
        result.deviation = planted(result.deviation)
        return result

    monkeypatch.setattr(tfdpx.DPAdam, "check_gradient", check_gradient)
    with pytest.raises(AssertionError):
        test_pure_noise_leaves_nothing(tfdpx.DPAdam, clip, times)


PLAN = tfdpx.PrivacyPlan(16, batch_size=16, steps=9, noise_multiplier=2.0, delta=1e-3)


@pytest.fixture(scope="module", name="noted")
def _noted():
    """A bench, and a variable that holds the last private gradient."""
    privatize = mechanism.privatize
    trainer = bias_bench(
        least_second_moment=0.3, epsilon=1e-4, plan=PLAN, batch_size=None, noise_multiplier=None
    )
    size = sum(math.prod(v.shape) for v in trainer.model.trainable_variables)
    gradient = tf.Variable(tf.zeros([size]))

    def note(sums, *rest):
        noisy = privatize(sums, *rest)
        gradient.assign(tf.concat([tf.reshape(g.tensor, [-1]) for g in noisy], 0))
        return noisy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mechanism, "privatize", note)
        trainer.step(X, Y)
    return trainer, gradient


def test_the_update_is_the_formula(noted):
    trainer, noisy = noted
    trainer.restore()
    first = second = 0.0
    for step in range(1, 5):
        change = trainer.continue_step(X, Y)
        gradient = noisy.numpy().astype("float64")
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        variance = (2.0 / 16) ** 2
        moment = np.maximum(second / (1 - 0.999**step) - variance, 0.3 * variance)
        wanted = -0.01 * first / (1 - 0.9**step) / (np.sqrt(moment) + 1e-4)
        np.testing.assert_allclose(change, wanted, rtol=2e-3, atol=2e-5)


def test_weights_of_16_bits_all_move():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        assert np.mean(bias_bench().step(X, Y).astype("float32") == 0) < 0.1
    finally:
        keras.config.set_dtype_policy(policy)


def test_files_keep_it_and_the_ledger_is_the_same(noted, tmp_path):
    built = noted[0].model
    ledger = built.optimizer.ledger
    wanted = PLAN.ledger_at(ledger.steps).epsilon(1e-3)
    assert ledger.epsilon(1e-3) == pytest.approx(wanted, rel=1e-9)
    built.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert (again.bias_correction, again.least_second_moment) == ("noise", 0.3)
    for before, after in zip(built.optimizer.variables, again.variables, strict=True):
        np.testing.assert_array_equal(before.numpy(), after.numpy())
    assert tfdpx.make_private(keras.optimizers.Adam) is tfdpx.DPAdam


def test_options_that_do_not_fit_are_refused():
    for arguments, error in (
        ({"bias_correction": True}, "`bias_correction` must be one of"),
        ({"least_second_moment": 0.0}, "`least_second_moment` must be a finite float > 0"),
        ({"least_second_moment": math.inf}, "`least_second_moment`"),
        ({"amsgrad": True}, "`bias_correction` and `amsgrad` exclude each other"),
    ):
        with pytest.raises(ValueError, match=error):
            tfdpx.DPAdam(0.1, batch_size=16, noise_multiplier=2.0, **{
                "bias_correction": "noise", **arguments
            })  # fmt: skip
