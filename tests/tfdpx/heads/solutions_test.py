"""Without noise each head is a known algorithm; the order of the examples changes rounding."""

import types

import head_cases
import numpy as np
import pytest
import tensorflow as tf
from head_cases import CLASSES, FREE, WIDTH, make
from sklearn.linear_model import LogisticRegression

from tfdpx.heads import FeatureCovariance, FirstOrder, LeastSquares, Newton, features, moments
from tfdpx.heads.moments import positive_solver

COUNT = 300


def data():
    return head_cases.data(COUNT)


def mean_clipped(residuals, rows, norm):
    """Returns the mean `[d, m]` of the clipped gradients of all examples."""
    gradients = np.einsum("nd,nm->ndm", rows, residuals)
    lengths = np.linalg.norm(gradients, axis=(1, 2), keepdims=True)
    return (gradients * np.minimum(1, norm / lengths)).mean(axis=0)


def regression(x, y):
    """Solves the regression of each class, with the labels as weights of its examples."""
    columns = []
    for weights in y.T:
        matrix = (x.T * weights) @ x + 0.3 * x.T @ x + 2.0 * np.eye(WIDTH)
        columns.append(np.linalg.solve(matrix, weights @ x))
    return np.transpose(columns)


def test_least_squares_is_the_weighted_regression():
    x, y = data()
    one, other = np.eye(CLASSES)[y], np.eye(CLASSES)[(y + 1) % CLASSES]
    first = np.eye(CLASSES)[np.minimum(y, (y + 1) % CLASSES)]
    for labels, k, used_labels in (
        (y, 1, one),
        (one + other, 1, first),  # Only the first k positives count.
        (one + other, 2, one + other),
        (0.7 * one + 0.1, 1, 0.7 * one + 0.1),  # Soft labels that sum to 1.1, and squares to less.
    ):
        head = LeastSquares(**FREE, alpha=0.3, l2_regularization=2.0, max_positives=k)
        np.testing.assert_allclose(
            head.fit(x, labels).kernel, regression(x, used_labels), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (LeastSquares, {}),
        (FeatureCovariance, dict(feature_norm_clip=0.1)),
        (FeatureCovariance, dict(start="least_squares")),
        (Newton, {}),
        (FirstOrder, {}),
    ],
)
def test_an_infinite_epsilon_does_not_clip(kind, arguments):
    x, y = data()
    head = kind(CLASSES, np.inf, **arguments)
    assert head.get_config()["l2_norm_clip"] == 1.0 and head.noise_multiplier == 0
    free = kind(**FREE, **{**arguments, "feature_norm_clip": np.inf} if arguments else {})
    np.testing.assert_array_equal(head.fit(x, y).kernel, free.fit(x, y).kernel)
    assert np.abs(head.kernel - kind(CLASSES, noise_multiplier=0.0).fit(x, y).kernel).max() > 1e-4
    assert head.epsilon_spent() == np.inf


def test_newton_is_algorithm_1_and_ends_at_the_logistic_regression():
    x, y = data()
    head = Newton(**FREE, steps=1, l2_regularization=5.0).fit(x, y)  # The penalty is on the sum.
    step = np.linalg.solve(x.T @ x / 4 + 5.0 * np.eye(WIDTH), x.T @ (np.eye(CLASSES)[y] - 0.5))
    np.testing.assert_allclose(head.kernel, step, rtol=1e-4)
    head = Newton(**FREE, steps=12, l2_regularization=3.0).fit(x, y)
    for j in range(CLASSES):
        # Newton's ridge is only in the step, so the optimum has no penalty.
        oracle = LogisticRegression(C=1e8, fit_intercept=False, tol=1e-10).fit(x, y == j)
        np.testing.assert_allclose(head.kernel[:, j], oracle.coef_[0], rtol=2e-2, atol=5e-3)


def test_feature_covariance_is_algorithm_3():
    x, y = data()
    head = FeatureCovariance(
        CLASSES, noise_multiplier=0.0, steps=4, learning_rate=3.0, l2_regularization=0.05,
        l2_norm_clip=0.8, feature_norm_clip=1.5, initial_bias=-1.0,
    ).fit(x, y)  # fmt: skip
    rows, targets = x * np.minimum(1, 1.5 / np.linalg.norm(x, axis=1))[:, None], np.eye(CLASSES)[y]
    matrix = rows.T @ rows / COUNT + 0.05 * np.eye(WIDTH)
    kernel = np.zeros([WIDTH, CLASSES])
    for _ in range(4):
        residuals = 1 / (1 + np.exp(1 - x @ kernel)) - targets
        kernel -= 3.0 * np.linalg.solve(matrix, mean_clipped(residuals, x, 0.8))
    # The clip leaves 0.01% for rounding.
    np.testing.assert_allclose(head.kernel, kernel, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(head.bias, [-1.0] * CLASSES)


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("momentum", 0.9)])
def test_first_order_is_gradient_descent_on_kernel_and_bias(optimizer, momentum):
    x, y = data()
    head = FirstOrder(
        CLASSES, noise_multiplier=0.0, steps=5, optimizer=optimizer, learning_rate=0.9,
        l2_regularization=0.1, l2_norm_clip=0.8, initial_bias=-1.0,
    ).fit(x, y)  # fmt: skip
    rows, targets = np.hstack([x, np.ones([COUNT, 1])]), np.eye(CLASSES)[y]
    both = np.vstack([np.zeros([WIDTH, CLASSES]), np.full([1, CLASSES], -1.0)])
    move = 0.0
    for _ in range(5):
        gradient = mean_clipped(1 / (1 + np.exp(-rows @ both)) - targets, rows, 0.8)
        gradient[:-1] += 0.1 * both[:-1]
        move = momentum * move - 0.9 * gradient
        both += move
    np.testing.assert_allclose(np.vstack([head.kernel, head.bias]), both, rtol=1e-3, atol=1e-4)
    average = make("adam", seed=2, average=True).fit(x, y)
    last = make("adam", seed=2).fit(x, y)
    assert np.abs(average.kernel).max() < np.abs(last.kernel).max()


@pytest.mark.parametrize("name", head_cases.NAMES)
def test_the_order_of_a_dataset_and_chunks_change_rounding_alone(monkeypatch, name):
    x, y = data()
    expected = make(name, seed=2).fit(x, y).kernel
    order = np.random.default_rng(3).permutation(COUNT)
    stream = tf.data.Dataset.from_tensor_slices((x[order], y[order])).batch(64)
    for rows in (features.ROWS, 7):
        for module in (features, moments):
            monkeypatch.setattr(module, "ROWS", rows)
        kernel = make(name, seed=2).fit(stream).kernel
        np.testing.assert_allclose(kernel, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", head_cases.FIRST)
def test_two_replicas_are_refused(monkeypatch, name):
    head, two = make(name), types.SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: two)
    with pytest.raises(ValueError, match="with 2 replicas. Call `fit` outside"):
        head.fit(*data())
    assert head.kernel is None and head.ledger.steps == 0


def test_an_indefinite_matrix_is_raised_to_the_nearest_that_can_be():
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(5, 5)))[0]
    values = np.array([-3.0, -1e-3, 0.5, 2.0, 9.0])
    matrix = (vectors * values) @ vectors.T
    expected = (vectors / (np.maximum(values, 0) + 0.1)) @ vectors.T
    np.testing.assert_allclose(positive_solver(matrix, 0.1)(np.eye(5)), expected, atol=1e-8)
    definite = matrix + 4 * np.eye(5)
    solved = positive_solver(definite, 0.1)(np.ones(5))
    np.testing.assert_allclose((definite + 0.1 * np.eye(5)) @ solved, np.ones(5))
