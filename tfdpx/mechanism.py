"""The guarantee on one screen: clipping, noise, and the gradients that an optimizer may apply.

One update is Eq. 4 of De et al. 2022 (arXiv:2204.13650),

    g = 1/B * sum_i clip_C(1/K * sum_j grad l_ij) / C + sigma/B * xi,    xi ~ N(0, I),

where g_i is the mean of an example's gradients over its K views, and B the declared batch size.
With individual accounting each example has a separate clip f_i C, f_i <= 1: it moves the sum by
f_i/B. With class weights w each term is multiplied by clip(w_i / w_max, 0, 1), after the clip.

Guarantee: adding or removing one example changes the sum before the noise by at most 1/B in l2
norm, because each term is `clip_C(.)/C`, and B is a constant. So the update is one application of
the Gaussian mechanism with noise multiplier sigma. Regularisers added afterwards read no data.
"""

import math
import weakref

import tensorflow as tf

from tfdpx import noise
from tfdpx.per_example import rounding

_KEY = object()
# Number of values per row of noise: TensorFlow splits rows of 64 bytes without a copy.
_ROW = 16
# The operations that give noisy sums, for checks of graphs.
private_operations: weakref.WeakSet = weakref.WeakSet()
# The remedy for a custom training step.
INSTEAD_OF_TRAIN_STEP = (
    "Use the `train_step` of keras.Model: change data by `augment`, the loss by `compute_loss` or "
    "another output, metrics by `compute_metrics`."
)


class PrivateGradient:
    """One variable's gradient after clipping, summing and noise: the only input of an optimizer.

    It is a type instead of a flag because replicas run in threads. Only `privatize` creates one.

    Attributes:
        tensor: float32 tensor.
    """

    def __init__(self, tensor, key):
        if key is not _KEY:
            raise TypeError(
                "PrivateGradient is made by the private training step alone: call "
                "`model.fit` or `model.train_step` with a tfdpx optimizer."
            )
        self.tensor = tensor
        # Set by the optimizer's override of Keras's all-reduce, and checked at the update.
        self.all_reduce_passed = False

    def __add__(self, tensor):
        """Returns the sum with a tensor computed without the data, as for a weight regulariser."""
        return PrivateGradient(self.tensor + tensor, _KEY)


def check_private(gradients):
    """Raises ValueError unless all of `gradients` are `PrivateGradient`s."""
    if not all(isinstance(gradient, PrivateGradient) for gradient in gradients):
        raise ValueError(
            "A tfdpx optimizer received gradients that did not come from the private step, so they "
            "are neither clipped nor noisy, as in a custom `train_step`, a GradientTape loop or a "
            "wrapped optimizer. Train with `model.fit` (or `model.train_on_batch`) of a model that "
            f"is compiled with this optimizer. {INSTEAD_OF_TRAIN_STEP}"
        )


def clip_factors(squared_norms, l2_norm_clip, batch_size, fractions=None):
    """Returns float32 [n]: `1/(B C) * min(1, C/norm)`; NaN or 0 for norms that are not finite.

    With `fractions` f it is `1/(B C) * min(1, f C/norm)`.

    Args:
        squared_norms: float32 [n].
        l2_norm_clip: Float, C; infinity for a factor of 1/B, without privacy. Or a float32 tensor
            [n] of `tfdpx.AdaptiveClip`, which is finite and large enough.
        batch_size: Int, B.
        fractions: Optional float32 [n] in (0, 1], f: the part of C that each example is clipped to.

    Raises:
        ValueError: If C is so small that the squares of gradients of its size are zero in float32.
    """
    is_fixed = not tf.is_tensor(l2_norm_clip)
    if is_fixed and l2_norm_clip < rounding.SMALLEST_CLIP:
        raise ValueError(
            f"Argument `l2_norm_clip` must be at least {rounding.SMALLEST_CLIP}, because squares "
            "of smaller gradients are lost in float32, and with them the bound on an example. "
            f"Received: l2_norm_clip={l2_norm_clip}. Multiply the loss and `l2_norm_clip` by one "
            "constant instead: the update stays the same."
        )
    if is_fixed and l2_norm_clip == math.inf:
        factors = tf.ones_like(squared_norms)
    elif fractions is None:
        factors = 1.0 / tf.maximum(tf.sqrt(squared_norms), l2_norm_clip)
    else:
        factors = fractions / tf.maximum(tf.sqrt(squared_norms), fractions * l2_norm_clip)
    # Dividing the factors by B avoids a pass over every weight.
    return factors / float(batch_size)


def zero_invalid(factors, squared_norms, present):
    """Returns `factors` with 0 for absent or non-finite examples, for any clip policy.

    Factors that are not finite become 0 too, for example one divided by a norm of zero.

    Args:
        factors: float32 [n].
        squared_norms: float32 [n].
        present: bool [n].
    """
    finite = tf.math.is_finite(squared_norms) & tf.math.is_finite(factors)
    return tf.where(finite & present, factors, 0.0)


def weight_factors(weights, largest):
    """Returns float32 [n]: `clip(w / w_max, 0, 1)` for clipped gradients; NaN for invalid weights.

    Args:
        weights: float32 [n], w. Negative and non-finite ones are invalid.
        largest: Float, w_max. No bound depends on it, or on the weights.
    """
    is_valid = tf.math.is_finite(weights) & (weights >= 0)
    return tf.where(is_valid, tf.clip_by_value(weights / largest, 0.0, 1.0), float("nan"))


def cap_to_sensitivity(factors, squared_norms, batch_size):
    """Returns `factors` limited so that an example adds at most 1/B, for any clip policy.

    Args:
        factors: float32 [n].
        squared_norms: float32 [n].
        batch_size: Int, B.
    """
    most = 1.0 / tf.sqrt(squared_norms) / float(batch_size)
    return tf.where(tf.abs(factors) > most, tf.sign(factors) * most, factors)


def privatize(sums, noise_multiplier, batch_size, seed):
    """Returns `sum + sigma / B * xi` for each of `sums`, with one draw of noise for all.

    Args:
        sums: List of float32 tensors: clipped sums over the whole logical batch, in units of
            `l2_norm_clip`, divided by B.
        noise_multiplier: Float, sigma.
        batch_size: Int, B.
        seed: int64 tensor [2], of this step.

    Returns:
        List of `PrivateGradient`.
    """
    deviation = noise_multiplier / batch_size
    if noise_multiplier:
        sizes = [math.prod(s.shape) for s in sums]
        rows = [-(-size // _ROW) for size in sizes]
        # Without this it could be drawn when the step starts, and take memory throughout.
        with tf.control_dependencies(sums):
            seed = tf.identity(seed)
        drawn = tf.split(noise.normal([sum(rows), _ROW], seed, deviation), rows)
        drawn = [
            tf.reshape(xi, [-1])[:size] if size % _ROW else xi
            for xi, size in zip(drawn, sizes, strict=True)
        ]
        sums = [s + tf.reshape(xi, s.shape) for s, xi in zip(sums, drawn, strict=True)]
    sums = [tf.identity(s) for s in sums]
    private_operations.update(s.op for s in sums if tf.is_symbolic_tensor(s))
    return [PrivateGradient(s, _KEY) for s in sums]
