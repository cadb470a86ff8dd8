"""The guarantee on one screen: clipping, noise, and the gradients that an optimizer may apply.

One update is Eq. 4 of De et al. 2022 (arXiv:2204.13650),

    g = 1/B * sum_i clip_C(1/K * sum_j grad l_ij) / C + sigma/B * xi,    xi ~ N(0, I),

where the inner sum runs over the K views (augmented copies) of example i, and B is the declared
batch size. Two options make terms of the sum smaller. With individual accounting each example has a
separate clip f_i C with f_i <= 1, so the example changes the sum by at most f_i/B. With class
weights w each term is multiplied by clip(w_i / w_max, 0, 1) after it is clipped.

Guarantee: adding or removing one example changes the sum before the noise by at most 1/B in l2
norm, because each term is `clip_C(.)/C`, and B is a constant. So the update is one application of
the Gaussian mechanism with noise multiplier sigma. Weight regularisers are added to the noisy
gradient and read no data.
"""

import math
import weakref

import tensorflow as tf

from tfdpx import noise
from tfdpx.per_example import rounding
from tfdpx.per_example.rows import joining_vectors

_KEY = object()
# The noise is drawn as a matrix with rows of 16 floats: TensorFlow splits rows of 64 bytes without
# copying them.
_ROW = 16
# The operations that return noisy sums. Checks of a graph look them up here.
private_operations: weakref.WeakSet = weakref.WeakSet()
# The remedy for a custom training step.
INSTEAD_OF_TRAIN_STEP = (
    "Use the `train_step` of keras.Model: change data by `augment`, the loss by `compute_loss` or "
    "another output, metrics by `compute_metrics`."
)


class PrivateGradient:
    """The noisy gradient of one variable; a tfdpx optimizer accepts no other gradients.

    Only `privatize` creates one, after clipping, summing and adding noise. The type shows that a
    gradient is noisy. A flag of the optimizer could not show this, because replicas run in parallel
    threads.

    Attributes:
        tensor: float32 tensor with the shape of the variable.
    """

    def __init__(self, tensor, key):
        if key is not _KEY:
            raise TypeError(
                "PrivateGradient is made by the private training step alone: call "
                "`model.fit` or `model.train_step` with a tfdpx optimizer."
            )
        self.tensor = tensor
        # The optimizer sets this in its override of Keras's all-reduce and checks it when it
        # updates the variable.
        self.all_reduce_passed = False

    def __add__(self, tensor):
        """Adds a tensor that depends on no data, for example a weight regulariser's gradient."""
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
    """Returns the factors by which the gradients of n examples are multiplied to clip them.

    The factors are `1/(B C) * min(1, C/norm)`, or `1/(B C) * min(1, f C/norm)` with `fractions` f.

    Args:
        squared_norms: float32 [n], the squared l2 norms of the gradients.
        l2_norm_clip: Float, C. With infinity nothing is clipped: all factors are 1/B, and there is
            no privacy. Or a float32 tensor [n] from `tfdpx.AdaptiveClip`, with finite values of at
            least `rounding.SMALLEST_CLIP`.
        batch_size: Int, B.
        fractions: Optional float32 [n] in (0, 1], f: example i is clipped to the norm `f_i C`.

    Returns:
        float32 [n]. The factor of a norm that is not finite is NaN or 0.

    Raises:
        ValueError: If C is so small that float32 cannot represent the square of a norm near C.
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
    # The factors are divided by B, because dividing the sums would need a pass over all weights.
    return factors / float(batch_size)


def zero_invalid(factors, squared_norms, present):
    """Returns the clip factors, with 0 for each example that must not contribute.

    These are absent examples, and examples with a norm or a factor that is not finite.
    For example, a factor is infinite if a clip policy has divided by a norm of zero.

    Args:
        factors: float32 [n], from any clip policy.
        squared_norms: float32 [n], the squared norms of the gradients.
        present: bool [n], whether each row of the batch is an example rather than padding.
    """
    finite = tf.math.is_finite(squared_norms) & tf.math.is_finite(factors)
    return tf.where(finite & present, factors, 0.0)


def weight_factors(weights, largest):
    """Returns the factors `clip(w / w_max, 0, 1)` for clipped gradients with class weights w.

    The factors are at most 1, so the sensitivity does not depend on the weights or on `largest`.

    Args:
        weights: float32 [n], w, the weight of each example.
        largest: Float, w_max, the largest class weight.

    Returns:
        float32 [n]; NaN for a weight that is negative or not finite.
    """
    is_valid = tf.math.is_finite(weights) & (weights >= 0)
    return tf.where(is_valid, tf.clip_by_value(weights / largest, 0.0, 1.0), float("nan"))


def cap_to_sensitivity(factors, squared_norms, batch_size):
    """Returns the clip factors, reduced where an example would add more than 1/B to the sum.

    The reduction enforces the sensitivity for any clip policy, even for one that a user wrote.

    Args:
        factors: float32 [n], from any clip policy.
        squared_norms: float32 [n], the squared norms of the gradients.
        batch_size: Int, B.
    """
    most = 1.0 / tf.sqrt(squared_norms) / float(batch_size)
    return tf.where(tf.abs(factors) > most, tf.sign(factors) * most, factors)


def privatize(sums, noise_multiplier, batch_size, seed):
    """Adds noise to sums of clipped gradients: `sum + sigma / B * xi` with xi from N(0, I).

    The noise of all variables is drawn together, which is faster than one draw for each variable.

    Args:
        sums: List of float32 tensors, one per variable: the sums of clipped gradients over the
            whole batch, divided by `l2_norm_clip` and by B.
        noise_multiplier: Float, sigma.
        batch_size: Int, B.
        seed: int64 tensor [2], the secret seed of this update.

    Returns:
        List of `PrivateGradient`, in the same order.
    """
    deviation = noise_multiplier / batch_size
    join, split = joining_vectors(sums)
    sums = join(sums)
    if noise_multiplier:
        sizes = [math.prod(s.shape) for s in sums]
        rows = [-(-size // _ROW) for size in sizes]
        # The noise must wait for the sums. TensorFlow could otherwise draw it at the beginning of
        # the step, where it would take memory during the whole step.
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
    return [PrivateGradient(s, _KEY) for s in split(sums)]
