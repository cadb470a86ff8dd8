"""Gradient descent preconditioned by the covariance of the features (Algorithm 3)."""

import dataclasses
import math

import keras
import numpy as np

from tfdpx._arguments import check_positive_integer, require
from tfdpx.heads import _class_moments, _solves
from tfdpx.heads._fields import (
    argument,
    finite,
    norm_bound,
    not_negative,
    one_of,
    optional,
    positive,
    share,
)
from tfdpx.heads._gradients import Gradients
from tfdpx.heads._moments import second_moment
from tfdpx.heads.head import Head


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class FeatureCovariance(Head):
    """Logistic regression by `steps` full gradients, each times one noisy inverse covariance.

    Algorithm 3 of "Differentially Private Image Classification from Features": it releases
    `G = sum_i x_i x_i^T` once, of features clipped to C_G, and `steps` sums of gradients of the
    sigmoid cross-entropy clipped to C_g, and moves by `-eta (G/n + lambda I)^-1 g/n`.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example (Theorem
    2.3: `steps + 1` Gaussians). An example changes G by at most C_G^2 in the Frobenius norm, and
    each sum of gradients by C_g. The noise on G is symmetric, which is as private
    (`Releases.symmetric`). Where noise makes G indefinite, see `_solves.Positive`.

    The weights start at zero, and every bias stays at `initial_bias`: Algorithm 3 has none.
    A constant feature learns one (`tfdpx.layers.UnitNormWithConstant`).

    Beyond the paper: `covariance_share`, and `start="least_squares"`, which begins at the solution
    of Algorithm 2 times `start_scale`; it needs two releases more and uses the same G.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int, gradients.
        learning_rate: Float, eta.
        l2_regularization: Float, lambda, added to the mean G/n; None makes it a quarter larger than
            the noise.
        covariance_share: Float in (0, 1): the share of the budget (of the sum of 1/sigma^2) that G
            gets; None gives all releases the same sigma, as in the paper.
        start: "zeros" or "least_squares".
        alpha: Float, as of `LeastSquares`, for that start.
        start_scale: Float, what that start is multiplied by.
        initial_bias: Float.
        noise_multiplier: Float, in place of epsilon: of each of equal releases.
        l2_norm_clip: Float, C_g.
        feature_norm_clip: Float, C_G; None for `l2_norm_clip`.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.
        class_memory: Int, bytes for the matrices of classes of the start "least_squares".

    Attributes:
        covariance_noise_multiplier, gradient_noise_multiplier: Floats, of G and of all others.

    Raises:
        ValueError: If an argument does not fit.
    """

    steps: int = argument(10, check_positive_integer)
    _: dataclasses.KW_ONLY
    learning_rate: float = argument(4.0, positive)
    l2_regularization: float | None = argument(None, optional(not_negative))
    covariance_share: float | None = argument(None, optional(share))
    start: str = argument("zeros", one_of("zeros", "least_squares"))
    alpha: float = argument(0.1, positive)
    start_scale: float = argument(10.0, positive)
    initial_bias: float = argument(-10.0, finite)
    feature_norm_clip: float | None = argument(None, optional(norm_bound))
    class_memory: int = argument(2**29, check_positive_integer)

    def __post_init__(self):
        super().__post_init__()
        if self.feature_norm_clip is None:
            self.feature_norm_clip = self.l2_norm_clip
        fits = self.feature_norm_clip < math.inf or not self.noise_multiplier
        require(fits, "feature_norm_clip", self.feature_norm_clip, "be finite for a private head")
        count = self.num_releases
        part = 1 / count if self.covariance_share is None else self.covariance_share
        self.covariance_noise_multiplier = self.noise_multiplier / math.sqrt(part * count)
        self.gradient_noise_multiplier = self.noise_multiplier * math.sqrt(
            (count - 1) / ((1 - part) * count)
        )

    def _releases(self):
        named = {"covariance": 1, "gradient": self.steps}
        if self.start == "least_squares":
            named |= dict.fromkeys(_class_moments.NAMES, 1)
        return named

    def _planned(self):
        planned = {
            name: (self.gradient_noise_multiplier, times)
            for name, times in self._releases().items()
        }
        return {**planned, "covariance": (self.covariance_noise_multiplier, 1)}

    def _sizes(self, dimension):
        return {
            "covariance": dimension**2,
            "gradient": self.num_classes * dimension,
            **_class_moments.sizes(self.num_classes, dimension),
        }

    def _fit(self, examples, released):
        squared = self.feature_norm_clip**2
        covariance = released.symmetric(
            "covariance", lambda: second_moment(examples, self.feature_norm_clip), squared
        )
        given = self.l2_regularization
        given = None if given is None else examples.count * given
        ridge = _solves.ridge(covariance, given, self.covariance_noise_multiplier, squared)
        system = _solves.Positive(covariance, ridge)
        bias = np.full([self.num_classes], self.initial_bias)
        kernel = self._initial_kernel(examples, released, covariance)
        gradients = Gradients(examples, self.num_classes, self.l2_norm_clip)
        for _ in range(self.steps):
            gradient = released.gaussian(
                "gradient", lambda kernel=kernel: gradients.sums(kernel, bias)[0], self.l2_norm_clip
            )
            kernel -= self.learning_rate * system.solve(gradient)
        return kernel, bias

    def _initial_kernel(self, examples, released, covariance):
        if self.start == "zeros":
            return np.zeros([examples.dimension, self.num_classes])
        sigma = math.hypot(
            self.gradient_noise_multiplier, self.alpha * self.covariance_noise_multiplier
        )
        squared = self.feature_norm_clip**2
        kernel = _class_moments.least_squares(
            examples,
            released,
            self.alpha * covariance,
            num_classes=self.num_classes,
            l2_norm_clip=self.feature_norm_clip,
            max_positives=1,
            memory=self.class_memory,
            ridge_of=lambda matrix: _solves.ridge(matrix, None, sigma, squared),
        )
        return self.start_scale * kernel
