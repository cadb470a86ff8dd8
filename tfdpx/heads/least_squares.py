"""Least squares with one matrix for all classes and one for each (Algorithm 2)."""

import dataclasses
import math

import keras
import numpy as np

from tfdpx._arguments import check_positive_integer, require
from tfdpx.heads import _class_moments, _solves
from tfdpx.heads._fields import argument, not_negative, optional, positive
from tfdpx.heads._moments import second_moment
from tfdpx.heads.head import Head


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class LeastSquares(Head):
    """Linear regression on zeros and ones from noisy second moments, in closed form.

    Algorithm 2 of "Differentially Private Image Classification from Features". With x_i clipped to
    C = `l2_norm_clip`, it releases, each at the noise multiplier sigma,

        G = sum_i x_i x_i^T,   A_j = sum_{i in j} x_i x_i^T,   b_j = sum_{i in j} x_i,

    and solves `(A_j + alpha G + lambda I) theta_j = b_j` for each class j.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example (Theorem
    2.2: three Gaussians). An example changes G by at most C^2 in the Frobenius norm, all A_j
    together by sqrt(k) C^2 and all b_j by sqrt(k) C, with k = `max_positives`. Of an example with
    more positive classes only the first k count. Noise on matrices is symmetric, which is as
    private as the paper's (`Releases.symmetric`).

    No array `[num_classes, d, d]` is held: classes are solved a few at a time, with a pass over the
    examples for each `class_memory` bytes of their matrices.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        alpha: Float > 0, the weight of examples of other classes.
        l2_regularization: Float, lambda, of sums and not of means; None makes it a quarter larger
            than the noise.
        max_positives: Int, k: the most classes that an example has.
        noise_multiplier: Float, in place of epsilon.
        l2_norm_clip: Float, C.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.
        class_memory: Int, bytes for the matrices of classes; changes results by rounding alone.

    Raises:
        ValueError: If an argument does not fit.
    """

    _: dataclasses.KW_ONLY
    alpha: float = argument(0.1, positive)
    l2_regularization: float | None = argument(None, optional(not_negative))
    max_positives: int = argument(1, check_positive_integer)
    class_memory: int = argument(2**29, check_positive_integer)

    def __post_init__(self):
        super().__post_init__()
        fits = self.max_positives <= self.num_classes
        must = f"not exceed num_classes={self.num_classes}"
        require(fits, "max_positives", self.max_positives, must)

    def _releases(self):
        return dict.fromkeys(("covariance", *_class_moments.NAMES), 1)

    def _sizes(self, dimension):
        return {"covariance": dimension**2, **_class_moments.sizes(self.num_classes, dimension)}

    def _fit(self, examples, released):
        squared = self.l2_norm_clip**2
        covariance = released.symmetric(
            "covariance", lambda: second_moment(examples, self.l2_norm_clip), squared
        )
        sensitivity = squared * math.sqrt(self.max_positives + self.alpha**2)
        kernel = _class_moments.least_squares(
            examples,
            released,
            self.alpha * covariance,
            num_classes=self.num_classes,
            l2_norm_clip=self.l2_norm_clip,
            max_positives=self.max_positives,
            memory=self.class_memory,
            ridge_of=lambda matrix: _solves.ridge(
                matrix, self.l2_regularization, self.noise_multiplier, sensitivity
            ),
        )
        return kernel, np.zeros(self.num_classes)
