"""`tfdpx.AdaptiveClip`: the clip's path, what it reveals, its noise, and that it is kept."""

import math
import pickle

import keras
import numpy as np
import processes
import pytest
import small
import tensorflow as tf
from cases import slow
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx import audit, mechanism, noise

X, Y = small.data()
EAGER = {"run_eagerly": True}
GRAPH = {"jit_compile": False}


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))


def model(clip=None, compile_arguments=GRAPH, **kwargs):
    return small.model(
        l2_norm_clip=clip or tfdpx.AdaptiveClip(), compile_arguments=compile_arguments, **kwargs
    )


def clip_of(built):
    return built.optimizer.clip_policy.l2_norm_clip


@pytest.mark.parametrize("arguments", [
    {"compile_arguments": EAGER}, {"microbatch_size": 3},
    slow({"compile_arguments": {"jit_compile": True}, "microbatch_size": 3}),
    slow({"per_example_engine": "vmap"}),
])  # fmt: skip
def test_the_clip_and_the_update_are_the_formulas(without_noise, arguments):
    built = model(tfdpx.AdaptiveClip(1.5, quantile=0.3, learning_rate=0.7), **arguments)
    weight, wanted = np.ones(16, "float32"), 1.5
    weight[[2, 7, 15]] = 0.0
    built.build(X.shape)
    for _ in range(3):
        rows = batch_of_one_gradients(built, tf.constant(X), tf.constant(Y), None, 1)
        norms = np.linalg.norm(rows, axis=1)
        factors = (weight > 0) / np.maximum(norms, wanted) / 16
        change = small.step(built, X, Y, weight)
        np.testing.assert_allclose(change, -(rows * factors[:, None]).sum(0), atol=3e-6)
        below = np.clip(0.5 - (norms / wanted - 1) / 0.1, 0, 1)
        share = 0.5 + ((below - 0.5) * (weight > 0)).sum() / 16
        wanted *= math.exp(-0.7 * (share - 0.3))
        assert clip_of(built) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("quantile", "initial"), [(0.5, 30.0), (0.9, 0.05)])
def test_it_finds_the_quantile(without_noise, quantile, initial):
    x, y = small.data(rows=400)
    clip = tfdpx.AdaptiveClip(initial, quantile)
    built = model(clip, batch_size=400, learning_rate=1e-6)  # The weights stay.
    dataset = tf.data.Dataset.from_tensors((x, y)).repeat(120)
    built.fit(dataset, verbose=0)
    rows = batch_of_one_gradients(built, tf.constant(x), tf.constant(y), None, 1)
    wanted = np.quantile(np.linalg.norm(rows, axis=1), quantile)
    assert clip_of(built) == pytest.approx(wanted, rel=0.05)


@pytest.mark.parametrize(("sigma", "own", "batch_size"), [
    (1.0, None, 1000), (4.0, None, 16), (2.0, 1.01, 16), (2.0, 1e6, 16),
])  # fmt: skip
def test_both_releases_together_cost_what_the_ledger_counts(sigma, own, batch_size):
    clip = tfdpx.AdaptiveClip(noise_multiplier=own)
    optimizer = tfdpx.DPSGD(1.0, batch_size=batch_size, noise_multiplier=sigma, l2_norm_clip=clip)
    found = optimizer.clip_policy.noise_of_gradients(sigma)
    own = max(batch_size / 20, 2 * sigma) if own is None else own
    assert found == pytest.approx((sigma**-2 - (2 * own) ** -2) ** -0.5, rel=1e-6)
    # Two Gaussian mechanisms, of sensitivities 1 and 1/2.
    assert math.hypot(1 / found, 1 / (2 * own)) == pytest.approx(1 / sigma, rel=1e-9)
    assert optimizer.noise_multiplier == sigma


def test_the_gradients_have_what_the_count_leaves_of_the_noise():
    built = model(tfdpx.AdaptiveClip(noise_multiplier=1.05), noise_multiplier=2.0)
    found = small.step(built, X, Y, np.zeros(16, "float32")).std() * 16
    assert found / built.optimizer.clip_policy.noise_of_gradients(2.0) == pytest.approx(1, abs=0.5)


def drawn(count=300, own=4.0, **arguments):
    """What the noise alone adds to the sum of (indicator - 1/2), of batches without an example."""
    built = model(tfdpx.AdaptiveClip(1e3, learning_rate=1e-2, noise_multiplier=own), **arguments)
    clips, absent = [], np.zeros(16, "float32")
    built.build(X.shape)

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clips.append(clip_of(self.model))

    dataset = tf.data.Dataset.from_tensors((X, Y, absent)).repeat(count)
    built.fit(dataset, verbose=0, callbacks=[Note()])
    return -np.diff(np.log(clips)) / 1e-2 * 16


def check_count_noise():
    found = drawn()
    assert abs(np.std(found) / 4.0 - 1) < 0.2 and abs(np.mean(found)) < 1.2  # Five deviations.
    assert len(np.unique(np.round(found, 3))) > 200  # Each update has its own.


def test_the_count_is_noisy():
    check_count_noise()


def test_a_count_without_noise_is_noticed(monkeypatch):
    privatize = mechanism.privatize

    def planted(sums, *arguments):
        return [*privatize(sums[:-1], *arguments), *privatize(sums[-1:], 0.0, *arguments[1:])]

    monkeypatch.setattr(mechanism, "privatize", planted)
    with pytest.raises(AssertionError):
        check_count_noise()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "equal"), [(1, True), (None, False)])
def test_a_seed_repeats_it_and_without_one_nothing_does(seed, equal):
    first, second = (drawn(5, seed=seed) for _ in range(2))
    assert np.array_equal(first, second) == equal


@pytest.mark.slow
def test_the_audit_finds_the_noise_of_gradients_and_a_tight_bound():
    clip = tfdpx.AdaptiveClip(0.5, noise_multiplier=1.5)
    built = model(clip, batch_size=8, noise_multiplier=2.0, seed=None)
    built.build((None, 6))
    report = audit.check_optimizer(built, built.optimizer, trials=150)
    assert report.passed, str(report)
    assert 0.3 * report.epsilon < report.epsilon_lower_bound <= report.epsilon
    assert clip_of(built) == 0.5


@pytest.mark.parametrize(("x", "y"), [
    (np.nan * X, Y),
    slow(X, np.full(16, 9)),  # No such class: the loss is not finite.
])  # fmt: skip
def test_gradients_of_an_adversary_end_at_the_largest_clip(without_noise, x, y):
    built = model(tfdpx.AdaptiveClip(learning_rate=1.0), learning_rate=1e-9)
    dataset = tf.data.Dataset.from_tensors((x.astype("float32"), y)).repeat(60)
    built.fit(dataset, verbose=0)
    assert clip_of(built) == pytest.approx(1e9)
    assert np.isfinite(small.weights(built)).all()


@pytest.mark.parametrize(("quantile", "own"), [(1e-6, None), (1 - 1e-6, 1e9)])
def test_a_clip_never_leaves_what_float32_can_clip_at(quantile, own):
    built = model(tfdpx.AdaptiveClip(1.0, quantile, 1e4, own), batch_size=1)
    built.build(X.shape)
    for _ in range(3):
        small.step(built, X[:1], Y[:1])
        assert 1e-9 <= clip_of(built) <= 1e9 and np.isfinite(small.weights(built)).all()


@pytest.mark.parametrize("sigma", [1.0, slow(0.0)])
def test_of_one_example(sigma):
    built = model(batch_size=1, noise_multiplier=sigma)
    assert np.isfinite(small.step(built, X[:1], Y[:1])).all() and clip_of(built) != 1.0


def trained(clip, steps_per_execution=1, jit_compile=False, sigma=1.0, seed=3, **fit_arguments):
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=8, noise_multiplier=sigma, delta=1e-3)
    optimizer = tfdpx.DPAdam(0.1, plan=plan, l2_norm_clip=clip, seed=seed)
    arguments = dict(steps_per_execution=steps_per_execution, jit_compile=jit_compile)
    built = small.model(optimizer, compile_arguments=arguments)
    history = built.fit(X, Y, epochs=4, verbose=0, **fit_arguments).history
    return built, history


@pytest.fixture(scope="module")
def unbroken():
    return trained(tfdpx.AdaptiveClip())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"steps_per_execution": 2}, {"jit_compile": True}])
def test_however_the_step_runs(unbroken, arguments):
    one, history = unbroken
    other, _ = trained(tfdpx.AdaptiveClip(), **arguments)
    assert clip_of(one) == pytest.approx(clip_of(other), rel=1e-5) != 1.0
    np.testing.assert_allclose(small.weights(one), small.weights(other), atol=1e-4)
    assert history["l2_norm_clip"][-1] == clip_of(one) and len(history["l2_norm_clip"]) == 4
    ledger, plan = one.optimizer.ledger, one.optimizer.plan
    assert ledger.epsilon(1e-3) == pytest.approx(plan.epsilon, rel=1e-9)
    assert ledger.entries[0].noise_multiplier == 1.0


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
@pytest.mark.slow
def test_without_noise_there_is_none_on_the_count():
    assert np.array_equal(drawn(5, own=0.0, noise_multiplier=0.0), np.zeros(4))
    assert np.array_equal(drawn(5, own=4.0, noise_multiplier=0.0), np.zeros(4))


@pytest.mark.slow
def test_after_the_plans_end_the_data_move_it_no_more():
    """A compiled step knows no errors: it then releases noise alone."""

    def clip_after(scale):
        built = model()
        built.build(X.shape)
        built.optimizer.state.end_after(0)
        data = (tf.constant(scale * X), tf.constant(Y), tf.ones(16))
        tf.function(lambda: built.train_step(data), jit_compile=True, autograph=False)()
        return clip_of(built)

    assert clip_after(1.0) == clip_after(1e3) != 1.0


def test_files_and_copies_keep_the_clip(tmp_path):
    built = model(tfdpx.AdaptiveClip(quantile=0.7))
    small.step(built, X, Y)
    built.save(tmp_path / "model.keras")
    copies = [keras.saving.load_model(tmp_path / "model.keras"), pickle.loads(pickle.dumps(built))]
    for copy in copies:
        assert clip_of(copy) == clip_of(built) != 1.0
        assert copy.optimizer.get_config()["l2_norm_clip"]["config"]["quantile"] == 0.7
        assert copy.optimizer.clip_policy.initial == 1.0


def test_a_policy_serves_several_optimizers():
    policy = tfdpx.AdaptiveClip()
    first, second = model(policy), model(policy)
    small.step(first, X, Y)
    assert clip_of(first) != 1.0 == clip_of(second) == policy.l2_norm_clip


@pytest.mark.slow
def test_a_resume_continues_from_the_noisy_clip(tmp_path, unbroken):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    keep = tfdpx.callbacks.Checkpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trained(tfdpx.AdaptiveClip(), callbacks=[keep, Stop()])
    resumed, _ = trained(tfdpx.AdaptiveClip(), callbacks=[tfdpx.callbacks.Checkpoint(tmp_path)])
    assert clip_of(resumed) == clip_of(unbroken[0])  # With a seed, to the last bit.
    np.testing.assert_array_equal(small.weights(resumed), small.weights(unbroken[0]))
    assert resumed.optimizer.ledger.steps == 8


def checked_run(x):
    def train(data):
        plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=8, noise_multiplier=1.0, delta=1e-3)
        built = small.model(tfdpx.DPSGD(0.1, plan=plan, l2_norm_clip=tfdpx.AdaptiveClip()))
        history = built.fit(data, Y, verbose=0, epochs=4).history
        return {"clip": history["l2_norm_clip"]}

    return audit.check_run(train, X, x)


@pytest.mark.slow
def test_what_a_run_shows_follows_from_noisy_values():
    assert checked_run(1e3 * X).passed


@pytest.mark.slow
def test_a_clip_that_is_learned_from_the_exact_count_is_noticed(monkeypatch):
    to_release = tfdpx.AdaptiveClip.to_release
    monkeypatch.setattr(tfdpx.AdaptiveClip, "to_release", lambda *args: [])
    monkeypatch.setattr(
        tfdpx.AdaptiveClip,
        "to_share",
        lambda self, ids, present, measured, context: to_release(self, measured, 8),
    )
    assert not checked_run(1e3 * X).passed


@pytest.mark.slow
def test_replicas_agree_and_count_once():
    processes.run_alone("replica_cases.adaptive_updates_agree")


@pytest.mark.parametrize(("arguments", "error"), [
    ({"quantile": 0.0}, "`quantile` must lie strictly between 0 and 1"),
    ({"quantile": 1}, "`quantile`"), ({"quantile": math.nan}, "`quantile`"),
    ({"initial": 0.0}, "`initial` must lie in"), ({"initial": math.inf}, "`initial`"),
    ({"learning_rate": 0.0}, "`learning_rate` must be a finite float > 0"),
    ({"noise_multiplier": -1.0}, "`noise_multiplier` must lie in"),
    ({"noise_multiplier": 1e300}, "`noise_multiplier` must lie in"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused(arguments, error):
    with pytest.raises(ValueError, match=error):
        tfdpx.AdaptiveClip(**arguments)


@pytest.mark.parametrize("own", [0.0, 0.3, 0.5])
def test_a_count_that_reveals_too_much_is_refused(own):
    with pytest.raises(ValueError, match="must exceed half of the optimizer's, 1: .*Give 4 or mo"):
        model(tfdpx.AdaptiveClip(noise_multiplier=2 * own), noise_multiplier=2.0)


def test_a_metric_must_not_take_its_name():
    built = small.model(l2_norm_clip=tfdpx.AdaptiveClip())
    metric = keras.metrics.SparseCategoricalAccuracy(name="l2_norm_clip")
    built.compile(built.optimizer, built.loss, metrics=[metric])
    with pytest.raises(ValueError, match="Rename the metric"):
        built.train_on_batch(X, Y)
