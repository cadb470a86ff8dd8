"""Splits, merges and sums rows; each example has K rows, one for each view."""

import math

import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example import rounding


class Rows:
    """The tensors of a nest that have a batch axis; other tensors can take their place.

    Args:
        nest: Any nest of tensors, `None` and other values.
        batched: Optional list of bools, one for each leaf of `tf.nest.flatten(nest)`: whether it
            has a batch axis. By default every tensor has one.
    """

    def __init__(self, nest, batched=None):
        self._nest = nest
        self._leaves = tf.nest.flatten(nest)
        if batched is None:
            batched = [tf.is_tensor(leaf) for leaf in self._leaves]
        self._batched = batched
        self.tensors = [leaf for leaf, flag in zip(self._leaves, batched, strict=True) if flag]

    def pack(self, tensors, keep_others=True):
        """Returns the nest with its batched tensors replaced by `tensors`, in order.

        Args:
            tensors: Iterable of tensors.
            keep_others: Bool. Whether tensors without a batch axis stay, or become None.
        """
        replacements = iter(tensors)
        leaves = [
            next(replacements) if flag else leaf if keep_others or not tf.is_tensor(leaf) else None
            for leaf, flag in zip(self._leaves, self._batched, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._nest, leaves)

    def map(self, function):
        """Returns the nest with `function` applied to its batched tensors."""
        return self.pack([function(tensor) for tensor in self.tensors])

    @property
    def count(self):
        """The length of the batch axis: an int if it is static, else a scalar int32 tensor."""
        static = self.tensors[0].shape[0]
        return tf.shape(self.tensors[0])[0] if static is None else static


def split_views(tensor, num_views):
    """Reshapes [B * K, ...] to [B, K, ...], for example [6, 5] to [3, 2, 5]; keeps static axes."""
    rows, *rest = tensor.shape
    static_shape = [None if rows is None else rows // num_views, num_views, *rest]
    if static_shape.count(None) <= 1:
        return tf.reshape(tensor, [-1 if size is None else size for size in static_shape])
    shape = tf.shape(tensor)
    split = tf.reshape(tensor, tf.concat([[shape[0] // num_views, num_views], shape[1:]], axis=0))
    split.set_shape(static_shape)
    return split


def sum_rows(tensor, num_views, axes=()):
    """Sums [B * K, ...] over an example's views and over `axes` of a row: [B, ...].

    Args:
        tensor: Tensor [B * K, ...] of numbers.
        num_views: Int, K.
        axes: Sequence of ints above zero, further axes of `tensor` to sum over.
    """
    if num_views == 1:
        return tf.reduce_sum(tensor, list(axes)) if axes else tensor
    return tf.reduce_sum(split_views(tensor, num_views), [1, *(axis + 1 for axis in axes)])


def repeat_views(tensor, num_views):
    """Repeats each entry of a tensor [B] for the K views of an example: [B * K]."""
    return tensor if num_views == 1 else tf.repeat(tensor, num_views)


def along(values, tensor):
    """Reshapes `values` [rows] for broadcasting with `tensor`; for example, [4] to [4, 1, 1]."""
    return tf.reshape(values, [-1] + [1] * (tensor.shape.rank - 1))


def merge_views(tensor):
    """Reshapes [B, K, ...] to [B * K, ...]."""
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], axis=0))


class Outputs:
    """Splits a nest of outputs into plain tensors, and rebuilds the nest with other tensors.

    Keras's cross-entropies read an attribute `_keras_logits` of a prediction, and so bypass its
    last activation. A tape must watch these logits too, or it misses gradients of the loss.

    Attributes:
        tensors: Every tensor of the nest, each followed by its mask and its logits, if any.
        differentiable: List of bools, one for each of `tensors`: whether it is floating point and
            no mask.
    """

    def __init__(self, nest):
        self._nest = nest
        self.tensors, self.differentiable, self._attached = [], [], []
        for leaf in tf.nest.flatten(nest):
            mask, logits = layer_internals.side_channels(leaf)
            self._attached.append((tf.is_tensor(leaf), mask is not None, logits is not None))
            for tensor, is_mask in ((leaf, False), (mask, True), (logits, False)):
                if tf.is_tensor(tensor):
                    self.tensors.append(tensor)
                    self.differentiable.append(tensor.dtype.is_floating and not is_mask)

    @property
    def has_masks(self):
        """Bool, whether an output has a mask."""
        return any(has_mask for _, has_mask, _ in self._attached)

    def rebuild(self, tensors):
        """Returns the nest with `tensors` in place of `self.tensors`, in the same order."""
        replacements, leaves = iter(tensors), []
        for leaf, (is_tensor, has_mask, has_logits) in zip(
            tf.nest.flatten(self._nest), self._attached, strict=True
        ):
            # A fresh tensor each time: attributes must not leak onto the original.
            leaf = tf.identity(next(replacements)) if is_tensor else leaf
            mask = next(replacements) if has_mask else None
            logits = next(replacements) if has_logits else None
            layer_internals.set_side_channels(leaf, mask, logits)
            leaves.append(leaf)
        return tf.nest.pack_sequence_as(self._nest, leaves)

    def select(self, tensors):
        """Returns those of `tensors`, in the order of `self.tensors`, that a gradient can reach."""
        return [
            t
            for t, is_differentiable in zip(tensors, self.differentiable, strict=True)
            if is_differentiable
        ]


def positions(tensor, num_views, groups=False):
    """Reshapes [B * K, ..., d] to float32 [B, T, d]; T counts the positions of all K views.

    Args:
        tensor: Tensor [B * K, ..., d].
        num_views: Int, K.
        groups: Bool, whether to return [B, 1, T, d], with an axis for one group.
    """
    tensor = tf.cast(tensor, "float32")
    rows, *middle, last = tensor.shape
    count = None if None in middle else num_views * math.prod(middle)
    examples = None if rows is None else rows // num_views
    if examples is None and count is None:
        examples = tf.shape(tensor)[0] // num_views
    shape = (examples, *([1] if groups else []), count, last)
    return tf.reshape(tensor, [-1 if size is None else size for size in shape])


def sum_examples(tensor, factors):
    """Sums `tensor` [B, ...] over examples with `factors` [B]; 0 * nan counts as 0."""
    return tf.reduce_sum(scale_examples(tensor, factors), axis=0)


def sum_each(tensors, factors):
    """Returns `sum_examples` of each tensor in a list, a list."""
    small, vectors, other_tensors = rounding.join_vectors(tensors)
    sums = iter([sum_examples(tensor, factors) for tensor in other_tensors])
    if vectors is None:
        return list(sums)
    shapes = [t.shape[1:] for t, flag in zip(tensors, small, strict=True) if flag]
    parts = tf.split(sum_examples(vectors, factors), [math.prod(shape) for shape in shapes])
    parts = iter([p if s.rank else tf.squeeze(p) for p, s in zip(parts, shapes, strict=True)])
    return [next(parts if flag else sums) for flag in small]


def scale_examples(tensor, factors):
    """Multiplies `tensor` [B, ...] by `factors` [B]; exactly zero where the factor is."""
    factors = tf.reshape(factors, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.math.multiply_no_nan(tensor, factors)


def zero_excluded(tensors, factors, finite=None):
    """Returns tensors [B * n, ...] with zeros for the examples of factor zero, as a list.

    Args:
        tensors: List of float32 tensors; the n rows of an example stand one after the other.
        factors: float32 [B].
        finite: Scalar bool tensor, whether everything is finite, so nothing need be done. None
            means unknown, which only costs time.
    """

    def mask_tensors():
        flags = tf.cast(factors > 0, "float32")[:, tf.newaxis]
        flat = tf.stack([tf.shape(factors)[0], -1])
        return [
            tf.reshape(tf.math.multiply_no_nan(tf.reshape(t, flat), flags), tf.shape(t))
            for t in tensors
        ]

    if finite is None or not tensors:
        return mask_tensors()
    masked = tf.cond(finite, lambda: list(tensors), mask_tensors)
    for tensor, masked_tensor in zip(tensors, masked, strict=True):
        masked_tensor.set_shape(tensor.shape)
    return masked
