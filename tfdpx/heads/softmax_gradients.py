"""Sums of clipped gradients of the softmax cross-entropy, at a clip that may change by pass."""

import math

import tensorflow as tf

from tfdpx.heads._gradients import Gradients

# Above all norms that float32 holds.
_NO_CLIP = 1e30


class SoftmaxGradients(Gradients):
    """Passes over private examples that give sums of clipped gradients, kernel alone.

    Guarantee: one example more or less changes the sum of a pass by at most the clip of that pass
    in the l2 norm, rounding included, and so does its product with a matrix of spectral norm at
    most 1. What is not finite contributes zero.

    Args:
        examples: `tfdpx.heads._feature_source.Examples` or alike.
        num_classes: Int.
    """

    def __init__(self, examples, num_classes):
        super().__init__(examples, num_classes, l2_norm_clip=1.0)
        # What a bound of 1 leaves after the allowance for rounding.
        self._share = self._clip
        self._threshold = tf.Variable(1.0, trainable=False, dtype="float32")

    def sum(self, kernel, l2_norm_clip):
        """float64 `[d, m]`: the sum over all examples.

        Args:
            kernel: Array `[d, m]`.
            l2_norm_clip: Float > 0; infinity for no clipping.
        """
        clip = _NO_CLIP if l2_norm_clip == math.inf else l2_norm_clip
        self._threshold.assign(clip * self._share)
        return self.sums(kernel, [0.0] * kernel.shape[1])[0]

    def _residuals(self, logits, y):
        return tf.nn.softmax(logits) - y

    def _factors(self, squares):
        return self._threshold / tf.maximum(tf.sqrt(squares), self._threshold)
