"""AdaMix: a private linear classifier that uses a few public examples.

The public examples determine the initial weights, the clip, and a subspace for the gradients. The
method is from "Mixed Differential Privacy in Computer Vision" (Golatkar et al. 2022), called the
paper in this module. `experiments/adamix/` has the other methods of the paper.
"""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import scipy.optimize
import tensorflow as tf
from numpy.typing import ArrayLike
from scipy.special import logsumexp, softmax

from tfdpx._arguments import check_choice, check_positive_integer, is_number, require
from tfdpx.accounting import calibration
from tfdpx.heads.features import FeatureSet
from tfdpx.heads.gradients import gradient_sum
from tfdpx.heads.head import Head, norm_bound, optional, positive

# The smallest clip. The norms of public gradients may fall to zero, but a clip may not.
LEAST_CLIP = 1e-6
# The columns of the subspace are shortened by this factor. Otherwise rounding could make projected
# rows longer.
_ROUNDING = 1e-9
_MOST_ITERATIONS = 500


def _check_quantile(name, value):
    is_valid = is_number(value) and 0 < value <= 1
    require(is_valid, name, value, "lie in (0, 1]", " The paper uses 0.9.")


def _check_weights(name, value):
    weights = np.asarray(value, "float64")
    is_valid = weights.ndim == 2 and np.isfinite(weights).all()
    require(is_valid, name, weights.shape, "be finite numbers of shape [d, num_classes]")


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class AdaMix(Head):
    """Softmax regression on fixed features by noisy gradients, with the help of public examples.

    This is Algorithm 2 of the paper, for features with a norm near one. Let N be the number of all
    examples, public and private, and let `G_public` and `G_private` be the sums of their gradients.
    The fit makes T = `steps` steps:

        w <- w - learning_rate / N (G_public + U (U^T G_private + noise) + lambda (w - w_0)).

    - w_0 are the initial weights, which minimize the loss of the public examples.
    - Private gradients are clipped to tau, the 90th percentile of the norms of the public gradients
      at w.
    - The noise has the standard deviation sigma tau, where sigma is `noise_multiplier`.
    - The columns of U are the left singular vectors of `G_public` with the largest singular values.

    Without public examples this is NoisyGD (Algorithm 1, but without its projection onto a ball).
    Algorithm 2 has the decay `lambda w`, but Theorem 3 has `lambda (w - w_0)`, the default here.

    Guarantee: the kernel, the bias and all intermediate weights are (epsilon, delta)-differentially
    private for adding or removing one *private* example. The fit consists of `steps` Gaussian
    mechanisms with sensitivity tau. Together they are one Gaussian mechanism with mu = sqrt(steps)
    / noise_multiplier (Proposition 5, where rho = T^2 / (2 sigma^2) is a misprint of T / (2
    sigma^2)). The public examples have **no** guarantee: the weights may reveal all of them, so no
    private example may be among them. The numbers of examples are public.

    Args:
        num_classes: Int, the number of classes.
        epsilon: Float > 0, from which `steps` is computed. Leave it out if you pass `steps`.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0, sigma. More noise allows more steps at the same epsilon.
        l2_norm_clip: Float, a fixed tau. With None, tau follows the public gradients. A fixed tau
            of 1 needs a smaller learning rate, for example 4.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.
        steps: Int, T, the number of gradients. Pass it instead of epsilon.
        learning_rate: Float, the step size for the mean gradient of all examples.
        l2_regularization: Float > 0, lambda, the factor of the decay in the sum above. With the
            paper's 0.01, public gradients and the clip are smaller at the start, so use a larger
            learning rate.
        quantile: Float in (0, 1]. This quantile of the norms of public gradients is tau.
        projection: Int, the number of columns of U; None for no projection. It is reduced to
            `num_classes - 1` if larger: the columns of `G_public` sum to zero, so a further
            singular vector would consist only of rounding errors.
        decay_to: "start" for the decay `lambda (w - w_0)`, or "zero" for `lambda w`.
        initial_weights: Public array `[d, num_classes]`, for example from
            `tfdpx.models.zero_shot_head`. The minimization for w_0 starts from these weights and is
            regularized toward them. Without public examples, w_0 equals these weights. None means
            zeros.

    Attributes:
        steps: Int, T, available before `fit`.

    Raises:
        ValueError: If an argument is invalid.
    """

    epsilon: float | None = None
    noise_multiplier: float = 20.0
    _: dataclasses.KW_ONLY
    l2_norm_clip: float | None = None
    steps: int | None = None
    learning_rate: float = 32.0
    l2_regularization: float = 0.1
    quantile: float = 0.9
    projection: int | None = None
    decay_to: str = "start"
    initial_weights: ArrayLike | None = dataclasses.field(default=None, repr=False)

    _checks = {
        **Head._checks,
        "epsilon": optional(positive),
        "noise_multiplier": positive,
        "l2_norm_clip": optional(norm_bound),
        "steps": optional(check_positive_integer),
        "l2_regularization": positive,
        "quantile": _check_quantile,
        "projection": optional(check_positive_integer),
        "decay_to": lambda name, value: check_choice(name, value, ("start", "zero")),
        "initial_weights": optional(_check_weights),
    }
    _solved = "steps"

    def __post_init__(self):
        super().__post_init__()
        if self.initial_weights is not None:
            self.initial_weights = np.asarray(self.initial_weights, "float64")
            self._config["initial_weights"] = self.initial_weights.tolist()

    def _solution(self):
        names = ("noise_multiplier", "epsilon", "delta")
        settings = {name: getattr(self, name) for name in names}
        return calibration.solve("steps", settings, self.accountant)

    def _releases(self):
        return {"gradient": self.steps}

    def _sizes(self, dimension):
        rows = dimension
        if self.projection is not None:
            rows = min(self.projection, self.num_classes - 1, dimension)
        return {"gradient": rows * self.num_classes}

    def fit(
        self,
        features: ArrayLike | tf.data.Dataset,
        labels: ArrayLike | None = None,
        *,
        public_data: tuple[ArrayLike, ArrayLike] | tf.data.Dataset | None = None,
    ) -> AdaMix:
        """Fits the kernel to private and public examples, and adds the cost to the ledger.

        Guarantee: `features` and `labels` are protected as the docstring of the class says;
        `public_data` is not protected. An example with features that are not finite counts as zero.

        Args:
            features: Private array `[n, d]`, or a finite `tf.data.Dataset` of batches
                `(features, labels)` that yields every example exactly once, in any order. The
                dataset is read only once and held in memory.
            labels: Integers `[n]`; or numbers in [0, 1], `[n, num_classes]`, with rows that sum to
                one. None with a dataset.
            public_data: Pair of arrays `(features, labels)`, or a dataset like `features`. It is
                held in memory. It may be None if the head has an `l2_norm_clip` and no
                `projection`.

        Returns:
            The head itself.

        Raises:
            ValueError: If shapes or labels do not match, public features are not finite, public
                examples are required but missing, or the call is within the scope of a
                `tf.distribute` strategy with several replicas.
        """
        if public_data is None and (self.l2_norm_clip is None or self.projection):
            raise ValueError(
                "Argument `public_data` is missing, but clip and projection follow it. Received: "
                f"None, with l2_norm_clip={self.l2_norm_clip}, projection={self.projection}. Pass "
                "a pair (features, labels), or an `l2_norm_clip` and no `projection`."
            )
        examples = FeatureSet(features, labels, self.num_classes)
        shape = [examples.dimension, self.num_classes]
        weights = self.initial_weights
        self._first = np.zeros(shape) if weights is None else np.asarray(weights)
        is_valid = list(self._first.shape) == shape
        require(is_valid, "initial_weights", self._first.shape, f"have the shape {shape}")
        if public_data is None:
            self._public = PublicSet(np.zeros([0, shape[0]]), np.zeros([0, shape[1]]))
        else:
            self._public = PublicSet.of(public_data, self.num_classes)
            _check_sums("public_data", self._public.y)
        _check_private(examples, self._public)
        return self._fit_to(examples)

    def _fit(self, examples, released):
        kernel = self._start()
        reference = kernel if self.decay_to == "start" else np.zeros_like(kernel)
        count, link = examples.count + len(self._public), functools.partial(softmax, axis=1)
        for step in range(1, self.steps + 1):
            clip, subspace = self._clip_and_subspace(kernel)
            slope, _ = gradient_sum(examples, kernel, np.zeros(self.num_classes), clip, link=link)
            if subspace is not None:
                slope = subspace.T @ slope
            slope = released.gaussian("gradient", slope, clip)
            if subspace is not None:
                slope = subspace @ slope
            slope += self._public.gradient(kernel)
            kernel = self._moved(kernel, slope, reference, count, step)
        return kernel, np.zeros(self.num_classes)

    def _start(self):
        return self._public.minimum(self.l2_regularization, self._first)

    def _clip_and_subspace(self, kernel):
        """Returns the clip, a float, and the subspace U (None without a projection).

        Both are computed only from public examples and from weights that already have noise.
        """
        if self.projection is None:
            return self._clip(kernel), None
        return self._clip(kernel), self._public.subspace(kernel, self.projection)

    def _clip(self, kernel):
        if self.l2_norm_clip is not None:
            return self.l2_norm_clip
        return self._public.quantile_clip(kernel, self.quantile)

    def _moved(self, kernel, slope, reference, count, step):
        """Returns the next weights.

        Args:
            kernel: float64 array `[d, m]`, the present weights.
            slope: float64 array `[d, m]`, the noisy sum of gradients.
            reference: float64 array `[d, m]`, the weights toward which the decay moves.
            count: Int, the number of examples in the sum.
            step: Int, the number of the step, which subclasses use.
        """
        slope += self.l2_regularization * (kernel - reference)
        return kernel - self.learning_rate / count * slope


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PublicSet:
    """The features and labels of the public examples, held in memory.

    Args:
        x: float64 array `[n, d]`; n may be 0.
        y: float64 array `[n, num_classes]` of values in [0, 1]. Each row sums to one.
    """

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, data, num_classes: int) -> PublicSet:
        """Returns a `PublicSet` of the argument `public_data` of `AdaMix.fit`.

        Args:
            data: Pair `(features, labels)` of arrays, or a `tf.data.Dataset`, as for `Head.fit`.
            num_classes: Int, the number of classes.

        Raises:
            ValueError: If there is no example, shapes or labels do not match, or a feature is not
                finite.
        """
        x, *labels = data if isinstance(data, (tuple, list)) else (data, None)
        if len(labels) != 1:
            raise ValueError(
                "Argument `public_data` must be a pair (features, labels) or a dataset. "
                f"Received: {len(data)} parts."
            )
        examples = FeatureSet(x, labels[0], num_classes)
        x, y = (np.vstack(arrays) for arrays in zip(*examples.chunks(), strict=True))
        infinite = int(np.sum(~np.isfinite(x).all(axis=1)))
        if infinite:
            raise ValueError(
                "Argument `public_data` must hold finite features, because clip and subspace "
                f"follow them. Received: {infinite} rows that are not finite. Leave them out."
            )
        return cls(x, y)

    def __len__(self) -> int:
        return len(self.x)

    def minimum(self, l2_regularization: float, reference: np.ndarray) -> np.ndarray:
        """Returns the kernel that minimizes the regularized loss of the public examples.

        The regularizer is `l2_regularization / 2 |kernel - reference|^2`. L-BFGS in float64 stops
        when each entry of the gradient is at most 1e-6, or after 500 iterations. The solution minus
        `reference` is a linear combination of the rows of `x`, so the search is restricted to such
        combinations.

        Args:
            l2_regularization: Float > 0. Separable data would have no minimum without it.
            reference: float64 array `[d, m]`, where the search starts.

        Returns:
            float64 array `[d, m]`. Without public examples it is `reference`.
        """
        if not len(self):
            return reference
        basis, offset = np.linalg.qr(self.x.T)[0], self.x @ reference
        rows = self.x @ basis
        shape = rows.shape[1], self.y.shape[1]

        def objective(flat):
            moved = flat.reshape(shape)
            logits = rows @ moved + offset
            loss = np.sum(logsumexp(logits, axis=1) - np.sum(logits * self.y, axis=1))
            loss += l2_regularization / 2 * np.sum(moved**2)
            slope = rows.T @ (softmax(logits, axis=1) - self.y) + l2_regularization * moved
            return loss, slope.ravel()

        result = scipy.optimize.minimize(
            objective,
            np.zeros(shape).ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _MOST_ITERATIONS, "maxfun": 2 * _MOST_ITERATIONS, "gtol": 1e-6},
        )
        return reference + basis @ result.x.reshape(shape)

    def residuals(self, kernel: np.ndarray) -> np.ndarray:
        """Returns the gradient of each example's loss with respect to its logits.

        Args:
            kernel: float64 array `[d, m]`.

        Returns:
            float64 array `[n, m]`.
        """
        return softmax(self.x @ kernel, axis=1) - self.y

    def gradient(self, kernel: np.ndarray) -> np.ndarray:
        """Returns the sum of the gradients of all public examples, float64 `[d, m]`.

        Args:
            kernel: float64 array `[d, m]`, at which the gradients are computed.
        """
        return self.x.T @ self.residuals(kernel)

    def quantile_clip(self, kernel: np.ndarray, quantile: float) -> float:
        """Returns a quantile of the norms of the public gradients ("Adaptive threshold").

        Args:
            kernel: float64 array `[d, m]`, at which the gradients are computed.
            quantile: Float in (0, 1].

        Returns:
            Float, at least `LEAST_CLIP`, to which private gradients are clipped.
        """
        lengths = np.linalg.norm(self.x, axis=1)
        norms = lengths * np.linalg.norm(self.residuals(kernel), axis=1)
        return max(LEAST_CLIP, float(np.quantile(norms, quantile)))

    def subspace(self, kernel: np.ndarray, dimension: int) -> np.ndarray:
        """Returns the subspace onto which private gradients are projected.

        Its columns are the left singular vectors of the sum of the public gradients with the
        largest singular values ("Adaptive subspace projection"). They are scaled to norms a little
        below 1; otherwise rounding could make a projected gradient longer. There are at most m - 1
        columns: the gradient of a softmax sums to zero over the m classes, so its rank is at most
        m - 1.

        Args:
            kernel: float64 array `[d, m]`, at which the gradients are computed.
            dimension: Int, the largest number of columns.

        Returns:
            float64 array `[d, p]` with p = min(dimension, d, m - 1).
        """
        left, _, _ = np.linalg.svd(self.gradient(kernel), full_matrices=False)
        return left[:, : min(dimension, self.y.shape[1] - 1)] / (1 + _ROUNDING)


def _check_private(examples, public):
    """Raises ValueError if labels are invalid, or `public` has another number of features."""
    if public.x.shape[1] != examples.dimension:
        raise ValueError(
            "Arguments `features` and `public_data` must have the same width. Received: "
            f"{examples.dimension} and {public.x.shape[1]}."
        )
    for _, y in examples.chunks():
        _check_sums("labels", y)


def _check_sums(name, targets):
    wrong = int(np.sum(np.abs(targets.sum(axis=1) - 1) > 1e-3))
    if wrong:
        raise ValueError(
            f"Argument `{name}` must give each example one class, or soft labels that sum to one, "
            f"because the loss is a softmax cross-entropy. Received: {wrong} examples with other "
            "sums. For those use another head, such as tfdpx.heads.FeatureCovariance."
        )
