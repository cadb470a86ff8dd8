"""Tests of AdaMix's ablations, its baselines, and their measurements."""

import itertools
import math

import keras
import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import roc_auc_score

import tfdpx
from experiments.adamix import measures
from experiments.adamix.methods import METHODS, Recording, Theorem3
from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.heads.releases import Releases

CLASSES, WIDTH, DELTA = 4, 6, 1e-5


def data(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    x = 0.5 * rng.normal(size=(count, WIDTH)) + np.eye(WIDTH)[labels]
    return x.astype("float32"), labels


PRIVATE, PUBLIC = data(60, 0), data(8, 1)
BOTH = tuple(np.concatenate(parts) for parts in zip(PRIVATE, PUBLIC, strict=True))


def fitted(name, **arguments):
    return METHODS[name][0](CLASSES, PUBLIC, PRIVATE, **arguments)


def slope(kernel, data, decay):
    x, y = data[0].astype("float64"), np.eye(CLASSES)[data[1]]
    return x.T @ (softmax(x @ kernel, axis=1) - y) + decay * kernel


def test_spending_of_each_method_and_minima_of_those_without_steps():
    exact = tfdpx.accounting.epsilon(20.0, 1.0, 28, DELTA, "gdp")
    for name, (_, rates) in METHODS.items():
        spent = fitted(name, **({} if rates is None else {"epsilon": 1.0})).epsilon_spent()
        assert spent == {"only_public": 0.0, "paragon": math.inf}.get(name, exact)

    only, paragon = fitted("only_public"), fitted("paragon", l2_regularization=0.5)
    np.testing.assert_allclose(slope(only.kernel, PUBLIC, 0.1), 0.0, atol=1e-3)
    np.testing.assert_allclose(slope(paragon.kernel, BOTH, 0.5), 0.0, atol=1e-3)


def test_where_the_steps_start_and_end():
    arguments = dict(steps=4, seed=1)
    mixed, zero = fitted("adamix", **arguments), fitted("zero_start", **arguments)
    only = fitted("only_public")
    np.testing.assert_array_equal(mixed.kept[0].kernel.astype("float32"), only.kernel)
    assert not zero.kept[0].kernel.any()
    # PPGD ends near the private weights, or at the public minimum.
    near, free = (fitted("ppgd", l2_regularization=decay, **arguments) for decay in (1e4, 0.1))
    assert not near.kept[0].kernel.any()
    slopes = [np.linalg.norm(slope(head.kernel, PUBLIC, 0.0)) for head in (free, near)]
    assert slopes[0] < slopes[1]
    gradient = np.linalg.norm(slope(near.kept[1].kernel, PUBLIC, 0.0)) / len(PUBLIC[1])
    assert near.kept[1].l2_norm_clip == pytest.approx(gradient)


def test_steps_decay_and_average_are_theorem_3s(monkeypatch):
    monkeypatch.setattr(Releases, "_noise", lambda self, shape, deviation: np.zeros(shape))
    head = Theorem3(CLASSES, steps=6, l2_regularization=5.0, l2_norm_clip=10.0)
    head.fit(*PRIVATE, public_data=PUBLIC)
    kernels = [step.kernel for step in head.kept]
    for t, (kernel, following) in enumerate(itertools.pairwise(kernels), 1):
        move = 2 / (5 * (t + 1)) * (slope(kernel, BOTH, 5.0) - 5.0 * kernels[0])
        np.testing.assert_allclose(following, kernel - move, atol=1e-4)
    mean = sum(t * kernel for t, kernel in enumerate(kernels, 1)) * 2 / (6 * 7)
    np.testing.assert_allclose(head.kernel, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamix", "adamix_projected", "ngd", "ppgd"])
def test_individual_epsilons_are_what_removing_an_example_shows(name):
    head = fitted(name, epsilon=0.5, seed=1)
    epsilons = measures.individual_epsilons(head, *PRIVATE)
    # The contribution of one example to each release, in units of the noise.
    x, y = PRIVATE[0][7].astype("float64"), np.eye(CLASSES)[PRIVATE[1][7]]
    square = 0.0
    for step in head.kept:
        gradient = np.outer(x, softmax(x @ step.kernel) - y)
        gradient *= min(1, step.l2_norm_clip / np.linalg.norm(gradient))
        if step.subspace is not None:
            gradient = step.subspace.T @ gradient
        square += (np.linalg.norm(gradient) / (20 * step.l2_norm_clip)) ** 2
    assert epsilons[7] == pytest.approx(exact_epsilon(math.sqrt(square), DELTA), rel=0.01)
    assert 0 < epsilons.min() < epsilons.max() <= head.epsilon_spent() * (1 + 1e-6)
    assert measures.individual_epsilons(head, np.zeros([1, WIDTH]), [0]) == 0.0


def test_the_attack_is_that_of_scikit_learn():
    head = Recording(CLASSES, steps=2).fit(*PRIVATE, public_data=PUBLIC)
    losses, other_losses = (measures.losses(head, *pair) for pair in (PRIVATE, data(40, 3)))
    wanted = keras.losses.sparse_categorical_crossentropy(
        PRIVATE[1], head.predict(PRIVATE[0]), from_logits=True
    )
    np.testing.assert_allclose(losses, wanted, rtol=1e-4, atol=1e-4)
    losses, other_losses = losses.round(1), other_losses.round(1)  # Rounding makes ties.
    truth = np.repeat([1, 0], [60, 40])
    wanted = roc_auc_score(truth, -np.concatenate([losses, other_losses]))
    assert measures.membership_auc(losses, other_losses) == pytest.approx(wanted)
