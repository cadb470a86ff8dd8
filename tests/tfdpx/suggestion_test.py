"""`tfdpx.suggest`: its rule against the study's rows, its outlook, and what it refuses."""

import dataclasses

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfdpx
from experiments.settings import fit
from tfdpx import suggestion

PLAN = tfdpx.PrivacyPlan(4000, 1000, 100, noise_multiplier=3.65, delta=1e-5, accountant="rdp")


def network(*layers, shape=(8, 8, 1)):
    return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(10)])


def convolutional():
    layers = keras.layers
    return network(layers.Conv2D(16, 3, activation="relu"), layers.GlobalAveragePooling2D())


def shares(name):
    """Returns the parts of the settings in which the rule is near the best, and safe, by group."""
    groups = {}
    for key, curve in fit.settings(fit.FOLDER / name).items():
        rate, best = fit.rate_of(key), max(value for _, value in curve)
        near = best - fit.accuracy_at(curve, rate) <= 0.02
        group = key[8], key[2] in fit.GRAY
        groups.setdefault(group, []).append((near, rate <= fit.breaking(key, curve) / 2))
    return {group: np.mean(values, axis=0) for group, values in groups.items()}


@pytest.mark.parametrize("name", fit.FILES)
def test_the_rule_is_near_the_best_rate_of_the_study_and_below_the_breaking_one(name):
    by_group = shares(name)
    for optimizer, least in (("sgd", 0.78), ("adam", 0.9)):
        near, safe = by_group[optimizer, False]
        assert near >= least and safe >= 0.97


@pytest.mark.planted("the rule of rates is half or three times as large")
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_another_rule_is_noticed(monkeypatch, factor):
    rate = suggestion.learning_rate
    monkeypatch.setattr(suggestion, "learning_rate", lambda *a: factor * rate(*a))
    near, safe = shares("rows_gpu.csv")["sgd", False]
    assert near < 0.6 or safe < 0.9


@given(
    st.floats(1e-5, 0.1),
    st.integers(1, 10**5),
    st.integers(1, 10**9),
    st.sampled_from(["sgd", "adam"]),
    st.sampled_from(["dense", "attention", "trained before", "other"]),
)
def test_more_noise_updates_or_weights_never_raise_the_rate(noise, steps, weights, optimizer, kind):
    rate = suggestion.learning_rate(noise, steps, weights, optimizer, kind)
    assert 0 < rate <= 6
    for other in ((2 * noise, steps, weights), (noise, 2 * steps, weights)):
        assert suggestion.learning_rate(*other, optimizer, kind) <= rate
    assert suggestion.learning_rate(noise, steps, 2 * weights, optimizer, kind) <= rate


def test_weights_that_do_not_train_do_not_count():
    model = convolutional()
    whole = tfdpx.suggest(PLAN, model)
    assert whole == dataclasses.replace(tfdpx.suggest(PLAN, 330), advice=whole.advice)
    tfdpx.layers.trainable(model, "last")
    assert tfdpx.suggest(PLAN, model).signal == pytest.approx(whole.signal * (330 / 170) ** 0.5)


def test_the_kind_of_a_network_decides_the_largest_rate():
    plan = dataclasses.replace(PLAN, noise_multiplier=0.5, epsilon=None)
    dense, other = network(keras.layers.Flatten()), convolutional()
    attention = keras.layers.MultiHeadAttention(2, 8)
    inputs = keras.Input((4, 8))
    x = keras.layers.Flatten()(attention(inputs, inputs))
    attention = keras.Model(inputs, keras.layers.Dense(2)(x))
    rates = [tfdpx.suggest(plan, model).learning_rate for model in (dense, other, attention)]
    assert rates == [6.0, 6.0, 0.5]
    assert tfdpx.suggest(plan, attention, "adam").learning_rate == 0.004


def test_weights_that_were_trained_before_get_half_the_rate():
    model = convolutional()
    new = tfdpx.suggest(PLAN, model).learning_rate
    model.layers[0].bias.assign(np.linspace(-0.1, 0.2, 16))
    assert tfdpx.suggest(PLAN, model).learning_rate == pytest.approx(new / 2, rel=0.05)
    model = keras.Sequential([keras.Input((5, 2)), keras.layers.LSTM(4), keras.layers.Dense(2)])
    assert not suggestion.trained_before(model)  # Its biases begin with zeros and ones.


@pytest.mark.parametrize(
    "weights, outlook", [(10_000, "good"), (250_000, "hard"), (4_400_000, "hopeless")]
)
def test_the_outlook_follows_from_the_plan_and_the_number_of_weights(weights, outlook):
    suggested = tfdpx.suggest(PLAN, weights)
    assert suggested.outlook == outlook and suggested.advice.lower().startswith(outlook)
    assert suggested.signal == pytest.approx(1000 / 3.65 * (100 / weights) ** 0.5)
    assert ("a larger epsilon" in suggested.advice) == (outlook != "good")


def test_remedies_come_in_order():
    plan = tfdpx.PrivacyPlan(64, 64, 100, noise_multiplier=30.0, delta=1e-5, accountant="rdp")
    advice = tfdpx.suggest(plan, convolutional()).advice
    remedies = ("make_private_model", 'trainable(model, "last")', "warm_start", "ScatterLinear")
    places = [advice.index(text) for text in (*remedies, "more examples", "a larger epsilon")]
    assert places == sorted(places) and "(10, (8, 8, 1))" in advice


def test_a_new_plan_has_large_batches_and_enough_updates():
    assert suggestion.batch_and_steps(500) == (500, 200)
    assert suggestion.batch_and_steps(4000) == (1024, 200)
    assert suggestion.batch_and_steps(12_000) == (3000, 200)
    assert suggestion.batch_and_steps(10**6) == (4096, 2442)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3.0, 100), "`plan` must be a tfdpx.PrivacyPlan"),
        ((PLAN, 0), "`model` must be a keras.Model, or an int >= 1"),
        ((PLAN, keras.Sequential([keras.layers.Dense(2)])), "be built and have weights"),
        ((PLAN, 100, "lion"), "`optimizer` must be"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.suggest(*arguments)
