"""Defines the heads, by their names in the tables of the paper."""

import math

from tfdpx import heads
from tfdpx.train.errors import UserError, checking_flags

# From a name to the class of a head and its arguments, without the budget. Numbers of steps are
# from the paper: Tables 2 to 4 and 6 have Newton and feature covariance with 1 and 10 steps, and
# Adam with 1, 10 and 100. Learning rates and alpha were chosen on other draws of the mixture; for
# dp_newton, on a smaller mixture. After one step from zero a learning rate only scales the scores,
# so it does not change the accuracy.
METHODS = {
    "dp_ls": (heads.LeastSquares, {"alpha": 1.0}),
    "dp_newton": (heads.Newton, {"steps": 10, "learning_rate": 0.1}),
    "dp_newton_1_step": (heads.Newton, {"steps": 1}),
    "dp_fc": (heads.FeatureCovariance, {"steps": 10, "learning_rate": 8.0}),
    "dp_fc_1_step": (heads.FeatureCovariance, {"steps": 1}),
    "dp_adam": (heads.FirstOrder, {"steps": 100, "learning_rate": 0.1}),
    "dp_adam_1_step": (heads.FirstOrder, {"steps": 1}),
    "dp_adam_10_steps": (heads.FirstOrder, {"steps": 10, "learning_rate": 0.1}),
    "dp_fc_share": (
        heads.FeatureCovariance,
        {"steps": 10, "learning_rate": 8.0, "covariance_share": 0.3},
    ),
    "dp_fc_ls_start": (
        heads.FeatureCovariance,
        {"steps": 10, "learning_rate": 8.0, "start": "least_squares", "alpha": 1.0},
    ),
}


def build(method, num_classes, epsilon, delta, seed=None, **arguments):
    """Returns the unfitted head of a method.

    Args:
        method: One of `METHODS`.
        num_classes: Int.
        epsilon: Float; infinity fits without clipping and noise.
        delta: Float.
        seed: Optional int.
        **arguments: Arguments of the head; they replace the method's arguments.

    Raises:
        UserError: If there is no such method, or an argument is invalid.
    """
    if method not in METHODS:
        raise UserError(
            f"There is no method {method!r}. Received: --method={method}. Use one of: "
            f"{', '.join(METHODS)}."
        )
    kind, defaults = METHODS[method]
    if epsilon == math.inf:
        arguments = {**arguments, "l2_norm_clip": math.inf}
    with checking_flags():
        return kind(num_classes, epsilon, delta, seed=seed, **{**defaults, **arguments})
