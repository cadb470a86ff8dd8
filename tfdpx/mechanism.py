"""The guarantee on one screen: what is clipped, what is added, and what an optimizer may apply.

One update is Eq. 4 of De et al. 2022 (arXiv:2204.13650),

    g = 1/B * sum_i clip_C(1/K * sum_j grad l_ij) / C + sigma/B * xi,    xi ~ N(0, I),

with g_i the mean of an example's gradients over its K views, and B the declared batch size. With
individual accounting each example has a clip f_i C of its own, f_i <= 1: it moves the sum by f_i/B.
With class weights w each term is multiplied by clip(w_i / w_max, 0, 1), after the clip.

Guarantee: adding or removing one example changes the sum before the noise by at most 1/B in l2
norm, since each term is `clip_C(.)/C`, and B is a constant. So the update is one application of the
Gaussian mechanism of noise multiplier sigma. What regularisers add afterwards reads no data.
"""

import math

import tensorflow as tf

from tfdpx import noise
from tfdpx.per_example import rounding

_KEY = object()
# Noise is drawn in rows of so many values: TensorFlow splits whole rows of 64 bytes without a copy.
_ROW = 16
# The name of the operations that give private gradients, for checks of graphs.
MARK = "private_gradient"


class PrivateGradient:
    """One variable's gradient after clipping, summing and noise: all that an optimizer accepts.

    A type and not a flag, since replicas run in threads. Only `privatize` makes one.

    Attributes:
        tensor: float32 tensor.
        deviation: Float, the noise's standard deviation in each value.
    """

    def __init__(self, tensor, deviation, key):
        if key is not _KEY:
            raise TypeError(
                "PrivateGradient is made by the private training step alone: call "
                "`model.fit` or `model.train_step` with a tfdpx optimizer."
            )
        self.tensor, self.deviation = tensor, deviation
        # Set by the optimizer's override of Keras' all-reduce, and looked for at the update.
        self.all_reduce_passed = False

    def plus(self, tensor):
        """The sum with a tensor that was computed without the data, as a weight regulariser's."""
        return PrivateGradient(self.tensor + tensor, self.deviation, _KEY)


def check_private(gradients):
    """Raises ValueError unless all of `gradients` are `PrivateGradient`s."""
    if not all(isinstance(gradient, PrivateGradient) for gradient in gradients):
        raise ValueError(
            "A tfdpx optimizer received gradients that did not come from the private step, so they "
            "are neither clipped nor noisy. Train with `model.fit` (or `model.train_on_batch`) and "
            "the model's own `train_step` of keras.Model; a custom `train_step`, a GradientTape "
            "loop or a wrapped optimizer cannot be made private."
        )


def clip_factors(squared_norms, present, l2_norm_clip, batch_size, fractions=None):
    """float32 [n]: `1/(B C) * min(1, C/norm)`, and 0 for absent or non-finite examples.

    With `fractions` f it is `1/(B C) * min(1, f C/norm)`.

    Args:
        squared_norms: float32 [n].
        present: bool [n].
        l2_norm_clip: Float, C; infinity for a factor of 1/B, without privacy. Or a float32 tensor
            [n], of `tfdpx.AdaptiveClip`, which is finite and large enough.
        batch_size: Int, B.
        fractions: Optional float32 [n] in (0, 1], f: what part of C each example is clipped at.

    Raises:
        ValueError: If C is so small that the squares of gradients of its size are zero in float32.
    """
    is_fixed = not tf.is_tensor(l2_norm_clip)
    if is_fixed and l2_norm_clip < rounding.SMALLEST_CLIP:
        raise ValueError(
            f"Argument `l2_norm_clip` must be at least {rounding.SMALLEST_CLIP}: squares of "
            "smaller gradients are lost in float32, and with them the bound on an example. "
            f"Received: l2_norm_clip={l2_norm_clip}. Multiply the loss and `l2_norm_clip` by one "
            "constant instead: the update stays the same."
        )
    if is_fixed and l2_norm_clip == math.inf:
        factors = tf.ones_like(squared_norms)
    elif fractions is None:
        factors = 1.0 / tf.maximum(tf.sqrt(squared_norms), l2_norm_clip)
    else:
        factors = fractions / tf.maximum(tf.sqrt(squared_norms), fractions * l2_norm_clip)
    # Dividing the factors by B spares a pass over every weight.
    return counted(factors / float(batch_size), squared_norms, present)


def counted(factors, squared_norms, present):
    """`factors`, and 0 for absent or non-finite examples, whatever a clip policy says of them.

    So it is where the factor is not finite, as one over a norm of zero.

    Args:
        factors: float32 [n].
        squared_norms: float32 [n].
        present: bool [n].
    """
    finite = tf.math.is_finite(squared_norms) & tf.math.is_finite(factors)
    return tf.where(finite & present, factors, 0.0)


def weight_factors(weights, largest):
    """float32 [n]: `clip(w / w_max, 0, 1)`, for gradients that are clipped; NaN for unfit weights.

    Args:
        weights: float32 [n], w. Those that are negative or not finite are unfit.
        largest: Float, w_max. No bound depends on it, or on the weights.
    """
    is_valid = tf.math.is_finite(weights) & (weights >= 0)
    return tf.where(is_valid, tf.clip_by_value(weights / largest, 0.0, 1.0), float("nan"))


def bounded(factors, squared_norms, batch_size):
    """`factors`, cut to what lets an example add 1/B, whatever a clip policy says.

    Args:
        factors: float32 [n].
        squared_norms: float32 [n].
        batch_size: Int, B.
    """
    most = 1.0 / tf.sqrt(squared_norms) / float(batch_size)
    return tf.where(tf.abs(factors) > most, tf.sign(factors) * most, factors)


def privatize(sums, noise_multiplier, batch_size, seed):
    """`sum + sigma / B * xi` for each of `sums`, with one draw of noise for all.

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
        # Drawn at the start of the step, as it could be, it would take memory throughout.
        with tf.control_dependencies(sums):
            seed = tf.identity(seed)
        drawn = tf.split(noise.normal([sum(rows), _ROW], seed, deviation), rows)
        drawn = [
            tf.reshape(xi, [-1])[:size] if size % _ROW else xi
            for xi, size in zip(drawn, sizes, strict=True)
        ]
        sums = [s + tf.reshape(xi, s.shape) for s, xi in zip(sums, drawn, strict=True)]
    return [PrivateGradient(tf.identity(s, name=MARK), deviation, _KEY) for s in sums]
