"""The update is Eq. 4 of De et al. 2022: sensitivity, noise, masks, microbatches, views."""

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from oracle import batch_of_one_gradients
from scipy import stats

import tfdpx
from tfdpx import mechanism
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training import preflight

NO_NOISE = pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")


@pytest.fixture(scope="module", name="quiet")
def _quiet():
    return quiet_bench()


def quiet_bench():
    return bench.Bench(noise_multiplier=0.0, l2_norm_clip=1.3, batch_size=40)


@NO_NOISE
def test_the_update_is_the_papers_formula(quiet):
    x, y = small.data()
    quiet.restore()
    gradients = batch_of_one_gradients(quiet.model, tf.constant(x), tf.constant(y), None, 1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    assert (norms < 1.3).any() and (norms > 1.3).any()
    clipped = gradients * np.minimum(1.0, 1.3 / norms) / 1.3
    np.testing.assert_allclose(quiet.step(x, y), -clipped.sum(0) / 40, atol=1e-6)


def largest_change(trainer, x, y):
    """Returns the change of the update by a huge example with its worst label, in units of 1/B."""
    x = np.concatenate([x[:-1], 1e4 * np.ones((1, 6), "float32")])
    return max(trainer.influence(x, np.append(y[:-1], k), len(x) - 1) for k in range(3))


@NO_NOISE
def test_one_example_moves_the_update_by_at_most_one(quiet):
    assert 0.1 < largest_change(quiet, *small.data()) <= 1.0 + 1e-5


@NO_NOISE
@pytest.mark.planted("examples are not clipped")
def test_the_sensitivity_test_rejects_a_step_without_clipping(monkeypatch):
    monkeypatch.setattr(
        mechanism,
        "clip_factors",
        lambda squared, clip, batch_size: tf.ones_like(squared) / batch_size,
    )
    with pytest.raises(UnfitForPrivacy, match="lets an example add"):
        quiet_bench().step(*small.data())
    monkeypatch.setattr(preflight, "_ROUNDING", np.inf)  # Without the step's own check.
    assert largest_change(quiet_bench(), *small.data()) > 2.0


def noise_of_steps(count=2, views=None, **arguments):
    """Returns the noise of `count` updates, in units of 1: an absent batch adds nothing."""
    x, y = small.data(4, features=40)
    x = x if views is None else np.repeat(x[:, np.newaxis], views, axis=1)
    arguments = {"noise_multiplier": 2.0, "batch_size": 1, "augmult": views or 0, **arguments}
    return bench.Bench(shape=(40,), **arguments).noise(x, y, count)


def is_noise_of(sample, sigma):
    return stats.kstest(np.ravel(sample) / sigma, "norm").pvalue > 1e-3


@pytest.fixture(scope="module", name="noise")
def _noise():
    """Array [20, number of weights]."""
    return noise_of_steps(20, seed=1)


@pytest.fixture(scope="module", name="noise_of_views")
def _noise_of_views():
    """The same as `noise`, with another seed, of microbatches of views."""
    return noise_of_steps(20, seed=2, views=2, microbatch_size=1)


def test_noise_has_the_standard_deviation_sigma(noise):
    assert is_noise_of(noise, 2.0)
    assert not is_noise_of(noise, 2.0 * 2 / 3)
    assert not is_noise_of(noise, 2.0 * 3 / 2)


@pytest.mark.planted("two thirds of the noise")
def test_the_noise_test_rejects_a_step_with_two_thirds_of_it(monkeypatch):
    original = mechanism.noise.normal
    monkeypatch.setattr(mechanism.noise, "normal", lambda *a: original(*a) * np.float32(2 / 3))
    assert not is_noise_of(noise_of_steps(20), 2.0)


def test_the_noise_does_not_grow_with_microbatches_or_views(noise_of_views):
    assert is_noise_of(noise_of_views, 2.0)


def test_noise_is_replayed_by_seed_and_step_and_differs_otherwise(noise, noise_of_views):
    first, second = noise[:2]
    np.testing.assert_array_equal(noise[:2], noise_of_steps(2, seed=1))
    assert abs(stats.pearsonr(first, second).statistic) < 0.25
    assert abs(stats.pearsonr(first, noise_of_views[0]).statistic) < 0.25
    assert np.abs(first - second).max() > 0.1


@NO_NOISE
def test_given_views_are_averaged_before_clipping():
    x, y = small.data(8)
    views = np.stack([x, -x], axis=1)
    model = small.model(noise_multiplier=0.0, augmult=2, batch_size=8)
    model.build((None, 6))
    rows, labels = tf.constant(views.reshape(16, 6)), tf.constant(np.repeat(y, 2))
    gradients = batch_of_one_gradients(model, rows, labels, None, 2)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    wanted = -(gradients / np.maximum(norms, 1.0)).sum(0) / 8
    np.testing.assert_allclose(small.step_views(model, views, y), wanted, atol=1e-6)


@NO_NOISE
def test_a_weight_regulariser_is_added_after_the_noise_and_not_clipped():
    x, y = small.data()
    dense = [keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(50.0), use_bias=False)]
    model = small.model(layers=dense, noise_multiplier=0.0, learning_rate=1e-3)
    model.build(x.shape)
    kernel = small.weights(model)
    update = small.step(model, x, y, np.zeros(16, "float32"))
    np.testing.assert_allclose(update, -1e-3 * 100.0 * kernel, rtol=1e-4, atol=1e-6)


@NO_NOISE
def test_whole_weights_of_any_dtype_are_weights(quiet):
    x, y = small.data()
    weights = np.arange(16) % 4
    updates = []
    for dtype in ("float32", "uint32"):  # In uint32 come the flags of a plan's draws.
        quiet.restore()
        before = small.weights(quiet.model)
        quiet.model.train_on_batch(x * 1e-2, y, weights.astype(dtype))
        updates.append(small.weights(quiet.model) - before)
    np.testing.assert_allclose(*updates, atol=1e-7)
    assert np.abs(updates[0] - quiet.step(x * 1e-2, y, weights > 0)).max() > 0.01


@NO_NOISE
def test_several_outputs_with_their_own_losses_are_reported():
    x, y = small.data()
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4)(inputs)
    outputs = {
        "a": keras.layers.Dense(3, name="a")(hidden),
        "b": keras.layers.Dense(1, name="b")(hidden),
    }
    model = keras.Model(inputs, outputs)
    losses = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"}
    optimizer = tfdpx.DPSGD(1e-9, batch_size=16, noise_multiplier=0.0)
    model.compile(optimizer=optimizer, loss=losses, metrics={"a": "accuracy"})
    targets = {"a": y, "b": y.astype("float32")}
    logs = model.train_on_batch(x, targets, return_dict=True)
    wanted = model.evaluate(x, targets, verbose=0, return_dict=True)
    assert logs.keys() == wanted.keys()
    for name in wanted:
        assert logs[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_a_step_averages_the_views_that_the_seed_draws(monkeypatch):
    rng, drawn = np.random.default_rng(0), []
    x, y = rng.normal(size=(8, 12, 12, 1)).astype("float32"), rng.integers(0, 3, 8)
    augmentation, layers = tfdpx.augment.ResizeCropFlip(5), keras.layers
    draw = augmentation.draw
    monkeypatch.setattr(augmentation, "draw", lambda *a: drawn.append(draw(*a)) or drawn[-1])

    def stack():
        return [layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3)]

    def bench_of(**arguments):
        compile_arguments = {"run_eagerly": "augment" in arguments}
        arguments = {"augmult": 3, "batch_size": 8, "layers": stack, **arguments}
        return bench.Bench(shape=(5, 5, 1), compile_arguments=compile_arguments, **arguments)

    change = bench_of(augment=augmentation).step(x, y)
    choices = max(drawn, key=len)
    by_data = bench_of()
    views = augmentation.apply(tf.constant(x), choices).numpy()
    np.testing.assert_allclose(change, by_data.step(views, y), rtol=1e-4, atol=1e-7)
    others = augmentation.apply(tf.constant(x), choices[::-1]).numpy()
    assert np.abs(by_data.step(others, y) - change).max() > 1e-5


def test_wrong_views_are_refused():
    x, y = small.data()
    with pytest.raises(ValueError, match=r"\[batch, 4, ...\]"):
        small.step(small.model(augmult=4), x, y)


def test_private_gradients_cannot_be_forged():
    with pytest.raises(TypeError, match="private training step"):
        mechanism.PrivateGradient(tf.zeros([2]), object())
