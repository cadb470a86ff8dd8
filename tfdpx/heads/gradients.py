"""Logistic regression by gradient descent with noise: `FirstOrder`, and sums of clipped gradients.

For one example with features x, probabilities p and labels y, the gradient of the cross-entropy is
the matrix `x (p - y)^T`. It has rank one and the norm `|x| |p - y|`. So gradients are clipped
without computing this matrix for any example.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import numpy as np
from scipy.special import expit

from tfdpx._arguments import check_choice, require
from tfdpx.heads.features import FeatureSet, clip_factors, finite_rows
from tfdpx.heads.head import Head

_OPTIMIZERS = {
    "adam": keras.optimizers.Adam,
    "momentum": functools.partial(keras.optimizers.SGD, momentum=0.9),
    "sgd": keras.optimizers.SGD,
}


def probabilities(
    link: Callable[[np.ndarray], np.ndarray],
    x: np.ndarray,
    kernel: np.ndarray,
    bias: np.ndarray | float = 0.0,
) -> np.ndarray:
    """Returns the probabilities of a linear classifier, with 0 in place of NaN.

    Args:
        link: Function from logits to probabilities, for example a sigmoid.
        x: float64 array `[n, d]` of finite features.
        kernel: float64 array `[d, m]` for m classes, or `[d]` for one.
        bias: Array `[m]`, or a float.

    Returns:
        float64 array `[n, m]`, or `[n]`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.nan_to_num(link(x @ kernel + bias), nan=0.0)


def gradient_sum(
    examples: FeatureSet,
    kernel: np.ndarray,
    bias: np.ndarray,
    l2_norm_clip: float | str,
    *,
    link: Callable[[np.ndarray], np.ndarray] = expit,
    use_bias: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum of clipped gradients over all examples, for the kernel and for the bias.

    Guarantee: one example more or less changes the sum for the kernel by at most `l2_norm_clip` in
    l2 norm, including rounding errors. With `use_bias` this bound holds for both sums together.
    An example contributes nothing if its features are all zero or not all finite.

    Args:
        examples: `FeatureSet` with labels.
        kernel: Array `[d, m]`, at which the gradients are computed.
        bias: Array `[m]`.
        l2_norm_clip: Float; infinity for no clipping; or "automatic", for which the bound in the
            guarantee is 1. See `clip_factors`.
        link: Function from logits to probabilities: the sigmoid or the softmax.
        use_bias: Bool, whether the bias is trained. If False, the sum for the bias has no guarantee
            and must not be used.

    Returns:
        Two float64 arrays `[d, m]` and `[m]`.
    """
    kernel_sum, bias_sum = np.zeros(kernel.shape), np.zeros(kernel.shape[1])
    for x, targets in examples.chunks():
        x, norms = finite_rows(x)
        residuals = probabilities(link, x, kernel, bias) - targets
        lengths = np.linalg.norm(residuals, axis=1) * np.sqrt(norms**2 + use_bias)
        factors = clip_factors(lengths, l2_norm_clip) * (norms > 0)
        residuals *= factors[:, np.newaxis]
        kernel_sum += x.T @ residuals
        bias_sum += residuals.sum(axis=0)
    return kernel_sum, bias_sum


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class FirstOrder(Head):
    """Logistic regression by a Keras optimizer with `steps` noisy gradients of the full data.

    This is Algorithm 4, the baseline of "Differentially Private Image Classification from
    Features". Each step clips the gradient of each example, for kernel and bias together, to C =
    `l2_norm_clip`. It sums the gradients, and adds noise of standard deviation sigma C to the sum
    (Eq. 3; line 4 of the algorithm wrongly adds the noise to the mean). The optimizer receives the
    noisy sum divided by the number of examples.

    Guarantee: the fit is (epsilon, delta)-differentially private for adding or removing one
    example. It consists of `steps` Gaussian mechanisms with sensitivity C.

    Args:
        num_classes: Int, the number of classes.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int, the number of gradients.
        optimizer: "adam", "sgd" or "momentum", which is SGD with a momentum of 0.9.
        learning_rate: Float, the learning rate of the optimizer.
        l2_regularization: Float, lambda; `lambda / 2 |kernel|^2` is added to the mean loss.
        initial_bias: Float, the initial bias of each class.
        average: Bool. If True, the result is the mean of the weights over all steps, instead of the
            weights after the last step.
        noise_multiplier: Float, sigma, instead of epsilon.
        l2_norm_clip: Float, C, the largest norm of an example's gradient.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.

    Raises:
        ValueError: If an argument is invalid.
    """

    steps: int = 100
    _: dataclasses.KW_ONLY
    optimizer: str = "adam"
    learning_rate: float = 1.0
    l2_regularization: float | None = 0.0
    initial_bias: float = -10.0
    average: bool = False

    _checks = {
        **Head._checks,
        "optimizer": lambda name, value: check_choice(name, value, tuple(_OPTIMIZERS)),
        "average": lambda name, value: require(
            isinstance(value, bool), name, value, "be True or False"
        ),
    }

    def _link(self, logits):
        return expit(logits)

    def _releases(self):
        return {"gradient": self.steps}

    def _sizes(self, dimension):
        return {"gradient": (dimension + 1) * self.num_classes}

    def _fit(self, examples, released):
        shape = [examples.dimension + 1, self.num_classes]
        weights = np.zeros(shape, "float32")
        weights[-1] = self.initial_bias
        variable = keras.Variable(weights)
        optimizer = _OPTIMIZERS[self.optimizer](self.learning_rate)
        optimizer.build([variable])
        total = np.zeros(shape)
        clip = self.l2_norm_clip
        sensitivity = 1.0 if clip == "automatic" else clip
        for _ in range(self.steps):
            kernel, bias = weights[:-1], weights[-1]
            sums = gradient_sum(examples, kernel, bias, clip, link=self._link, use_bias=True)
            slope = released.gaussian("gradient", np.vstack(sums), sensitivity)
            slope = slope / examples.count
            slope[:-1] += (self.l2_regularization or 0.0) * kernel
            optimizer.apply([keras.ops.convert_to_tensor(slope, "float32")])
            weights = keras.ops.convert_to_numpy(variable)
            total += weights
        result = total / self.steps if self.average else weights
        return result[:-1], result[-1]
