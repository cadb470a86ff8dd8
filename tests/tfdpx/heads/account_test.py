"""The account of a head: noise, ledger, plan, and the weights' ledger."""

import json
import math

import head_cases
import keras
import numpy as np
import pytest
from head_cases import CLASSES, WIDTH, data, make

import tfdpx
from tfdpx import heads
from tfdpx.heads import AdaMix, FeatureCovariance, LeastSquares
from tfdpx.heads.releases import Releases


def gaussian_delta(mu, epsilon):
    """Returns the exact delta of a Gaussian mechanism: Balle and Wang 2018, Theorem 8."""

    def tail(z):
        return math.erfc(-z / math.sqrt(2)) / 2

    return tail(mu / 2 - epsilon / mu) - math.exp(epsilon) * tail(-mu / 2 - epsilon / mu)


def test_noise_and_steps_are_those_of_the_exact_gaussian_mechanism():
    for kind, steps, noise_multiplier in (
        ("LeastSquares", {}, 6.462),
        ("FeatureCovariance", {"steps": 10}, 12.37),
        ("Newton", {"steps": 10}, 16.68),
        ("FirstOrder", {"steps": 100}, 37.31),
    ):
        head = getattr(heads, kind)(num_classes=10, epsilon=1.0, delta=1e-5, **steps)
        assert float(f"{head.noise_multiplier:.4g}") == noise_multiplier
        mu = math.sqrt(head.num_releases) / head.noise_multiplier
        assert gaussian_delta(mu, 1.0) == pytest.approx(1e-5, rel=5e-4)
    for epsilon, steps in ((1.0, 28), (3.0, 206)):
        assert AdaMix(10, epsilon, delta=1e-5, noise_multiplier=20).steps == steps
        deltas = [gaussian_delta(math.sqrt(count) / 20, epsilon) for count in (steps, steps + 1)]
        assert deltas[0] <= 1e-5 < deltas[1]


def test_accountants_of_full_batches():
    head = FeatureCovariance(10, 1.0, 1e-5, steps=10, accountant="zcdp")
    rho = 11 / (2 * head.noise_multiplier**2)
    assert rho + 2 * math.sqrt(rho * math.log(1e5)) == pytest.approx(1.0, rel=1e-4)
    assert head.noise_multiplier > 12.38
    for epsilon in (0.01, 0.5, 8.0, 30.0):
        sigma = LeastSquares(10, epsilon, 1e-6).noise_multiplier
        exact, pld, rdp, zcdp = (
            tfdpx.accounting.epsilon(sigma, 1.0, 3, 1e-6, name)
            for name in ("gdp", "pld", "rdp", "zcdp")
        )
        assert epsilon * (1 - 2e-4) < exact == pld <= epsilon
        assert exact < rdp < zcdp * 1.001


@pytest.mark.parametrize("name", head_cases.NAMES)
def test_the_ledger_is_what_was_released(name):
    head = make(name, seed=0)
    assert head.ledger.steps == 0 == head.epsilon_spent()
    head.fit(*data(30))
    assert head.ledger.steps == head.num_releases
    assert not head.ledger.is_approximate and head.ledger.is_seeded
    assert {entry.sampling_probability for entry in head.ledger.entries} == {1.0}
    # AdaMix solves for steps, and spends a little less because they are whole numbers.
    least = 0.9 if isinstance(head, AdaMix) else 0.999
    assert least < head.epsilon_spent() <= 1.0
    assert head.ledger.epsilon(1e-5) <= 1.0  # By the default accountant of all ledgers.
    plan = head.plan(30)
    assert plan.epsilon == pytest.approx(head.epsilon_spent())
    assert plan.steps == head.num_releases and plan.sampling_probability == 1.0
    once = head.ledger
    head.fit(*data(30))
    assert head.epsilon_spent() > 1.3
    assert (once + head.ledger) == head.ledger  # A run counts once, and another adds up.


def test_a_share_moves_noise_and_keeps_epsilon():
    head = FeatureCovariance(CLASSES, 1.0, steps=10, covariance_share=0.4, seed=0)
    assert head.covariance_noise_multiplier < head.noise_multiplier < head.gradient_noise_multiplier
    assert head.fit(*data(30)).epsilon_spent() == pytest.approx(1.0, rel=1e-3)
    assert head.ledger.steps == 11 and len(head.ledger.entries) == 2
    total = 1 / head.covariance_noise_multiplier**2 + 10 / head.gradient_noise_multiplier**2
    assert total == pytest.approx(11 / head.noise_multiplier**2)


def test_the_layer_brings_its_account_into_private_training(tmp_path):
    x, y = data(30)
    head = LeastSquares(CLASSES, 1.0).fit(x, y)
    model = keras.Sequential([keras.Input((WIDTH,)), head.to_layer(name="head")])
    np.testing.assert_allclose(model(x), head.predict(x), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.get_layer("head")) is keras.layers.Dense
    np.testing.assert_array_equal(loaded(x), model(x))
    plan = tfdpx.PrivacyPlan(30, 10, 2, noise_multiplier=2.0, delta=1e-5, spent=head.ledger)
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), loss)
    assert model.optimizer.ledger.steps == 3
    model.fit(plan.batches(x, y, optimizer=model.optimizer), verbose=0)
    ledger = model.optimizer.ledger
    assert ledger.steps == 3 + 2
    alone = tfdpx.accounting.epsilon(2.0, 1 / 3, 2, 1e-5)
    assert ledger.epsilon(1e-5) > max(head.epsilon_spent(), alone)


def test_noise_has_the_stated_scale_and_is_fresh_without_a_seed():
    releases = Releases({"a": (2.0, 1), "b": (2.0, 1)}, seed=3)
    flat = releases.gaussian("a", np.zeros([200, 200]), 0.5)
    symmetric = releases.symmetric("b", np.zeros([200, 200]), 0.5)
    assert np.std(flat) == pytest.approx(1.0, rel=0.02)
    np.testing.assert_array_equal(symmetric, symmetric.T)
    assert np.std(np.diag(symmetric)) == pytest.approx(1.0, rel=0.2)
    assert np.std(symmetric[np.triu_indices(200, 1)]) == pytest.approx(0.5**0.5, rel=0.03)
    assert abs(np.corrcoef(flat.ravel(), symmetric.ravel())[0, 1]) < 0.03
    kernels = [make("least squares", seed=s).fit(*data(30)).kernel for s in (None, None, 5, 5)]
    assert not np.array_equal(kernels[0], kernels[1])
    np.testing.assert_array_equal(kernels[2], kernels[3])


@pytest.mark.parametrize("name", heads.__all__)
def test_config_goes_there_and_back(name):
    kind, extra = getattr(heads, name), {}
    if name == "AdaMix":
        extra = dict(projection=2, decay_to="zero", initial_weights=np.ones([WIDTH, CLASSES]))
    head = kind(np.int64(CLASSES), np.float32(2), l2_norm_clip=np.float64(0.3), seed=9, **extra)
    config = head.get_config()
    assert "seed" not in config and "seed" not in repr(head) + str(config)
    assert "initial_weights" not in repr(head)
    assert json.loads(json.dumps(config)) == config
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(head))
    assert type(again) is kind and again.get_config() == config and again.kernel is None
    assert again.noise_multiplier == head.noise_multiplier
    np.testing.assert_array_equal(vars(again).get("initial_weights"), extra.get("initial_weights"))
