"""Clip policies: `tfdpx.AdaptiveClip`, `l2_norm_clip="automatic"`, and those that bound nothing."""

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
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training.clipping import AutomaticClip, ClipPolicy

X, Y = small.data()
ABSENT = np.zeros(16, "float32")
GRAPH = {"jit_compile": False}
SIGMA, COUNT_NOISE = 2.0, 1.05  # The count takes most: the gradients have 3.3 times the noise.


def bench_of(clip, **arguments):
    return bench.Bench(l2_norm_clip=clip, compile_arguments=GRAPH, **arguments)


def quiet_bench(clip="automatic", x=X, **arguments):
    """Returns a bench without noise, although its optimizer counts some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
        trainer = bench_of(clip, **arguments)
        trainer.step(x, Y)
    return trainer


@pytest.fixture(scope="module", name="adaptive")
def _adaptive():
    return quiet_bench(tfdpx.AdaptiveClip(1.5, 0.3, 0.7), microbatch_size=3)


@pytest.fixture(scope="module", name="automatic")
def _automatic():
    return quiet_bench(microbatch_size=3)


@pytest.fixture(scope="module", name="noisy")
def _noisy():
    """A bench, and the noise of its first 300 updates; see `drawn`."""
    trainer = noisy_bench()
    return trainer, *drawn(trainer, 300)


def noisy_bench(count_noise=COUNT_NOISE, noise_multiplier=SIGMA):
    policy = tfdpx.AdaptiveClip(1e3, 0.5, 1e-2, count_noise)
    return bench_of(policy, noise_multiplier=noise_multiplier)


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


def test_the_clip_and_the_update_are_the_formulas(adaptive):
    built, weight, wanted = adaptive.model, np.ones(16, "float32"), 1.5
    weight[[2, 7, 15]] = 0.0
    adaptive.restore()
    for _ in range(3):
        rows = batch_of_one_gradients(built, tf.constant(X), tf.constant(Y), None, 1)
        norms = np.linalg.norm(rows, axis=1)
        factors = (weight > 0) / np.maximum(norms, wanted) / 16
        change = adaptive.continue_step(X, Y, weight)
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


def test_gradients_of_an_adversary_end_at_the_largest_clip(adaptive):
    # Norms that are not finite, and labels of no class, which make the loss infinite.
    for x, y in ((np.nan * X, Y), (X, np.full(16, 9))):
        adaptive.restore()
        adaptive.optimizer.clip_policy._clip.assign(6e8)
        for _ in range(4):
            assert not adaptive.continue_step(x, y).any()
        assert clip_of(adaptive.model) == pytest.approx(1e9)


def test_a_clip_never_leaves_what_float32_can_clip_at():
    steep = bench_of(tfdpx.AdaptiveClip(1.0, 0.5, 1e4))  # Learns by factors of 0 and infinity.
    for scale, wanted in ((1e-3, 1e-9), (np.nan, 1e9), (1e-3, 1e-9)):
        assert np.isfinite(steep.continue_step(scale * X, Y)).all()
        assert clip_of(steep.model) == pytest.approx(wanted)


@pytest.mark.slow
def test_the_history_has_each_epochs_clip_and_the_ledger_the_plans_noise():
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=8, noise_multiplier=1.0, delta=1e-3)
    optimizer = tfdpx.DPAdam(0.1, plan=plan, l2_norm_clip=tfdpx.AdaptiveClip(), seed=3)
    built = small.model(optimizer, compile_arguments=GRAPH)
    history = built.fit(X, Y, epochs=4, verbose=0).history
    assert history["l2_norm_clip"][-1] == clip_of(built) != 1.0
    assert len(history["l2_norm_clip"]) == 4
    [entry] = optimizer.ledger.entries
    assert entry.noise_multiplier == 1.0 and entry.steps == 8


@pytest.mark.slow
def test_after_the_plans_end_the_data_move_it_no_more(monkeypatch):
    """A compiled step has no errors, so it then releases only noise, here none."""
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
    trainer = bench_of(tfdpx.AdaptiveClip(1.5, 0.3, 0.7))
    step = tf.function(trainer.model.train_step, jit_compile=True, autograph=False)
    for scale in (1.0, 1e3):
        trainer.restore()
        trainer.optimizer.state.end_after(0)
        step((tf.constant(np.float32(scale) * X), tf.constant(Y), tf.ones(16)))
        assert clip_of(trainer.model) == pytest.approx(1.5 * math.exp(-0.7 * (0.5 - 0.3)))


def test_files_and_copies_keep_the_clip(adaptive, tmp_path):
    adaptive.step(X, Y)
    adaptive.model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for copy in (loaded, pickle.loads(pickle.dumps(adaptive.model))):
        assert clip_of(copy) == clip_of(adaptive.model) != 1.5
        assert copy.optimizer.get_config()["l2_norm_clip"]["config"]["quantile"] == 0.3
        assert copy.optimizer.clip_policy.initial == 1.5


def test_a_policy_serves_several_optimizers():
    policy = tfdpx.AdaptiveClip()
    first, second = (small.model(l2_norm_clip=policy) for _ in range(2))
    first.optimizer.clip_policy._clip.assign(3.0)
    assert clip_of(first) == 3.0 and clip_of(second) == policy.l2_norm_clip == 1.0


def test_arguments_out_of_range_are_refused():
    quantile, initial = "`quantile` must lie strictly between 0 and 1", "`initial` must lie in"
    for make, arguments, error in (
        *((tfdpx.AdaptiveClip, {"quantile": value}, quantile) for value in (0.0, 1, math.nan)),
        *((tfdpx.AdaptiveClip, {"initial": value}, initial) for value in (0.0, math.inf)),
        (tfdpx.AdaptiveClip, {"learning_rate": 0.0}, "`learning_rate` must be a finite float > 0"),
        (tfdpx.AdaptiveClip, {"noise_multiplier": -1.0}, "`noise_multiplier` must lie in"),
        (tfdpx.AdaptiveClip, {"noise_multiplier": 1e300}, "`noise_multiplier` must lie in"),
        *(
            (AutomaticClip, {"stability": value}, "`stability` must be a finite float >= 1e-09")
            for value in (0.0, -1.0, np.inf, np.nan, "0.1", True)
        ),
        # The count would reveal too much.
        (noisy_bench, {"count_noise": 1.0}, "must exceed half of the optimizer's, 1: .*Give 4 or"),
        (small.model, {"l2_norm_clip": "auto"}, 'must be a float > 0, "automatic" or a clip pol'),
    ):
        with pytest.raises(ValueError, match=error):
            make(**arguments)


def test_a_metric_must_not_take_its_name():
    metric = keras.metrics.SparseCategoricalAccuracy(name="l2_norm_clip")
    arguments = {"metrics": [metric]}
    trained = small.model(l2_norm_clip=tfdpx.AdaptiveClip(), compile_arguments=arguments)
    with pytest.raises(ValueError, match="Rename the metric"):
        trained.train_on_batch(X, Y)


def moved(trainer, scale=1e4):
    """Returns how far one example more moves the update, in units of 1/B."""
    x = X.copy()
    x[-1] *= np.float32(scale)
    trainer.restore()
    y = np.append(Y[:-1], trainer.model(x[-1:]).numpy().argmin())  # The worst label.
    return trainer.influence(x, y, 15)


def test_the_update_of_the_automatic_clip_is_the_formula(automatic):
    automatic.restore()
    gradients = batch_of_one_gradients(automatic.model, tf.constant(X), tf.constant(Y), None, 1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    wanted = -(gradients / (norms + 0.01)).sum(0) / 16
    np.testing.assert_allclose(automatic.step(X, Y), wanted, atol=2e-6)


@pytest.mark.parametrize("scale", [1e4, 1.0, 1e15])
def test_an_example_moves_the_automatic_clips_update_by_less_than_one(automatic, scale):
    assert 0.9 < moved(automatic, scale) <= 1 + 1e-5


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


def test_configurations_and_files_keep_the_word_automatic(automatic, tmp_path):
    for make in (tfdpx.DPAdam, tfdpx.make_private(keras.optimizers.Lion)):
        optimizer = make(0.1, batch_size=16, noise_multiplier=1.0, l2_norm_clip="automatic")
        assert optimizer.l2_norm_clip == 1.0
        config = optimizer.get_config()
        assert config["l2_norm_clip"] == "automatic"
        assert type(make.from_config(config).clip_policy) is AutomaticClip
    automatic.step(X, Y)
    automatic.model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras").optimizer
    assert type(again.clip_policy) is AutomaticClip
    assert again.ledger.steps == automatic.optimizer.ledger.steps > 0
