"""`DPAdam(bias_correction="noise")`: unbiased on pure noise, and Adam's own update without it."""

import math

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow

import tfdpx
from tfdpx import audit, mechanism
from tfdpx._keras import model_internals
from tfdpx.training.clip_policy import ClipPolicy, UpdateClip

X, Y = small.data()
ABSENT = np.zeros(16, "float32")


class Breathing(ClipPolicy):
    """Noise of another size in every update, as where the clip follows public examples."""

    def build(self, optimizer):
        self._iterations = optimizer.iterations

    def begin(self, *args):
        scale = tf.pow(4.0, tf.cast(self._iterations.value % 3, "float32"))
        return UpdateClip((), lambda private: [g.times(scale) for g in private])


def model(optimizer=tfdpx.DPAdam, clip=1.0, width=5, compile_arguments=None, **arguments):
    arguments = {"bias_correction": "noise", "batch_size": 16, "noise_multiplier": 2.0} | arguments
    made = optimizer(0.01, l2_norm_clip=clip, seed=1, **arguments)

    def layers():
        return [keras.layers.Dense(width, "relu"), keras.layers.Dense(3)]

    compile_arguments = compile_arguments or {"jit_compile": False}
    built = small.model(made, layers, compile_arguments=compile_arguments)
    built.build(X.shape)
    return built


def mean_of_second_moments(clip=1.0, updates=30, deviation=2.0 / 16, **arguments):
    """After updates without an example, over the variance that the noise is said to have."""
    built = model(clip=clip, width=800, **arguments)
    data = tf.data.Dataset.from_tensors((X, Y, ABSENT)).repeat(updates)
    built.fit(data, verbose=0)
    pairs = [model_internals.adam_moments(built.optimizer, v) for v in built.trainable_variables]
    seconds = np.concatenate([np.ravel(second.numpy()) for _, second in pairs])
    return seconds.mean() / (1 - 0.999**updates) / deviation**2


# Five deviations of an average of 30 squares of each of 8,003 values.
CHANCE = 5 * math.sqrt(2 / 30 / 8003)
COSTLY = tfdpx.AdaptiveClip(noise_multiplier=1.05)  # Gradients have three times the noise.


@pytest.mark.parametrize(("clip", "times"), [
    slow(1.0, 1.0), (COSTLY, 3.28), (Breathing(1.0), 10.0), slow("automatic", 1.0), slow(0.01, 1.0),
])  # fmt: skip
@pytest.mark.parametrize("optimizer", [tfdpx.DPAdam, slow(tfdpx.DPAdamW)])
def test_pure_noise_leaves_nothing(clip, times, optimizer):
    found = mean_of_second_moments(clip, optimizer=optimizer)
    assert abs(found) < CHANCE * times**2


@pytest.mark.slow
def test_without_the_correction_the_variance_is_left():
    found = mean_of_second_moments(bias_correction=None)
    assert abs(found - 1) < CHANCE


@pytest.mark.parametrize(("clip", "planted"), [
    (COSTLY, lambda d: 2.0 / 16),  # The optimizer's, not the gradients'.
    slow(Breathing(1.0), lambda d: 4.0 * 2.0 / 16),  # Another update's.
    slow(1.0, lambda d: d * 16),  # On the sum.
])  # fmt: skip
def test_another_variance_is_noticed(monkeypatch, clip, planted):
    original = tfdpx.DPAdam.opened

    def opened(self, gradient):
        found = original(self, gradient)
        found.deviation = planted(found.deviation)
        return found

    monkeypatch.setattr(tfdpx.DPAdam, "opened", opened)
    with pytest.raises(AssertionError):
        test_pure_noise_leaves_nothing(clip, 10.0 if clip is not COSTLY else 3.28, tfdpx.DPAdam)


@pytest.mark.parametrize("arguments", [{}, slow({"compile_arguments": {"jit_compile": True}})])
def test_the_update_is_the_formula(monkeypatch, arguments):
    privatize = mechanism.privatize
    built = model(least_second_moment=0.3, **arguments)
    built.optimizer.epsilon = 1e-4
    noted = tf.Variable(tf.zeros([sum(math.prod(v.shape) for v in built.trainable_variables)]))

    def note(sums, *rest):
        found = privatize(sums, *rest)
        noted.assign(tf.concat([tf.reshape(g.tensor, [-1]) for g in found], 0))
        return found

    monkeypatch.setattr(mechanism, "privatize", note)
    first = second = 0.0
    for step in range(1, 5):
        change = small.step(built, X, Y)
        gradient = noted.numpy().astype("float64")
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        variance = (2.0 / 16) ** 2
        moment = np.maximum(second / (1 - 0.999**step) - variance, 0.3 * variance)
        wanted = -0.01 * first / (1 - 0.9**step) / (np.sqrt(moment) + 1e-4)
        np.testing.assert_allclose(change, wanted, rtol=2e-3, atol=2e-5)


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [tfdpx.DPAdam, tfdpx.DPAdamW])
def test_without_noise_it_is_adam(optimizer):
    both = [
        model(optimizer, noise_multiplier=0.0, bias_correction=name, epsilon=1e-12)
        for name in (None, "noise")
    ]
    for _ in range(3):
        plain, corrected = (small.step(each, X, Y) for each in both)
        np.testing.assert_allclose(plain, corrected, rtol=1e-3, atol=1e-6)


def test_weights_of_16_bits_all_move():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        built = model()
        assert np.mean(small.step(built, X, Y).astype("float32") == 0) < 0.1
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.slow
def test_the_ledger_is_the_same():
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=2, noise_multiplier=2.0, delta=1e-3)
    built = model(plan=plan, batch_size=None, noise_multiplier=None)
    built.fit(X, Y, verbose=0)
    assert built.optimizer.ledger.epsilon(1e-3) == pytest.approx(plan.epsilon, rel=1e-9)


def test_configurations_and_files_keep_it(tmp_path):
    built = model(least_second_moment=0.5)
    small.step(built, X, Y)
    built.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert (again.bias_correction, again.least_second_moment) == ("noise", 0.5)
    for before, after in zip(built.optimizer.variables, again.variables, strict=True):
        np.testing.assert_array_equal(before.numpy(), after.numpy())
    assert tfdpx.make_private(keras.optimizers.Adam) is tfdpx.DPAdam


@pytest.mark.slow
def test_the_audit_passes():
    built = model(batch_size=8)
    report = audit.check_optimizer(built, built.optimizer, trials=100)
    assert report.passed, str(report)


@pytest.mark.parametrize(("arguments", "error"), [
    ({"bias_correction": True}, "`bias_correction` must be one of"),
    ({"least_second_moment": 0.0}, "`least_second_moment` must be a finite float > 0"),
    ({"least_second_moment": math.inf}, "`least_second_moment`"),
    ({"amsgrad": True}, "`bias_correction` and `amsgrad` exclude each other"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        model(**arguments)
