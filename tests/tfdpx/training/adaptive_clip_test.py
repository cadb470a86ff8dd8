"""`tfdpx.AdaptiveClip`: the clip's path, its privacy, its noise, and how it is saved."""

import math
import pickle

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx import mechanism, noise

X, Y = small.data()
ABSENT = np.zeros(16, "float32")
GRAPH = {"jit_compile": False}
SIGMA, COUNT_NOISE = 2.0, 1.05  # The count takes most: the gradients have 3.3 times the noise.


@pytest.fixture(scope="module", name="quiet")
def _quiet():
    """A bench without noise, although its optimizer counts some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
        trainer = adaptive_bench(1.5, 0.3, 0.7, microbatch_size=3)
        trainer.step(X, Y)
    return trainer


@pytest.fixture(scope="module", name="noisy")
def _noisy():
    """A bench, and the noise of its first 300 updates; see `drawn`."""
    trainer = noisy_bench()
    return trainer, *drawn(trainer, 300)


def adaptive_bench(*clip, compile_arguments=GRAPH, **arguments):
    policy = tfdpx.AdaptiveClip(*clip)
    return bench.Bench(l2_norm_clip=policy, compile_arguments=compile_arguments, **arguments)


def noisy_bench(count_noise=COUNT_NOISE, **arguments):
    return adaptive_bench(1e3, 0.5, 1e-2, count_noise, **{"noise_multiplier": SIGMA, **arguments})


def drawn(trainer, count):
    """Returns the noise in the sums of (indicator - 1/2), and in the sums of gradients."""
    trainer.restore()
    clips, changes = [clip_of(trainer.model)], []
    for _ in range(count):
        changes.append(-16 * trainer.continue_step(X, Y, ABSENT))
        clips.append(clip_of(trainer.model))
    return -np.diff(np.log(clips)) / 1e-2 * 16, np.concatenate(changes)


def clip_of(built):
    return built.optimizer.clip_policy.l2_norm_clip


def test_the_clip_and_the_update_are_the_formulas(quiet):
    built, weight, wanted = quiet.model, np.ones(16, "float32"), 1.5
    weight[[2, 7, 15]] = 0.0
    quiet.restore()
    for _ in range(3):
        rows = batch_of_one_gradients(built, tf.constant(X), tf.constant(Y), None, 1)
        norms = np.linalg.norm(rows, axis=1)
        factors = (weight > 0) / np.maximum(norms, wanted) / 16
        change = quiet.continue_step(X, Y, weight)
        np.testing.assert_allclose(change, -(rows * factors[:, None]).sum(0), atol=3e-6)
        below = np.clip(0.5 - (norms / wanted - 1) / 0.1, 0, 1)
        share = 0.5 + ((below - 0.5) * (weight > 0)).sum() / 16
        wanted *= math.exp(-0.7 * (share - 0.3))
        assert clip_of(built) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize(("sigma", "count_noise", "batch_size"), [
    (1.0, None, 1000), (4.0, None, 16), (2.0, 1.01, 16), (2.0, 1e6, 16),
])  # fmt: skip
def test_both_releases_together_cost_what_the_ledger_counts(sigma, count_noise, batch_size):
    clip = tfdpx.AdaptiveClip(noise_multiplier=count_noise)
    optimizer = tfdpx.DPSGD(1.0, batch_size=batch_size, noise_multiplier=sigma, l2_norm_clip=clip)
    gradient_noise = optimizer.clip_policy.gradient_noise_multiplier
    count_noise = max(batch_size / 20, 2 * sigma) if count_noise is None else count_noise
    assert gradient_noise == pytest.approx((sigma**-2 - (2 * count_noise) ** -2) ** -0.5, rel=1e-6)
    # Two Gaussian mechanisms, of sensitivities 1 and 1/2.
    assert math.hypot(1 / gradient_noise, 1 / (2 * count_noise)) == pytest.approx(
        1 / sigma, rel=1e-9
    )
    assert optimizer.noise_multiplier == sigma


def test_the_gradients_have_what_the_count_leaves_of_the_noise(noisy):
    trainer, _, gradients = noisy
    left = trainer.optimizer.clip_policy.gradient_noise_multiplier
    assert left > 3 * SIGMA and np.std(gradients) == pytest.approx(left, rel=0.05)


def check_count_noise(draws):
    # Five deviations.
    assert abs(np.std(draws) / COUNT_NOISE - 1) < 0.2 and abs(np.mean(draws) / COUNT_NOISE) < 0.3
    assert len(np.unique(np.round(draws, 3))) > 200  # Each update has new noise.


def test_the_count_is_noisy(noisy):
    check_count_noise(noisy[1])


@pytest.mark.planted("the count has no noise")
def test_a_count_without_noise_is_noticed(monkeypatch):
    privatize = mechanism.privatize

    def planted(sums, *arguments):
        return [*privatize(sums[:-1], *arguments), *privatize(sums[-1:], 0.0, *arguments[1:])]

    monkeypatch.setattr(mechanism, "privatize", planted)
    with pytest.raises(AssertionError):
        check_count_noise(drawn(noisy_bench(), 300)[0])


def test_gradients_of_an_adversary_end_at_the_largest_clip(quiet):
    # Norms that are not finite, and labels of no class, which make the loss infinite.
    for x, y in ((np.nan * X, Y), (X, np.full(16, 9))):
        quiet.restore()
        quiet.optimizer.clip_policy._clip.assign(6e8)
        for _ in range(4):
            assert not quiet.continue_step(x, y).any()
        assert clip_of(quiet.model) == pytest.approx(1e9)


def test_a_clip_never_leaves_what_float32_can_clip_at():
    steep = adaptive_bench(1.0, 0.5, 1e4, batch_size=16)  # Learns by factors of 0 and infinity.
    for scale, wanted in ((1e-3, 1e-9), (np.nan, 1e9), (1e-3, 1e-9)):
        assert np.isfinite(steep.continue_step(scale * X, Y)).all()
        assert clip_of(steep.model) == pytest.approx(wanted)


def trained(**fit_arguments):
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=8, noise_multiplier=1.0, delta=1e-3)
    optimizer = tfdpx.DPAdam(0.1, plan=plan, l2_norm_clip=tfdpx.AdaptiveClip(), seed=3)
    built = small.model(optimizer, compile_arguments=GRAPH)
    history = built.fit(X, Y, epochs=4, verbose=0, **fit_arguments).history
    return built, history


@pytest.fixture(scope="module")
def unbroken():
    return trained()


@pytest.mark.slow
def test_the_history_has_each_epochs_clip_and_the_ledger_the_plans_noise(unbroken):
    built, history = unbroken
    assert history["l2_norm_clip"][-1] == clip_of(built) != 1.0
    assert len(history["l2_norm_clip"]) == 4
    ledger, plan = built.optimizer.ledger, built.optimizer.plan
    assert ledger.epsilon(1e-3) == pytest.approx(plan.epsilon, rel=1e-9)
    assert ledger.entries[0].noise_multiplier == 1.0


@pytest.mark.slow
def test_after_the_plans_end_the_data_move_it_no_more(monkeypatch):
    """A compiled step has no errors, so it then releases only noise, here none."""
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
    trainer = adaptive_bench(1.5, 0.3, 0.7)
    step = tf.function(trainer.model.train_step, jit_compile=True, autograph=False)
    for scale in (1.0, 1e3):
        trainer.restore()
        trainer.optimizer.state.end_after(0)
        step((tf.constant(np.float32(scale) * X), tf.constant(Y), tf.ones(16)))
        assert clip_of(trainer.model) == pytest.approx(1.5 * math.exp(-0.7 * (0.5 - 0.3)))


def test_files_and_copies_keep_the_clip(quiet, tmp_path):
    quiet.step(X, Y)
    quiet.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for copy in (loaded, pickle.loads(pickle.dumps(quiet.model))):
        assert clip_of(copy) == clip_of(quiet.model) != 1.5
        assert copy.optimizer.get_config()["l2_norm_clip"]["config"]["quantile"] == 0.3
        assert copy.optimizer.clip_policy.initial == 1.5


def test_a_policy_serves_several_optimizers():
    policy = tfdpx.AdaptiveClip()
    first, second = (small.model(l2_norm_clip=policy) for _ in range(2))
    first.optimizer.clip_policy._clip.assign(3.0)
    assert clip_of(first) == 3.0 and clip_of(second) == policy.l2_norm_clip == 1.0


def test_arguments_out_of_range_are_refused():
    for arguments, error in (
        ({"quantile": 0.0}, "`quantile` must lie strictly between 0 and 1"),
        ({"quantile": 1}, "`quantile`"),
        ({"quantile": math.nan}, "`quantile`"),
        ({"initial": 0.0}, "`initial` must lie in"),
        ({"initial": math.inf}, "`initial`"),
        ({"learning_rate": 0.0}, "`learning_rate` must be a finite float > 0"),
        ({"noise_multiplier": -1.0}, "`noise_multiplier` must lie in"),
        ({"noise_multiplier": 1e300}, "`noise_multiplier` must lie in"),
    ):
        with pytest.raises(ValueError, match=error):
            tfdpx.AdaptiveClip(**arguments)
    for count_noise in (0.0, 0.6, 1.0):  # The count would reveal too much.
        with pytest.raises(ValueError, match="must exceed half of the optimizer's, 1: .*Give 4 or"):
            noisy_bench(count_noise, noise_multiplier=2.0)


def test_a_metric_must_not_take_its_name():
    metric = keras.metrics.SparseCategoricalAccuracy(name="l2_norm_clip")
    trainer = adaptive_bench(compile_arguments={**GRAPH, "metrics": [metric]})
    with pytest.raises(ValueError, match="Rename the metric"):
        trainer.model.train_on_batch(X, Y)
