"""Sums of clipped gradients of the cross-entropy of a linear classifier, on replicas.

The gradient of an example is `(p - y) x^T`, of rank one, so its norm is `|p - y| |x|` and no
per-example gradient is formed. Sums run in float32 over `BLOCK` rows and in float64 beyond. With u
= 2^-24, a float32 sum of b terms of size C errs by at most (b + 8) b u C in any order (Higham 2002,
ch. 4); so with one example more or less its block changes by at most C + 2 (b + 8) b u C, and by
the rounding of products. Gradients are clipped to C less that share, 0.8%.
"""

import math

import numpy as np
import tensorflow as tf

from tfdpx.heads import _moments
from tfdpx.per_example import rounding
from tfdpx.training import replicas

BLOCK = 256
_PARTIAL_SUMS = 2**26  # Bytes of the sums of all blocks of a chunk.
_MOST_BLOCKS = 32
# Arrays of so many bytes are prepared once for all passes.
_KEPT = 2**28
# Above all norms that float32 holds.
_NO_CLIP = 1e30
_ALLOWANCE = 2 * BLOCK * (BLOCK + rounding.EXTRA) * rounding.UNIT + 1e-5


def check_strategy(strategy):
    """Raises ValueError unless `strategy` is one device or replicas of this host."""
    single = strategy.num_replicas_in_sync == 1 and replicas.hosts(strategy) == 1
    mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
    if not (single or mirrored) or replicas.hosts(strategy) > 1:
        raise ValueError(
            "A head is fitted on one device, or under tf.distribute.MirroredStrategy. Received: "
            f"{type(strategy).__name__}. Fit it on one host: it takes a few passes."
        )


class Gradients:
    """Passes over the examples that give gradients of the sigmoid cross-entropy at given weights.

    Guarantee: one example more or less changes a sum, kernel and bias together, by at most
    `l2_norm_clip` in the l2 norm (`clip="gradients"`), or its kernel by `sqrt(num_classes)
    l2_norm_clip` (`clip="features"`, which has no bias). What is not finite contributes zero.

    Args:
        examples: `FeatureSource`.
        num_classes: Int.
        l2_norm_clip: Float, or infinity.
        clip: "gradients", or "features" for Algorithm 1 of the paper.
        use_bias: Whether the bias has a gradient.
    """

    def __init__(self, examples, num_classes, l2_norm_clip, clip="gradients", use_bias=False):
        self._examples, self._kept = examples, None
        self._strategy = tf.distribute.get_strategy()
        check_strategy(self._strategy)
        self._clip = l2_norm_clip / (1 + _ALLOWANCE + rounding.product_error())
        self._of_features, self._use_bias = clip == "features", use_bias
        width = examples.dimension
        [self._of_zeros] = _moments.measured(np.zeros([1, width], "float32"))[1]
        self._shapes = [num_classes, width], [num_classes]
        blocks = _PARTIAL_SUMS // (4 * num_classes * width)
        self._rows = BLOCK * min(max(blocks, 1), _MOST_BLOCKS) * self._replicas
        rows = tf.TensorSpec([None, width]), tf.TensorSpec([None, num_classes])
        sums = [tf.TensorSpec(shape, tf.float64) for shape in self._shapes]
        weights = tf.TensorSpec([width, num_classes]), tf.TensorSpec([num_classes])
        lengths = tf.TensorSpec([None])
        signature = [sums, *rows, lengths, lengths, *weights]
        self._add = tf.function(self._add_chunk, input_signature=signature, autograph=False)

    @property
    def _replicas(self):
        return self._strategy.num_replicas_in_sync

    def sums(self, kernel, bias):
        """One pass: float64 sums of the clipped gradients, `[d, m]` and `[m]`.

        Args:
            kernel: Array `[d, m]`.
            bias: Array `[m]`.
        """
        weights = tf.constant(kernel, "float32"), tf.constant(bias, "float32")
        sums = [tf.zeros(shape, tf.float64) for shape in self._shapes]
        for arrays in self._chunks():
            sums = self._strategy.run(self._add, args=(sums, *arrays, *weights))
        # All replicas are on this host: their sums are added up here, once a pass.
        local = [self._strategy.experimental_local_results(part) for part in sums]
        kernel_sum, bias_sum = (np.sum([p.numpy() for p in parts], axis=0) for parts in local)
        return kernel_sum.T, bias_sum

    def _chunks(self):
        """Features, targets, squared norms and whether a row counts, for each chunk of a pass."""
        if self._kept is not None:
            return self._kept
        chunks = (self._prepared(x, y) for x, y in self._examples.chunks(self._rows))
        if self._examples.bytes > _KEPT:
            return chunks
        self._kept = list(chunks)
        return self._kept

    def _prepared(self, x, y):
        x, squares = _moments.measured(x)
        # The gradient of a row of zeros is zero but for the bias.
        arrays = x, y, squares, (squares > self._of_zeros).astype("float32")
        if short := -len(x) % (BLOCK * self._replicas):
            arrays = [_padded(array, short) for array in arrays]
        # Not `tf.constant`, which copies twice.
        return [tf.convert_to_tensor(array) for array in arrays]

    def _add_chunk(self, sums, x, y, squares, present, kernel, bias):
        context = tf.distribute.get_replica_context()
        count = tf.shape(x)[0] // self._replicas
        x, y, squares, present = (
            replicas.own_rows(rows, count, context, dealt=False)
            for rows in (x, y, squares, present)
        )
        if self._of_features:
            x *= self._factors(squares)[:, tf.newaxis]
        residuals = self._residuals(tf.matmul(x, kernel) + bias, y)
        if self._of_features:
            factors = present + 0.0 * tf.reduce_sum(residuals, axis=1)
        else:
            squares += float(self._use_bias)
            factors = present * self._factors(squares * rounding.squared_lengths(residuals))
        # What is not finite is of the weights alone: then no example counts.
        factors = tf.where(tf.math.is_finite(factors), factors, 0.0)
        residuals = tf.math.multiply_no_nan(residuals, factors[:, tf.newaxis])
        sums = [sums[0] + _blockwise_product(residuals, x), sums[1]]
        if self._use_bias:
            sums[1] += tf.reduce_sum(tf.cast(residuals, tf.float64), axis=0)
        return sums

    def _residuals(self, logits, y):
        return tf.sigmoid(logits) - y

    def _factors(self, squares):
        if self._clip == math.inf:
            return tf.ones_like(squares)
        return self._clip / tf.maximum(tf.sqrt(squares), self._clip)


class SoftmaxGradients(Gradients):
    """Passes that give gradients of the softmax cross-entropy, kernel alone, at changing clips.

    Guarantee: one example more or less changes the sum of a pass by at most the clip of that pass
    in the l2 norm, rounding included, and so does its product with a matrix of spectral norm at
    most 1. What is not finite contributes zero.

    Args:
        examples: `FeatureSource`.
        num_classes: Int.
    """

    def __init__(self, examples, num_classes):
        super().__init__(examples, num_classes, l2_norm_clip=1.0)
        self._threshold = tf.Variable(1.0, trainable=False, dtype="float32")

    def sum(self, kernel, l2_norm_clip):
        """float64 `[d, m]`: the sum over all examples.

        Args:
            kernel: Array `[d, m]`.
            l2_norm_clip: Float > 0.
        """
        # `_clip` is what a bound of 1 leaves after the allowance for rounding.
        self._threshold.assign(min(l2_norm_clip, _NO_CLIP) * self._clip)
        return self.sums(kernel, np.zeros(kernel.shape[1]))[0]

    def _residuals(self, logits, y):
        return tf.nn.softmax(logits) - y

    def _factors(self, squares):
        return self._threshold / tf.maximum(tf.sqrt(squares), self._threshold)


def _blockwise_product(left, right):
    """float64 `[m, d]`: left^T right, of float32 rows, in blocks."""
    blocks = [tf.reshape(rows, [-1, BLOCK, rows.shape[1]]) for rows in (left, right)]
    return tf.reduce_sum(tf.cast(tf.matmul(*blocks, transpose_a=True), tf.float64), axis=0)


def _padded(array, rows):
    return np.concatenate([array, np.zeros([rows, *array.shape[1:]], array.dtype)])
