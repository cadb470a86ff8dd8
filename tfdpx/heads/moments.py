"""Heads on noisy second moments of the features, and the linear systems that they solve.

The matrices of the classes are formed one after the other; no array `[num_classes, d, d]`
is held in memory. The algorithms come from "Differentially Private Image Classification from
Features", which is called the paper here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import keras
import numpy as np
import scipy.linalg
import scipy.sparse
from scipy.special import expit

from tfdpx._arguments import check_choice, check_positive_integer, is_number, require
from tfdpx.heads.features import ROWS, FeatureSet, clipped_rows, first_positives
from tfdpx.heads.gradients import gradient_sum, probabilities
from tfdpx.heads.head import Head, norm_bound, optional, positive
from tfdpx.heads.releases import Releases

# The bound on the second derivative of the logistic loss.
_CURVATURE = 0.25
# The smallest eigenvalue that a system may have, as a share of its ridge.
_LEAST = 1 / 8
# The ridge that is chosen from the noise, as a multiple of the noise's norm.
_OF_THE_NOISE = 1.25
_CLASS_NAMES = ("class moments", "class sums")


def _check_share(name, value):
    is_valid = value is None or (is_number(value) and 0 < value < 1)
    require(is_valid, name, value, "lie strictly between 0 and 1", " None gives equal shares.")


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
    together by sqrt(k) C^2 and all b_j by sqrt(k) C, with k = `max_positives`, because only the
    first k positive classes of an example count. A soft label y_ij is the weight of x_i in A_j and
    b_j; the squares of an example's labels sum to at most k, because the labels beyond that count
    as zero (`first_positives`). Noise on matrices is symmetric, which is as private as the paper's
    (`Releases.symmetric`).

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        alpha: Float > 0, the weight of examples of other classes.
        l2_regularization: Float, lambda, for sums instead of means. None makes it a quarter larger
            than the noise.
        max_positives: Int, k, the largest number of classes of an example. Soft labels that sum to
            one need no more than 1.
        noise_multiplier: Float, instead of epsilon.
        l2_norm_clip: Float, C.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Raises:
        ValueError: If an argument is invalid.
    """

    _: dataclasses.KW_ONLY
    alpha: float = 0.1
    l2_regularization: float | None = None
    max_positives: int = 1

    _checks = {**Head._checks, "max_positives": check_positive_integer}

    def __post_init__(self):
        super().__post_init__()
        is_valid = self.max_positives <= self.num_classes
        must = f"not exceed num_classes={self.num_classes}"
        require(is_valid, "max_positives", self.max_positives, must)

    def _releases(self):
        return dict.fromkeys(("covariance", *_CLASS_NAMES), 1)

    def _sizes(self, dimension):
        return {"covariance": dimension**2, **_class_sizes(self.num_classes, dimension)}

    def _fit(self, examples, released):
        squared = self.l2_norm_clip**2
        covariance = released.symmetric(
            "covariance", second_moment(examples, self.l2_norm_clip), squared
        )
        sensitivity = squared * math.sqrt(self.max_positives + self.alpha**2)
        kernel = solve_classes(
            examples,
            released,
            self.alpha * covariance,
            num_classes=self.num_classes,
            l2_norm_clip=self.l2_norm_clip,
            max_positives=self.max_positives,
            ridge_of=lambda matrix: ridge(
                matrix, self.l2_regularization, self.noise_multiplier, sensitivity
            ),
        )
        return kernel, np.zeros(self.num_classes)


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
    (`Releases.symmetric`). If noise makes G indefinite, `positive_solver` raises its eigenvalues.

    The weights start at zero, and every bias stays at `initial_bias` because Algorithm 3 has none.
    To learn a bias, add a constant feature (`tfdpx.layers.UnitNormWithConstant`).

    Two arguments go beyond the paper: `covariance_share`, and `start="least_squares"`, which begins
    at the solution of Algorithm 2 times `start_scale`. It needs two more releases and the same G.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int, number of gradients.
        learning_rate: Float, eta.
        l2_regularization: Float, lambda, added to the mean G/n; None makes it a quarter larger than
            the noise.
        covariance_share: Float in (0, 1): the share of the budget (of the sum of 1/sigma^2) that G
            gets; None gives all releases the same sigma, as in the paper.
        start: "zeros" or "least_squares".
        alpha: Float, as for `LeastSquares`; used for that start.
        start_scale: Float, the factor of that start.
        initial_bias: Float.
        noise_multiplier: Float, instead of epsilon: the noise of each of several equal releases.
        l2_norm_clip: Float, C_g.
        feature_norm_clip: Float, C_G; None means `l2_norm_clip`.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Attributes:
        covariance_noise_multiplier, gradient_noise_multiplier: Floats, of G and of other releases.

    Raises:
        ValueError: If an argument is invalid.
    """

    steps: int = 10
    _: dataclasses.KW_ONLY
    learning_rate: float = 4.0
    l2_regularization: float | None = None
    covariance_share: float | None = None
    start: str = "zeros"
    alpha: float = 0.1
    start_scale: float = 10.0
    initial_bias: float = -10.0
    feature_norm_clip: float | None = None

    _checks = {
        **Head._checks,
        "covariance_share": _check_share,
        "start": lambda name, value: check_choice(name, value, ("zeros", "least_squares")),
        "start_scale": positive,
        "feature_norm_clip": optional(norm_bound),
    }

    def __post_init__(self):
        super().__post_init__()
        if self.feature_norm_clip is None or self.epsilon == math.inf:
            self.feature_norm_clip = self.l2_norm_clip
        is_valid = self.feature_norm_clip < math.inf or not self.noise_multiplier
        must = "be finite for a private head"
        require(is_valid, "feature_norm_clip", self.feature_norm_clip, must)
        count = self.num_releases
        part = 1 / count if self.covariance_share is None else self.covariance_share
        self.covariance_noise_multiplier = self.noise_multiplier / math.sqrt(part * count)
        self.gradient_noise_multiplier = self.noise_multiplier * math.sqrt(
            (count - 1) / ((1 - part) * count)
        )

    def _releases(self):
        named = {"covariance": 1, "gradient": self.steps}
        if self.start == "least_squares":
            named |= dict.fromkeys(_CLASS_NAMES, 1)
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
            **_class_sizes(self.num_classes, dimension),
        }

    def _fit(self, examples, released):
        squared = self.feature_norm_clip**2
        covariance = released.symmetric(
            "covariance", second_moment(examples, self.feature_norm_clip), squared
        )
        regularization = self.l2_regularization
        if regularization is not None:  # It is added to the mean.
            regularization *= examples.count
        solve = positive_solver(
            covariance,
            ridge(covariance, regularization, self.covariance_noise_multiplier, squared),
        )
        bias = np.full([self.num_classes], self.initial_bias)
        kernel = self._initial_kernel(examples, released, covariance)
        for _ in range(self.steps):
            gradient, _ = gradient_sum(examples, kernel, bias, self.l2_norm_clip)
            gradient = released.gaussian("gradient", gradient, self.l2_norm_clip)
            kernel -= self.learning_rate * solve(gradient)
        return kernel, bias

    def _initial_kernel(self, examples, released, covariance):
        if self.start == "zeros":
            return np.zeros([examples.dimension, self.num_classes])
        sigma = math.hypot(
            self.gradient_noise_multiplier, self.alpha * self.covariance_noise_multiplier
        )
        squared = self.feature_norm_clip**2
        kernel = solve_classes(
            examples,
            released,
            self.alpha * covariance,
            num_classes=self.num_classes,
            l2_norm_clip=self.feature_norm_clip,
            max_positives=1,
            ridge_of=lambda matrix: ridge(matrix, None, sigma, squared),
        )
        return self.start_scale * kernel


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class Newton(Head):
    """Logistic regression by `steps` Newton steps with noisy gradients and Hessians.

    Algorithm 1 of "Differentially Private Image Classification from Features". With x_i clipped to
    C = `l2_norm_clip` and p_ij the sigmoid of the logits, each step releases for all classes j

        g_j = sum_i (p_ij - y_ij) x_i,   H_j = sum_i p_ij (1 - p_ij) x_i x_i^T,

    and moves by `-eta (H_j + lambda I)^-1 g_j`. The weights start at zero, and the bias stays at
    zero because Algorithm 1 has none.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example: `2 steps`
    Gaussians (Theorem 2.1). An example changes all g_j together by at most sqrt(num_classes) C,
    with soft labels too, because |p_ij - y_ij| <= 1, and all H_j by sqrt(num_classes) C^2 / 4 in
    the Frobenius norm. The noise on the H_j is symmetric, which is as private
    (`Releases.symmetric`).

    Each step makes one pass over the examples per class, with a product of n d^2 operations.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int.
        learning_rate: Float, eta.
        l2_regularization: Float, lambda, added to the sum H_j as in Algorithm 1, while
            `FeatureCovariance` adds it to a mean. None makes it a quarter larger than the noise.
        noise_multiplier: Float, instead of epsilon.
        l2_norm_clip: Float, C.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Raises:
        ValueError: If an argument is invalid.
    """

    steps: int = 10
    _: dataclasses.KW_ONLY
    learning_rate: float = 1.0
    l2_regularization: float | None = None

    def _releases(self):
        return {"gradient": self.steps, "hessian": self.steps}

    def _sizes(self, dimension):
        size = self.num_classes * dimension
        return {"gradient": size, "hessian": size * dimension}

    def _fit(self, examples, released):
        root = math.sqrt(self.num_classes)
        kernel = np.zeros([examples.dimension, self.num_classes])
        bound = root * _CURVATURE * self.l2_norm_clip**2
        for _ in range(self.steps):
            gradient = self._gradient(examples, kernel)
            gradient = released.gaussian("gradient", gradient, root * self.l2_norm_clip)
            moves = np.zeros_like(kernel)
            for j in range(self.num_classes):
                if j == 0 or kernel.any():  # At zero all classes have the same Hessian.
                    hessian = self._hessian(examples, kernel[:, j])
                noisy = released.symmetric("hessian", hessian, bound, part=j)
                least = ridge(noisy, self.l2_regularization, self.noise_multiplier, bound)
                moves[:, j] = positive_solver(noisy, least)(gradient[:, j])
            kernel -= self.learning_rate * moves
        return kernel, np.zeros(self.num_classes)

    def _gradient(self, examples, kernel):
        total = np.zeros_like(kernel)
        for x, targets in examples.chunks():
            rows = clipped_rows(x, self.l2_norm_clip)
            total += rows.T @ (probabilities(expit, rows, kernel) - targets)
        return total

    def _hessian(self, examples, weights):
        total = np.zeros([examples.dimension] * 2)
        for x, _ in examples.chunks():
            rows = clipped_rows(x, self.l2_norm_clip)
            p = probabilities(expit, rows, weights)
            rows *= np.sqrt(p * (1 - p))[:, np.newaxis]
            total += rows.T @ rows
        return total


def second_moment(examples: FeatureSet, l2_norm_clip: float) -> np.ndarray:
    """Returns float64 `[d, d]`, the sum of `x x^T` over all clipped examples.

    Args:
        examples: `FeatureSet`.
        l2_norm_clip: Float, or infinity.
    """
    total = np.zeros([examples.dimension] * 2)
    for x, _ in examples.chunks():
        rows = clipped_rows(x, l2_norm_clip)
        total += rows.T @ rows
    return total


def solve_classes(
    examples: FeatureSet,
    released: Releases,
    shared: np.ndarray,
    *,
    num_classes: int,
    l2_norm_clip: float,
    max_positives: int,
    ridge_of: Callable[[np.ndarray], float],
) -> np.ndarray:
    """Returns float64 `[d, m]`, solutions of `(A_j + shared + ridge I) theta_j = b_j`.

    Guarantee: all A_j together have the sensitivity `sqrt(max_positives) l2_norm_clip^2`, all b_j
    `sqrt(max_positives) l2_norm_clip`, under adding or removing one example.

    Args:
        examples: `FeatureSet`.
        released: `Releases` in which "class moments" and "class sums" are planned.
        shared: The released matrix `[d, d]` that all classes share, weighted.
        num_classes: Int, m.
        l2_norm_clip: Float.
        max_positives: Int, k of `first_positives`, the number of labels of an example that count.
        ridge_of: Function from a released matrix to its ridge.
    """
    root = math.sqrt(max_positives)
    kernel = np.zeros([examples.dimension, num_classes])
    labels = scipy.sparse.vstack(
        [scipy.sparse.csc_array(first_positives(y, max_positives)) for _, y in examples.chunks()],
        format="csc",
    )
    for j, (start, end) in enumerate(itertools.pairwise(labels.indptr)):
        places, weights = labels.indices[start:end], labels.data[start:end]
        moment, total = _class_sums(examples.x, places, weights, l2_norm_clip)
        moment = released.symmetric(_CLASS_NAMES[0], moment, root * l2_norm_clip**2, part=j)
        total = released.gaussian(_CLASS_NAMES[1], total, root * l2_norm_clip, part=j)
        matrix = moment + shared
        kernel[:, j] = positive_solver(matrix, ridge_of(matrix))(total)
    return kernel


def _class_sums(x, places, weights, l2_norm_clip):
    """Returns the weighted second moment `[d, d]` and sum `[d]` of the clipped rows at `places`."""
    moment, total = np.zeros([x.shape[1]] * 2), np.zeros(x.shape[1])
    for start in range(0, len(places), ROWS):
        part = slice(start, start + ROWS)
        rows = clipped_rows(np.asarray(x[places[part]], "float64"), l2_norm_clip)
        moment += (rows * weights[part, np.newaxis]).T @ rows
        total += weights[part] @ rows
    return moment, total


def _class_sizes(num_classes, dimension):
    """Returns a dict from the names of the two releases to the number of their noisy entries."""
    sizes = num_classes * dimension**2, num_classes * dimension
    return dict(zip(_CLASS_NAMES, sizes, strict=True))


def positive_solver(matrix: np.ndarray, ridge: float) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that solves `(matrix + ridge I) x = right` for a positive definite matrix.

    This is post-processing, because it reads a released matrix and the public scale of its noise.
    The moment without noise has no negative eigenvalue, so with the ridge none is below the ridge.
    If noise has pushed one below an eighth of it, all eigenvalues below the ridge are raised to it.
    This is the nearest matrix (in the Frobenius norm) that the one without noise could be. So the
    condition number is at most 8 times the largest eigenvalue over the ridge. A Cholesky factor
    tests the eighth in a tenth of the time of eigenvalues.

    Args:
        matrix: float64 `[d, d]`, symmetric.
        ridge: Float > 0.
    """
    identity = np.eye(len(matrix))
    try:
        scipy.linalg.cholesky(matrix + (1 - _LEAST) * ridge * identity)
        factor = scipy.linalg.cho_factor(matrix + ridge * identity)
    except scipy.linalg.LinAlgError:
        values, vectors = scipy.linalg.eigh(matrix, driver="evd")
        inverse = (vectors / (np.maximum(values, 0.0) + ridge)) @ vectors.T
        return functools.partial(np.matmul, inverse)
    return functools.partial(scipy.linalg.cho_solve, factor)


def ridge(
    matrix: np.ndarray, regularization: float | None, noise_multiplier: float, sensitivity: float
) -> float:
    """Returns the ridge of a system: `regularization`, or a quarter larger than the noise.

    The spectral norm of noise of standard deviation s on the diagonal, and s / sqrt(2) off it,
    is about sqrt(2 d) s.

    Args:
        matrix: The released matrix `[d, d]`.
        regularization: Float, or None for the norm of the noise and at least a millionth of the
            mean eigenvalue.
        noise_multiplier: Float; s divided by the sensitivity.
        sensitivity: Float, of the matrix; infinite without privacy.
    """
    least = 1e-9 * max(float(np.trace(matrix)) / len(matrix), 1e-9)
    if regularization is not None:
        return max(regularization, least)
    if not noise_multiplier:
        return 1e3 * least
    norm = math.sqrt(2 * len(matrix)) * noise_multiplier * sensitivity
    return max(_OF_THE_NOISE * norm, 1e3 * least)
