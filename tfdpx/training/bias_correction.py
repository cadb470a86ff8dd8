"""Adam whose second moment is less the noise's variance (Tang et al. 2023, arXiv:2312.14334).

The square of a noisy gradient is on average the square of the gradient plus the variance of the
noise, which is public. Under privacy the second is mostly the larger, so that Adam divides all
coordinates by nearly the same number. Here the variance is taken from each square as it enters the
average, so that the average has the mean of the squared gradients, also where the variance changes
from update to update. An average of few squares is seldom exact: it counts as at least a share of
the variance.

Guarantee: as without it. Moments are computed from noisy gradients and public numbers.
"""

import math
from typing import Any

import tensorflow as tf

from tfdpx._arguments import check_choice, is_number, require
from tfdpx._keras import model_internals
from tfdpx.training.private_optimizer import PrivateOptimizer

NOISE = "noise"
_CHOICES = (None, NOISE)


class BiasCorrected(PrivateOptimizer):
    """`PrivateOptimizer` with the arguments `bias_correction` and `least_second_moment`.

    It stands before `keras.optimizers.Adam`, or a class made of it, in the bases.
    """

    def __init__(
        self,
        *args: Any,
        bias_correction: str | None = None,
        least_second_moment: float = 0.1,
        **kwargs: Any,
    ) -> None:
        check_choice("bias_correction", bias_correction, _CHOICES)
        least = least_second_moment
        fits = is_number(least) and 0 < least < math.inf
        require(fits, "least_second_moment", least, "be a finite float > 0")
        super().__init__(*args, **kwargs)
        self.bias_correction, self.least_second_moment = bias_correction, float(least)
        if bias_correction is not None and self.amsgrad:
            raise ValueError(
                "Arguments `bias_correction` and `amsgrad` exclude each other: the largest of "
                "noisy averages is no average. Received: amsgrad=True. Leave one of them out."
            )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Adam's update by the corrected second moment, where that is asked for."""
        if self.bias_correction is None:
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = self.opened(gradient)
        first, second = model_internals.adam_moments(self, variable)
        dtype = variable.dtype
        values, variance = tf.cast(gradient.tensor, dtype), tf.cast(gradient.deviation, dtype) ** 2
        self.assign_add(first, (values - first) * (1 - self.beta_1))
        self.assign_add(second, (values**2 - variance - second) * (1 - self.beta_2))
        # In float32: of 16 bits, 1 - beta_2 were zero.
        step = tf.cast(self.iterations + 1, "float32")
        unbiased = second / tf.cast(1 - self.beta_2**step, dtype)
        moment = tf.maximum(unbiased, self.least_second_moment * variance)
        rate = tf.cast(tf.cast(learning_rate, "float32") / (1 - self.beta_1**step), dtype)
        self.assign_sub(variable, rate * first / (tf.sqrt(moment) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        names = ("bias_correction", "least_second_moment")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}
