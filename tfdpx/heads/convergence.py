"""Softmax regression to convergence, without privacy: on public data, or for a reference."""

import numpy as np
import scipy.optimize
from scipy.special import logsumexp, softmax


def minimum(loss_and_gradient, start, l2_regularization, reference, most_iterations=500):
    """The kernel at which `loss + l2_regularization / 2 |kernel - reference|^2` is least.

    By L-BFGS in float64, to a gradient of 1e-6 in every entry or `most_iterations`.

    Args:
        loss_and_gradient: Function of a kernel, float64 `[d, m]`, to a float and float64 `[d, m]`.
        start: float64 `[d, m]`.
        l2_regularization: Float > 0, without which separable data have no minimum.
        reference: float64 `[d, m]`.
        most_iterations: Int.
    """

    def objective(flat):
        kernel = flat.reshape(start.shape)
        loss, gradient = loss_and_gradient(kernel)
        apart = kernel - reference
        loss += l2_regularization / 2 * np.sum(apart**2)
        return loss, (gradient + l2_regularization * apart).ravel()

    found = scipy.optimize.minimize(
        objective,
        start.ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": most_iterations, "maxfun": 2 * most_iterations, "gtol": 1e-6},
    )
    return found.x.reshape(start.shape)


def minimum_in_row_space(x, y, l2_regularization, reference):
    """`minimum` for the cross-entropy of few rows, in as many unknowns a class as there are rows.

    What the minimum adds to `reference` is a combination of the rows.

    Args:
        x: float64 `[n, d]`.
        y: float64 `[n, m]`.
        l2_regularization: Float > 0.
        reference: float64 `[d, m]`, where the search starts too.
    """
    basis, offset = np.linalg.qr(x.T)[0], x @ reference
    rows = x @ basis

    def loss_and_gradient(combination):
        loss, slopes = cross_entropy(rows @ combination + offset, y)
        return loss, rows.T @ slopes

    none = np.zeros([rows.shape[1], y.shape[1]])
    return reference + basis @ minimum(loss_and_gradient, none, l2_regularization, none)


def cross_entropy(logits, y):
    """The sum of the softmax cross-entropies, a float, and its gradient at the logits.

    Args:
        logits: float64 `[n, m]`.
        y: Array `[n, m]`, zeros and a single one a row.
    """
    losses = logsumexp(logits, axis=1) - np.sum(logits * y, axis=1)
    return float(np.sum(losses)), softmax(logits, axis=1) - y
