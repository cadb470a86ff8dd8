"""Many models side by side take the updates of `DPSGD`; the phases find what was planted."""

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf
from cases import slow
from scipy import integrate, stats

import tfdpx
from experiments.high_accuracy.audits import batched_models, phases
from tfdpx import mechanism, noise
from tfdpx.train.config.errors import UserError

SHAPE, ROWS = (12, 12, 1), 9


def examples():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(ROWS, *SHAPE)).astype("float32")
    return x, rng.integers(0, 10, ROWS)


def lenet():
    seeds.fix(3)
    return tfdpx.models.LeNet(10, SHAPE)


def plan(**given):
    given = {"batch_size": 5, "steps": 2, "noise_multiplier": 0.8, "delta": 0.1, **given}
    return tfdpx.PrivacyPlan(ROWS, **given)


def fixed_noise(shape, seed, stddev=1.0):
    """Noise that both sides draw alike: a function of the place alone."""
    size = int(np.prod(shape)) // fixed_noise.models
    drawn = np.random.default_rng(1).normal(size=size) * stddev
    return tf.constant(np.tile(drawn, fixed_noise.models), "float32")


def as_rows(value):
    return batched_models._kernel_rows(tf.convert_to_tensor(value))


def real_steps(clip, masks):
    """The weights after DPSGD's own steps on the rows of each mask."""
    fixed_noise.models = 1
    model, (x, y) = lenet(), examples()
    optimizer = tfdpx.DPSGD(0.3, batch_size=5, noise_multiplier=0.8, l2_norm_clip=clip)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    for mask in masks:
        model.train_on_batch(x, y, sample_weight=mask.astype("float32"))
    return [as_rows(v.value) for v in model.trainable_variables]


@pytest.mark.parametrize("clip", [0.7, slow(50.0)])
@pytest.mark.slow
def test_an_update_is_that_of_dpsgd(monkeypatch, clip):
    rng = np.random.default_rng(2)
    masks = rng.uniform(size=(2, ROWS)) < 0.6  # Of two steps.
    other = ~masks
    monkeypatch.setattr(mechanism.noise, "normal", fixed_noise)
    wanted = [real_steps(clip, each) for each in (masks, other)]
    fixed_noise.models = 1
    model, (x, y) = lenet(), examples()
    weights = [tf.stack([as_rows(v.value)] * 2) for v in model.trainable_variables]
    for first, second in zip(masks, other, strict=True):
        present = tf.constant(np.stack([first, second]))
        # The noise of a variable is drawn for both models: taken apart, it is that of one each.
        monkeypatch.setattr(mechanism, "privatize", privatized)
        weights = batched_models.update(
            model.layers,
            weights,
            (tf.constant(x), tf.constant(y)),
            present,
            tf.constant([1, 2], tf.int64),
            tf.constant(0.3),
            tf.constant(clip),
            plan(),
        )
    for index in range(2):
        for found, right in zip(weights, wanted[index], strict=True):
            np.testing.assert_allclose(found[index], right, atol=2e-6)


real_privatize = mechanism.privatize


def privatized(sums, *arguments):
    each = [real_privatize([s[index] for s in sums], *arguments) for index in range(2)]
    for first, second in zip(*each, strict=True):
        first.tensor = tf.stack([first.tensor, second.tensor])
    return each[0]


@pytest.mark.slow
def test_noise_and_draws_are_each_models_own():
    x, y = examples()
    trained = batched_models.BatchedModels(lenet(), plan(noise_multiplier=3.0), 4)
    with_it, again, other, without = (
        trained.train(noise.make_seed(seed), (x, y), present, 0.3, 1.0).numpy()
        for seed, present in ((1, True), (1, True), (2, True), (1, False))
    )
    np.testing.assert_array_equal(with_it, again)
    assert len({tuple(row) for row in np.concatenate([with_it, other])}) == 8
    assert not np.allclose(with_it, without)
    drawn = (
        batched_models.BatchedModels(lenet(), plan(), 2000)
        .draw(tf.constant([5, 6], tf.int64), 1)
        .numpy()
    )
    assert drawn.shape == (2000, ROWS)
    assert stats.binomtest(int(drawn.sum()), drawn.size, 5 / 9).pvalue > 1e-3
    assert abs(np.corrcoef(drawn.T) - np.eye(ROWS)).max() < 0.1


def test_noise_has_the_scale_of_the_plan(monkeypatch):
    x, y = examples()
    full = plan(batch_size=ROWS, steps=1, noise_multiplier=1.0)
    trained, found = batched_models.BatchedModels(lenet(), full, 30), {}
    real = batched_models.update

    def kept(*arguments):
        found["weights"] = [w.numpy() for w in real(*arguments)]
        return [tf.constant(w) for w in found["weights"]]

    monkeypatch.setattr(batched_models, "update", kept)
    tf.config.run_functions_eagerly(True)
    try:
        trained.train([1, 2], (x, y), True, 0.5, 1.0)
    finally:
        tf.config.run_functions_eagerly(False)
    for weights in found["weights"]:
        # Among models only the noise differs: of standard deviation sigma / B times the rate.
        apart = weights - weights.mean(0)
        squares = (apart**2).sum() / (0.5 / ROWS) ** 2
        degrees = weights[0].size * 29
        assert 1e-4 < stats.chi2.cdf(squares, degrees) < 1 - 1e-4


def test_other_layers_are_refused():
    stack = [keras.Input(SHAPE), keras.layers.Conv2D(2, 3, strides=2), keras.layers.Flatten()]
    for model in (
        keras.Sequential([*stack, keras.layers.Dense(10)]),
        tfdpx.models.SmallCNN(10, SHAPE),
    ):
        with pytest.raises(UserError, match="cannot be trained in many models"):
            batched_models.BatchedModels(model, plan(), 2)


def test_total_variation_is_that_of_the_fitted_normals():
    rng = np.random.default_rng(0)
    for mean, deviation in ((1.0, 1.0), (0.3, 2.5)):
        first, second = rng.normal(size=400), rng.normal(mean, deviation, 400)
        laws = [stats.norm(np.mean(s), np.std(s)) for s in (first, second)]
        gap, _ = integrate.quad(
            lambda x, laws=laws: abs(laws[0].pdf(x) - laws[1].pdf(x)) / 2, -20, 20, limit=500
        )
        assert phases.total_variation(first, second) == pytest.approx(gap, abs=1e-6)
    assert phases.total_variation(first, first) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_bounds_of_gaussian_scores_are_below_the_truth_and_near(mu):
    rng = np.random.default_rng(4)
    with_it, without = rng.normal(mu, size=(5000,)), rng.normal(size=(5000,))
    row = phases.measured(with_it, without, 0.01, 0.999, full_batch=True)
    exact = tfdpx.accounting.epsilon(1 / mu, 1.0, 1, 0.01, "gdp") if mu else 0.0
    assert 0.75 * exact <= row["gdp_epsilon_lower_bound"] <= exact
    assert 0.3 * exact <= row["epsilon_lower_bound"] <= exact
    assert row["models"] == 4000
    assert row["auc"] == pytest.approx(stats.norm.cdf(mu / 2**0.5), abs=0.03)
