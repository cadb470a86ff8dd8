"""AdaMix: a private linear classifier that uses a few public examples to start, clip and project.

The method comes from "Mixed Differential Privacy in Computer Vision" (Golatkar et al. 2022), which
is called the paper here. `experiments/adamix/` has the methods that the paper compares it with.
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

# The norms of public gradients may fall to zero, but a clip may not.
LEAST_CLIP = 1e-6
# A product of float64 rows with the subspace must not lengthen them.
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
    """Softmax regression on fixed features, by noisy full-batch gradients and public examples.

    Algorithm 2 of the paper, for features with a norm near one. With N examples in all and `G` for
    sums of gradients, it repeats `steps` times

        w <- w - learning_rate / N (G_public + U (U^T G_private + noise) + lambda (w - w_0)).

    The start w_0 is the minimum over the public examples only. Private gradients are clipped to
    tau, the 90th percentile of the norms of the public gradients at w. The noise has the standard
    deviation `noise_multiplier tau`, and U holds the top left singular vectors of `G_public`.
    Without public examples this is NoisyGD (Algorithm 1, but without its projection onto a ball).
    Algorithm 2 prints `lambda w` for the decay, and Theorem 3 has `lambda (w - w_0)`.

    Guarantee: (epsilon, delta)-differential privacy of the *private* examples under adding or
    removing one, for kernel, bias and all intermediate weights, because the fit is `steps`
    Gaussians of sensitivity tau, or one Gaussian with mu = sqrt(steps) / noise_multiplier
    (Proposition 5; its rho = T^2 / (2 sigma^2) is a misprint of T / (2 sigma^2)). The public
    examples have **no** guarantee: the weights may reveal all of them, so no private example may be
    among them. The numbers of examples are public.

    Args:
        num_classes: Int.
        epsilon: Float > 0, from which `steps` is computed. None with `steps`.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0, sigma: more noise allows more steps at the same epsilon.
        l2_norm_clip: Float, a fixed tau. With None, tau follows the public gradients. A fixed tau
            of 1 needs a smaller learning rate, for example 4.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.
        steps: Int, T, in place of epsilon.
        learning_rate: Float, for the mean over all examples.
        l2_regularization: Float > 0, lambda, for sums. With the paper's 0.01 public gradients, and
            therefore the clip, fall further at the start, which needs a larger learning rate.
        quantile: Float in (0, 1], the quantile of the norms of public gradients that tau follows.
        projection: Int, number of columns of U, at most `num_classes - 1`, because the columns of
            `G_public` sum to zero and a further one would be only rounding. None: no projection.
        decay_to: "start", w_0, or "zero", which puts `lambda w` in place of `lambda (w - w_0)`.
        initial_weights: Public array `[d, num_classes]`, for example from
            `tfdpx.models.zero_shot_head`. The search for the start begins and decays to it; without
            public examples it is the start. None: zeros.

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

        Guarantee: as in the class's docstring for `features` and `labels`; none for `public_data`.
        A row of features that is not finite counts as zero.

        Args:
            features: Private array `[n, d]`, or a `tf.data.Dataset` of batches `(features, labels)`
                that ends and yields every example once, in any order. It is read once and held in
                memory.
            labels: Integers `[n]`, or numbers in [0, 1] `[n, num_classes]` that sum to one in each
                row. None with a dataset.
            public_data: Pair of arrays `(features, labels)`, or such a dataset; held in memory.
                None requires an `l2_norm_clip` and no `projection`.

        Returns:
            The head.

        Raises:
            ValueError: If shapes or labels do not match, public features are not finite, examples
                are both private and public, public examples are required but missing, or within the
                scope of a `tf.distribute` strategy with several replicas.
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
        """Returns clip and subspace (or None), from public examples and released weights only."""
        if self.projection is None:
            return self._clip(kernel), None
        return self._clip(kernel), self._public.subspace(kernel, self.projection)

    def _clip(self, kernel):
        if self.l2_norm_clip is not None:
            return self.l2_norm_clip
        return self._public.quantile_clip(kernel, self.quantile)

    def _moved(self, kernel, slope, reference, count, step):
        """Returns the next weights; `slope` is a sum over `count` examples."""
        slope += self.l2_regularization * (kernel - reference)
        return kernel - self.learning_rate / count * slope


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PublicSet:
    """Public features and labels, held in memory.

    Args:
        x: float64 `[n, d]`; n may be 0.
        y: float64 `[n, num_classes]`, in [0, 1], with sums of one in each row.
    """

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of(cls, data, num_classes: int) -> PublicSet:
        """Returns the set of the examples in `public_data`.

        Args:
            data: Pair `(features, labels)` of arrays as `Head.fit` takes them, or a
                `tf.data.Dataset`.
            num_classes: Int.

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
        """Returns float64 `[d, m]`, the minimum of the loss near `reference`.

        Minimizes the loss + `l2_regularization` / 2 |kernel - `reference`|^2 by L-BFGS in float64,
        to a gradient of 1e-6 in every entry or 500 iterations. There are as many unknowns per class
        as rows, because the minimum minus `reference` is a combination of the rows.

        Args:
            l2_regularization: Float > 0: separable data have no minimum without it.
            reference: float64 `[d, m]`, also the starting point of the search.
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
        """Returns float64 `[n, m]`, the gradient of each example's loss at its logits.

        Args:
            kernel: float64 `[d, m]`.
        """
        return softmax(self.x @ kernel, axis=1) - self.y

    def gradient(self, kernel: np.ndarray) -> np.ndarray:
        """Returns float64 `[d, m]`, the sum of the gradients of all public examples.

        Args:
            kernel: float64 `[d, m]`.
        """
        return self.x.T @ self.residuals(kernel)

    def quantile_clip(self, kernel: np.ndarray, quantile: float) -> float:
        """Returns the clip, a quantile of the norms of public gradients ("Adaptive threshold").

        Args:
            kernel: float64 `[d, m]`.
            quantile: Float in (0, 1].
        """
        lengths = np.linalg.norm(self.x, axis=1)
        norms = lengths * np.linalg.norm(self.residuals(kernel), axis=1)
        return max(LEAST_CLIP, float(np.quantile(norms, quantile)))

    def subspace(self, kernel: np.ndarray, dimension: int) -> np.ndarray:
        """Returns float64 `[d, p]`, p = min(dimension, d, m - 1), the subspace of the release.

        It consists of the left singular vectors with the largest singular values of the total
        public gradient ("Adaptive subspace projection"), shortened because rounding could lengthen
        them. The gradient of a softmax sums to zero over m classes, so its rank is at most m - 1.

        Args:
            kernel: float64 `[d, m]`.
            dimension: Int.
        """
        left, _, _ = np.linalg.svd(self.gradient(kernel), full_matrices=False)
        return left[:, : min(dimension, self.y.shape[1] - 1)] / (1 + _ROUNDING)


def _check_private(examples, public):
    """Checks the width and labels of private examples."""
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
