"""The automatic settings of a linear classifier on features: a larger budget is never worse."""

import dataclasses

import keras
import numpy as np
import pytest

import tfdpx
from experiments.high_accuracy import fit_choice

EPSILONS = (0.5, 1, 3, 8, 20)
# Images, classes, the shared part of all features, its spread, noise of the rest, and the largest
# number of images of a person.
GRAY, FEW = (1500, 10, 1.0, 0.1, 4.0, 1), (300, 3, 1.0, 0.1, 3.0, 1)
COLOUR, TWO = (1200, 4, 4.0, 1.0, 4.0, 1), (600, 2, 4.0, 1.0, 4.0, 1)
PEOPLE = (2000, 4, 4.0, 1.0, 4.0, 8)


def rows(count, classes, shared, spread, noise, most, seed=0):
    """Draws features of norm one, labels, people; images of one person are similar."""
    rng = np.random.default_rng(seed)
    means, direction = rng.normal(size=(classes, 200)), rng.normal(size=200)
    owners = np.sort(rng.integers(0, max(count // most, 1) * 2, count)) if most > 1 else None
    y = rng.integers(0, classes, count)
    x = means[y] + noise * rng.normal(size=(count, 200))
    x += (shared + spread * rng.normal(size=(count, 1))) * direction * noise
    if owners is not None:
        x += rng.normal(size=(owners.max() + 1, 200))[owners]
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32"), y, owners


def of_old_rule(values, num_protected):
    """Returns the old settings: a rate that grows with the budget, and gradients of one norm."""
    size = values.epsilon * num_protected
    steps = round(min(max(size / 140, 10), 120))
    rate = min(max(0.3 * size, 100), 6000) / steps
    changed = dict(steps=steps, learning_rate=rate, l2_norm_clip=0.02, ema_momentum=0.0)
    return dataclasses.replace(values, **changed)


def accuracies(problem, rule):
    x, y, owners = rows(*problem)
    test = len(x) * 3 // 4
    owners = owners if owners is None else owners[:test]
    protected = test if owners is None else len(set(owners))
    reached = []
    for epsilon in EPSILONS:
        values = rule(fit_choice.automatic(epsilon, protected), protected)
        runs = [
            fit_choice.accuracy(x[:test], y[:test], (x[test:], y[test:]), values, seed, owners)
            for seed in range(3)
        ]
        reached.append(np.mean(runs))
    return reached


def largest_loss(problem, rule=lambda values, num_protected: values):
    """Returns the largest loss of accuracy of a budget against a smaller one."""
    reached = accuracies(problem, rule)
    return max(np.maximum.accumulate(reached) - reached)


def test_more_epsilon_is_not_worse():
    assert largest_loss(COLOUR) < 0.03 < largest_loss(COLOUR, of_old_rule)
    assert accuracies(COLOUR, lambda values, _: values)[-1] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("problem", [GRAY, FEW, TWO, PEOPLE])
def test_more_epsilon_is_not_worse_for_other_kinds(problem):
    assert largest_loss(problem) < 0.03


@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
@pytest.mark.parametrize("of_people", [False, True])
def test_the_simulated_training_is_that_of_the_product(of_people, monkeypatch):
    monkeypatch.setattr(fit_choice, "noise_multiplier", lambda *_: 0.0)
    x, y, owners = rows(60, 3, 1.0, 0.1, 3.0, 3)
    people = {"user_ids": owners, "examples_per_user": 4} if of_people else {}
    protected = len(set(owners)) if of_people else len(x)
    values = dataclasses.replace(fit_choice.automatic(1.0, protected), steps=12)
    has_few = np.isin(owners, np.flatnonzero(np.bincount(owners) <= 4))
    assert has_few.all()
    plan = tfdpx.PrivacyPlan(
        protected,
        protected,
        12,
        noise_multiplier=0.0,
        delta=1e-5,
        **({"unit": "user"} if people else {}),
    )
    optimizer = tfdpx.DPSGD(
        values.learning_rate,
        plan=plan,
        l2_norm_clip=values.l2_norm_clip,
        use_ema=True,
        ema_momentum=values.ema_momentum,
    )
    model = keras.Sequential(
        [keras.Input((200,)), keras.layers.Dense(3, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        x, y, steps_per_epoch=12, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()], **people
    )
    weights = fit_choice.train(x, y, values, 0, owners if of_people else None)
    np.testing.assert_allclose(model.layers[0].kernel, weights, atol=1e-3 * np.abs(weights).max())
