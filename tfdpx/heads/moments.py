"""Heads that solve linear systems with noisy second moments of the features.

The algorithms are from "Differentially Private Image Classification from Features", called the
paper in this module. The matrices of different classes are computed one after the other, so memory
never holds an array `[num_classes, d, d]`.
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
# The ridge is the multiple of the identity that is added to a noisy matrix. The smallest eigenvalue
# of the resulting matrix must be at least this share of the ridge.
_LEAST = 1 / 8
# By default the ridge is this multiple of the spectral norm of the noise.
_OF_THE_NOISE = 1.25
_CLASS_NAMES = ("class moments", "class sums")


def _check_share(name, value):
    is_valid = value is None or (is_number(value) and 0 < value < 1)
    require(is_valid, name, value, "lie strictly between 0 and 1", " None gives equal shares.")


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class LeastSquares(Head):
    """Least-squares regression of the labels, in closed form, from noisy second moments.

    This is Algorithm 2 of "Differentially Private Image Classification from Features". The features
    x_i are clipped to C = `l2_norm_clip`. The head releases, each with noise multiplier sigma,

        G = sum_i x_i x_i^T,   A_j = sum_{i in j} x_i x_i^T,   b_j = sum_{i in j} x_i,

    where "i in j" are the examples of class j. It then solves
    `(A_j + alpha G + lambda I) theta_j = b_j` for the weights theta_j of each class j.

    Guarantee: the fit is (epsilon, delta)-differentially private for adding or removing one example
    (Theorem 2.2: three Gaussian mechanisms). Only the first k = `max_positives` classes of an
    example count, so an example changes G by at most C^2 in the Frobenius norm, all A_j together by
    at most sqrt(k) C^2, and all b_j together by at most sqrt(k) C. A soft label is the weight of
    the example in A_j and b_j. The squares of the labels of an example sum to at most k; further
    labels count as zero (`first_positives`). The noise on matrices is symmetric, which is as
    private as the paper's noise (`Releases.symmetric`).

    Args:
        num_classes: Int, the number of classes.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        alpha: Float > 0, the weight of all examples in the system of each class.
        l2_regularization: Float, lambda, which is added to sums rather than means. None chooses a
            lambda that is a quarter larger than the spectral norm of the noise.
        max_positives: Int, k, the largest number of classes of an example. 1 is enough for soft
            labels that sum to one.
        noise_multiplier: Float, sigma, instead of epsilon.
        l2_norm_clip: Float, C, the largest norm of an example's features.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.

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
    """Logistic regression by gradient descent, preconditioned by a noisy feature covariance.

    This is Algorithm 3 of "Differentially Private Image Classification from Features". It clips
    features to C_G and releases `G = sum_i x_i x_i^T` once. In each of `steps` steps it clips the
    gradients of the sigmoid cross-entropy to C_g, releases their sum g, and changes the weights by
    `-eta (G/n + lambda I)^-1 g/n`.

    Guarantee: the fit is (epsilon, delta)-differentially private for adding or removing one example
    (Theorem 2.3: `steps + 1` Gaussian mechanisms). An example changes G by at most C_G^2 in the
    Frobenius norm, and each sum of gradients by at most C_g. The noise on G is symmetric, which is
    as private as the paper's noise (`Releases.symmetric`). If noise makes G indefinite,
    `positive_solver` raises its eigenvalues.

    The weights start at zero. The bias of each class stays at `initial_bias`, because Algorithm 3
    does not train the bias. To learn a bias, add a constant feature
    (`tfdpx.layers.UnitNormWithConstant`).

    Two arguments are not in the paper. `covariance_share` sets the part of the budget that is spent
    on G. With `start="least_squares"` the weights start at the solution of Algorithm 2, multiplied
    by `start_scale`. That solution uses the same G and needs two more releases.

    Args:
        num_classes: Int, the number of classes.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int, the number of gradients.
        learning_rate: Float, eta.
        l2_regularization: Float, lambda, which is added to G/n (a mean). None chooses a lambda that
            is a quarter larger than the spectral norm of the noise.
        covariance_share: Float in (0, 1), the share of the privacy budget (the sum of 1/sigma^2
            over all releases) that is spent on G. With None, all releases have the same sigma, as
            in the paper.
        start: "zeros" or "least_squares", the initial weights.
        alpha: Float, as for `LeastSquares`. Only for `start="least_squares"`.
        start_scale: Float, the factor by which the least-squares solution is multiplied.
        initial_bias: Float, the bias of each class.
        noise_multiplier: Float, instead of epsilon. If `covariance_share` is None, it is the noise
            multiplier of each release. Otherwise noise multipliers differ, at the same total cost.
        l2_norm_clip: Float, C_g, the largest norm of an example's gradient.
        feature_norm_clip: Float, C_G, the largest norm of an example's features in G. None means
            `l2_norm_clip`.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.

    Attributes:
        covariance_noise_multiplier: Float, the noise multiplier of G.
        gradient_noise_multiplier: Float, the noise multiplier of all other releases.

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
        if regularization is not None:  # The user's number is for the mean; `covariance` is a sum.
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

    This is Algorithm 1 of "Differentially Private Image Classification from Features". The features
    x_i are clipped to C = `l2_norm_clip`, and p_ij is the sigmoid of the logits. Each step releases

        g_j = sum_i (p_ij - y_ij) x_i,   H_j = sum_i p_ij (1 - p_ij) x_i x_i^T

    for all classes j, and changes the weights of class j by `-eta (H_j + lambda I)^-1 g_j`. The
    weights start at zero. Algorithm 1 has no bias, so the bias stays at zero.

    Guarantee: the fit is (epsilon, delta)-differentially private for adding or removing one example
    (Theorem 2.1: `2 steps` Gaussian mechanisms). Since |p_ij - y_ij| <= 1, also for soft labels, an
    example changes all g_j together by at most sqrt(num_classes) C. It changes all H_j together by
    at most sqrt(num_classes) C^2 / 4 in the Frobenius norm. The noise on the H_j is symmetric,
    which is as private as the paper's noise (`Releases.symmetric`).

    Each step takes time proportional to num_classes n d^2, for n examples with d features.

    Args:
        num_classes: Int, the number of classes.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int, the number of Newton steps.
        learning_rate: Float, eta.
        l2_regularization: Float, lambda, which is added to the sum H_j as in Algorithm 1
            (`FeatureCovariance` adds it to a mean). None chooses a lambda that is a quarter larger
            than the spectral norm of the noise.
        noise_multiplier: Float, the noise multiplier of each release, instead of epsilon.
        l2_norm_clip: Float, C, the largest norm of an example's features.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.

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
    """Returns the sum of `x x^T` over the clipped features of all examples, float64 `[d, d]`.

    Args:
        examples: `FeatureSet`.
        l2_norm_clip: Float, or infinity for no clipping.
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
    """Releases the moments A_j and b_j of each class j, and computes the weights of the classes.

    The weights of class j are the solution of `(A_j + shared + ridge I) theta_j = b_j`; see
    `LeastSquares`.

    Guarantee: the function applies two Gaussian mechanisms, for adding or removing one example. All
    A_j together have the sensitivity `sqrt(max_positives) l2_norm_clip^2`, and all b_j together
    `sqrt(max_positives) l2_norm_clip`.

    Args:
        examples: `FeatureSet` with labels.
        released: `Releases`. "class moments" and "class sums" must be among its planned names.
        shared: float64 array `[d, d]`, a noisy matrix that is added for all classes.
        num_classes: Int, m.
        l2_norm_clip: Float, the largest norm of an example's features.
        max_positives: Int, the number of labels of an example that count; see `first_positives`.
        ridge_of: Function from a noisy matrix to the ridge that is added to it.

    Returns:
        float64 array `[d, m]`.
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
    """Returns the weighted second moment `[d, d]` and the weighted sum `[d]` of some examples.

    Args:
        x: Array `[n, d]`, the features of all examples.
        places: Int array [k], the indices of the examples to sum over.
        weights: Float array [k], the weights of these examples.
        l2_norm_clip: Float. Features are first clipped to this norm.
    """
    moment, total = np.zeros([x.shape[1]] * 2), np.zeros(x.shape[1])
    for start in range(0, len(places), ROWS):
        part = slice(start, start + ROWS)
        rows = clipped_rows(np.asarray(x[places[part]], "float64"), l2_norm_clip)
        moment += (rows * weights[part, np.newaxis]).T @ rows
        total += weights[part] @ rows
    return moment, total


def _class_sizes(num_classes, dimension):
    """Returns a dict from "class moments" and "class sums" to their numbers of noisy entries."""
    sizes = num_classes * dimension**2, num_classes * dimension
    return dict(zip(_CLASS_NAMES, sizes, strict=True))


def positive_solver(matrix: np.ndarray, ridge: float) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that solves `(matrix + ridge I) x = right` for a noisy matrix.

    Without noise, no eigenvalue of `matrix + ridge I` would be below the ridge. If the noise has
    made an eigenvalue smaller than an eighth of the ridge, all eigenvalues below the ridge are set
    to the ridge. The result is the nearest matrix, in the Frobenius norm, that is possible without
    noise. The condition number is therefore at most 8 times the ratio of the largest eigenvalue to
    the ridge. The function only does post-processing: it reads the noisy matrix and the public
    scale of the noise, but no data.

    A Cholesky decomposition tests whether an eigenvalue is too small. This test is ten times as
    fast as computing the eigenvalues.

    Args:
        matrix: float64 array `[d, d]`, symmetric.
        ridge: Float > 0.

    Returns:
        Function from `right`, an array `[d]` or `[d, m]`, to the solution of the same shape.
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
    """Returns the ridge of a linear system: the number r in `matrix + r I`.

    By default the ridge is a quarter larger than the spectral norm of the noise. If the noise has
    standard deviation s on the diagonal and s / sqrt(2) in all other entries, its spectral norm is
    about sqrt(2 d) s.

    Args:
        matrix: float64 array `[d, d]`, the noisy matrix.
        regularization: Float, the ridge that the user chose. It is raised to 1e-9 times the mean
            eigenvalue if it is smaller. None takes the default, which is at least 1e-6 times the
            mean eigenvalue.
        noise_multiplier: Float, s divided by the sensitivity.
        sensitivity: Float, the sensitivity of the matrix. It is infinite without privacy.
    """
    least = 1e-9 * max(float(np.trace(matrix)) / len(matrix), 1e-9)
    if regularization is not None:
        return max(regularization, least)
    if not noise_multiplier:
        return 1e3 * least
    norm = math.sqrt(2 * len(matrix)) * noise_multiplier * sensitivity
    return max(_OF_THE_NOISE * norm, 1e3 * least)
