"""Sums of clipped gradients of the cross-entropy of a linear classifier, and descent along them.

The gradient of an example is `(p - y) x^T`, which has rank one. So its norm is `|p - y| |x|`, and
no per-example gradient is formed.
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
    """Returns `link` of the logits, with 0 in place of NaN.

    Args:
        link: Function of logits, for example a sigmoid.
        x: float64 `[n, d]`, finite.
        kernel: float64 `[d, m]` or `[d]`.
        bias: Array `[m]`.
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
    """Returns float64 sums of the clipped gradients over all examples, `[d, m]` and `[m]`.

    Guarantee: one example more or less changes the sum for the kernel, and with `use_bias` both
    sums together, by at most `l2_norm_clip` in the l2 norm, rounding included. A row of features
    that is not finite, or zero, contributes zero.

    Args:
        examples: `FeatureSet`.
        kernel: Array `[d, m]`.
        bias: Array `[m]`.
        l2_norm_clip: Float, or infinity, or "automatic": as for `clip_factors`, the sensitivity
            is then 1.
        link: Function from logits to probabilities, of the sigmoid or the softmax cross-entropy.
        use_bias: Whether the bias has a gradient. If not, the guarantee excludes the second sum.
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
    """Logistic regression by a Keras optimizer on `steps` noisy full-batch gradients.

    Algorithm 4 of "Differentially Private Image Classification from Features", its baseline. Each
    step releases the sum of the gradients of kernel and bias, clipped together to C =
    `l2_norm_clip`, with noise of standard deviation sigma C on the sum (Eq. 3; line 4 prints it on
    the mean). The optimizer receives this sum divided by n.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example, because
    the fit is `steps` Gaussians of sensitivity C.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int.
        optimizer: "adam", "sgd" or "momentum", which is SGD with a momentum of 0.9.
        learning_rate: Float.
        l2_regularization: Float, lambda; `lambda / 2 |kernel|^2` is added to the mean loss.
        initial_bias: Float.
        average: Bool, whether the result is the mean of all iterates instead of the last.
        noise_multiplier: Float, instead of epsilon.
        l2_norm_clip: Float, C.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

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
