"""Softmax regression to convergence, without privacy: on public data, or for a reference."""

import numpy as np
import scipy.optimize


def minimum(loss_and_gradient, start, l2_regularization, reference, most_iterations=1000):
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
