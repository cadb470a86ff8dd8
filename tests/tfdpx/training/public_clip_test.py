"""Public examples in the training of whole networks: the update, its sensitivity, refusals."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow
from oracle import batch_of_one_gradients

import tfdpx
from tfdpx import noise
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training import preparation, public_clip

SIGMA, COUNT, BATCH = 2.0, 64, 16
PLAN = tfdpx.PrivacyPlan(COUNT, batch_size=BATCH, steps=5, noise_multiplier=SIGMA, delta=1e-5)
X, Y = small.data()


def public(count=9, seed=5):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, 6)).astype("float32"), rng.integers(0, 3, count)


def model(**kwargs):
    kwargs = {"plan": PLAN, "public_data": public(), "seed": 1, **kwargs}
    return small.model(batch_size=None, noise_multiplier=None, **kwargs)


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))


def gradients(built, x, y):
    return batch_of_one_gradients(built, tf.constant(x), tf.constant(y), None, 1)


@pytest.mark.parametrize(("quantile", "clip"), [(0.25, 0.2), (None, 0.2), slow(0.9, 1.0)])
def test_the_update_is_the_formula(without_noise, quantile, clip):
    built = model(public_quantile=quantile, l2_norm_clip=clip)
    built.build(X.shape)
    open_ones, private = gradients(built, *public()), gradients(built, X, Y)
    tau = clip
    if quantile is not None:
        tau = np.quantile(np.linalg.norm(open_ones, axis=1), quantile)
    norms = np.linalg.norm(private, axis=1, keepdims=True)
    clipped = private * np.minimum(1.0, tau / norms)
    expected = -(clipped.sum(0) / BATCH + open_ones.sum(0) / COUNT) / clip
    np.testing.assert_allclose(small.step(built, X, Y), expected, atol=2e-6)


def taus(monkeypatch):
    """A list that receives the clip of each step."""
    found, begin = [], public_clip.PublicClip.begin

    def recorded(self, *args):
        result = begin(self, *args)
        found.append(float(result.tensors[0]))
        return result

    monkeypatch.setattr(public_clip.PublicClip, "begin", recorded)
    return found


def change():
    """How far a huge private example more moves the update, in units of 1/B."""
    row = 1e4 * np.ones(6, "float32")
    label = model()(row[None]).numpy().argmin()  # The worst for it.
    more = np.vstack([X[:-1], row[None]]), np.append(Y[:-1], label)
    steps = [
        small.step(model(compile_arguments={"run_eagerly": True}), *data)
        for data in ((X[:-1], Y[:-1]), more)
    ]
    return np.linalg.norm(steps[0] - steps[1]) * BATCH


def test_one_private_example_moves_it_by_at_most_the_public_clip(without_noise, monkeypatch):
    found = taus(monkeypatch)
    moved = change()
    assert found[0] == found[1]  # Whatever the private data.
    assert 0.1 * found[0] < moved <= found[0] * (1 + 1e-4)


@pytest.mark.slow
def test_a_step_that_does_not_clip_is_noticed(without_noise, monkeypatch):
    found = taus(monkeypatch)
    monkeypatch.setattr(
        tfdpx.mechanism,
        "clip_factors",
        lambda squared, present, clip, batch_size: tf.cast(present, "float32") / batch_size,
    )
    with pytest.raises(UnfitForPrivacy, match="lets an example add"):
        change()
    found.clear()
    monkeypatch.setattr(preparation, "_ROUNDING", np.inf)  # Without the step's own check and bound.
    monkeypatch.setattr(tfdpx.mechanism, "bounded", lambda factors, *rest: factors)
    assert change() > 2 * found[0]


def test_the_noise_is_sigma_times_the_public_clip(monkeypatch):
    wide = [keras.layers.Dense(400, "relu"), keras.layers.Dense(3)]
    arguments = dict(compile_arguments={"run_eagerly": True}, layers=lambda: list(map(copy, wide)))

    def copy(layer):
        return type(layer).from_config(layer.get_config())

    found = taus(monkeypatch)
    noisy = small.step(model(**arguments), X, Y)
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
    drawn = (noisy - small.step(model(**arguments), X, Y)) / (SIGMA * found[0] / BATCH)
    assert abs(np.std(drawn) - 1) < 0.06  # 4,003 values: five standard deviations.
    assert abs(np.std(drawn) - 2 / 3) > 0.2 and abs(np.std(drawn) - 3 / 2) > 0.2


@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_fit_learns_from_both_and_counts_the_private_ones(compiled):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, 6)).astype("float32")
    built = model(compile_arguments={"jit_compile": compiled}, learning_rate=0.5)
    built.fit(PLAN.batches(x, x[:, :3].argmax(1)), verbose=0)
    assert built.optimizer.ledger.steps == 5
    assert built.optimizer.ledger.epsilon(1e-5) == pytest.approx(PLAN.epsilon, rel=1e-6)
    assert np.isfinite(small.weights(built)).all()


@pytest.mark.slow
def test_microbatches_change_nothing(without_noise):
    whole, parts = (small.step(model(microbatch_size=size), X, Y) for size in (16, 3))
    np.testing.assert_allclose(whole, parts, atol=1e-6)


@pytest.mark.slow
def test_private_examples_that_are_public_are_refused():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, 6)).astype("float32")
    x[7:9] = public()[0][2:4]
    built = model()
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


@pytest.mark.slow
def test_files_tell_that_there_were_public_data(tmp_path):
    built = model()
    small.step(built, X, Y)
    built.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == built.optimizer.get_config()
    assert loaded.optimizer.get_config()["public_data"]["count"] == 9
    with pytest.raises(ValueError, match="made with `public_data` of 9 examples"):
        loaded.train_on_batch(X, Y)
    with pytest.raises(ValueError, match="made with `public_data` of 9 examples"):
        loaded.fit(PLAN.batches(np.zeros((64, 6)), np.zeros(64)), verbose=0)


x, y = public()
NAN = x.copy()
NAN[1, 1] = np.nan


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"plan": None, "batch_size": 4, "noise_multiplier": 1.0}, "needs a `plan`"),
        ({"microbatch_size": "auto"}, "`microbatch_size` must be an int or None"),
        ({"public_quantile": 0.0}, "`public_quantile` must lie in"),
        ({"public_quantile": 90}, "`public_quantile` must lie in"),
        ({"public_data": x}, "must be a pair"),
        ({"public_data": (x, None)}, "must be a pair"),
        ({"public_data": (x, y[:3])}, "arrays of one length"),
        ({"public_data": (NAN, y)}, "must hold finite numbers"),
        ({"individual": tfdpx.accounting.IndividualAccountant(PLAN)}, "exclude each other"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.DPSGD(0.1, **{"plan": PLAN, "public_data": (x, y), **arguments})


@pytest.mark.parametrize(
    "wrong", [(x[:, :5], y), slow((x.astype("float16"), y)), slow((x, np.eye(3)[y]))]
)
def test_public_data_unlike_the_private_are_refused_at_the_first_step(wrong):
    built = model(public_data=wrong)
    with pytest.raises(ValueError, match="`public_data` must hold [xy] like the private"):
        built.train_on_batch(X, Y)
    assert built.optimizer.ledger.steps == 0
