"""Public examples in the training of whole networks: the update, its sensitivity, refusals."""

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training import preparation

SIGMA, COUNT, BATCH = 2.0, 64, 16
PLAN = tfdpx.PrivacyPlan(COUNT, batch_size=BATCH, steps=5, noise_multiplier=SIGMA, delta=1e-5)
LONG = tfdpx.PrivacyPlan(COUNT, batch_size=BATCH, steps=200, noise_multiplier=SIGMA, delta=1e-5)
X, Y = small.data()


def public(count=9, seed=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 6)).astype("float32"), rng.integers(0, 3, count)


def public_bench(**kwargs):
    kwargs = {"plan": LONG, "public_data": public(), "seed": 1, **kwargs}
    return bench.Bench(batch_size=None, noise_multiplier=None, **kwargs)


def quiet_bench(**kwargs):
    """A bench without noise, which its optimizer counts all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfdpx.noise.normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
        made = public_bench(**kwargs)
        made.step(X, Y)
    return made


@pytest.fixture(scope="module", name="quiet")
def _quiet():
    return quiet_bench(public_quantile=0.25, l2_norm_clip=0.2, microbatch_size=3)


def gradients(made, x, y):
    """Of each example, at the start."""
    made.restore()
    return batch_of_one_gradients(made.model, tf.constant(x), tf.constant(y), None, 1)


def tau_of(made, quantile):
    """The clip at the start."""
    return np.quantile(np.linalg.norm(gradients(made, *public()), axis=1), quantile)


@pytest.mark.parametrize("quantile", [0.25, None])
def test_the_update_is_the_formula(quiet, quantile):
    made = quiet
    if quantile is None:
        made = quiet_bench(public_quantile=None, l2_norm_clip=0.2)
    tau = 0.2 if quantile is None else tau_of(made, quantile)
    open_ones, private = gradients(made, *public()), gradients(made, X, Y)
    norms = np.linalg.norm(private, axis=1, keepdims=True)
    clipped = private * np.minimum(1.0, tau / norms)
    expected = -(clipped.sum(0) / BATCH + open_ones.sum(0) / COUNT) / 0.2
    np.testing.assert_allclose(made.step(X, Y), expected, atol=2e-6)


def influence(made):
    """How far a huge private example moves the update, in units of its clip / B."""
    x = np.vstack([X[:-1], 1e4 * np.ones((1, 6), "float32")])
    made.restore()
    y = np.append(Y[:-1], made.model(x[-1:]).numpy().argmin())  # The worst for it.
    return made.influence(x, y, 15) * 0.2 / tau_of(made, 0.25)


def test_one_private_example_moves_it_by_at_most_the_public_clip(quiet):
    assert 0.1 < influence(quiet) <= 1 + 1e-4


@pytest.mark.planted("private examples are not clipped at the public clip")
def test_a_step_that_does_not_clip_is_noticed(monkeypatch):
    monkeypatch.setattr(
        tfdpx.mechanism,
        "clip_factors",
        lambda squared, present, clip, batch_size: tf.cast(present, "float32") / batch_size,
    )
    arguments = dict(public_quantile=0.25, l2_norm_clip=0.2)
    with pytest.raises(UnfitForPrivacy, match="lets an example add"):
        quiet_bench(**arguments)
    monkeypatch.setattr(preparation, "_ROUNDING", np.inf)  # Without the step's own check and bound.
    monkeypatch.setattr(tfdpx.mechanism, "bounded", lambda factors, *rest: factors)
    assert influence(quiet_bench(**arguments)) > 2


def test_the_noise_is_sigma_times_the_public_clip():
    made = public_bench(public_quantile=0.25, l2_norm_clip=0.2)
    tau = tau_of(made, 0.25)
    public_part = gradients(made, *public()).sum(0) / COUNT / 0.2
    absent = np.zeros(16, "float32")
    noise = np.concatenate([made.step(X, Y, absent) + public_part for _ in range(80)])
    drawn = noise / (SIGMA * tau / 0.2 / BATCH)
    assert abs(np.std(drawn) - 1) < 0.06  # 4,240 values: five standard deviations.


def test_fit_learns_from_both_and_counts_the_private_ones():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, 6)).astype("float32")
    built = public_bench(plan=PLAN, learning_rate=0.5).model
    built.fit(PLAN.batches(x, x[:, :3].argmax(1)), verbose=0)
    assert built.optimizer.ledger.steps == 5
    assert built.optimizer.ledger.epsilon(1e-5) == pytest.approx(PLAN.epsilon, rel=1e-6)
    assert np.isfinite(small.weights(built)).all()


@pytest.mark.slow
def test_private_examples_that_are_public_are_refused():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, 6)).astype("float32")
    x[7:9] = public()[0][2:4]
    built = public_bench(plan=PLAN).model
    for data in ((PLAN.batches(x, np.zeros(COUNT, int)),), (x, np.zeros(COUNT, int))):
        with pytest.raises(ValueError, match="holds 2 of the 64 private examples"):
            built.fit(*data, verbose=0)
    with pytest.raises(ValueError, match="holds 2 of the 64 private examples"):
        tfdpx.distributed.fit(built, PLAN, x, np.zeros(COUNT, int), verbose=0)
    assert built.optimizer.ledger.steps == 0
    unseen = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    own = [tfdpx.callbacks.PrivacyBudget(PLAN, allow_approximate=True)]
    with pytest.warns(UserWarning, match="not looked for"):
        built.fit(unseen, callbacks=own, verbose=0)


def test_files_tell_that_there_were_public_data(quiet, tmp_path):
    built = quiet.model
    built.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == built.optimizer.get_config()
    assert loaded.optimizer.get_config()["public_data"]["count"] == 9
    with pytest.raises(ValueError, match="made with `public_data` of 9 examples"):
        loaded.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="made with `public_data` of 9 examples"):
        loaded.fit(LONG.batches(np.zeros((64, 6)), np.zeros(64)), verbose=0)


x, y = public()
NAN = x.copy()
NAN[1, 1] = np.nan


def test_arguments_that_are_refused():
    for arguments, message in (
        ({"plan": None, "batch_size": 4, "noise_multiplier": 1.0}, "needs a `plan`"),
        ({"public_quantile": 0.0}, "`public_quantile` must lie in"),
        ({"public_quantile": 90}, "`public_quantile` must lie in"),
        ({"public_data": x}, "must be a pair"),
        ({"public_data": (x, None)}, "must be a pair"),
        ({"public_data": (x, y[:3])}, "arrays of one length"),
        ({"public_data": (NAN, y)}, "must hold finite numbers"),
        ({"individual": tfdpx.accounting.IndividualAccountant(PLAN)}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            tfdpx.DPSGD(0.1, **{"plan": PLAN, "public_data": (x, y), **arguments})


def test_public_data_unlike_the_private_are_refused_at_the_first_step():
    for wrong in ((x[:, :5], y), (x.astype("float16"), y), (x, np.eye(3)[y])):
        built = public_bench(public_data=wrong).model
        with pytest.raises(ValueError, match="`public_data` must hold [xy] like the private"):
            built.train_on_batch(X, Y)
        assert built.optimizer.ledger.steps == 0
