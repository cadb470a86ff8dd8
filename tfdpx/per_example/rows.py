"""Splits, merges and sums rows of a batch. An example has K rows, one for each augmented view."""

import math

import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example import rounding


class Rows:
    """Selects the tensors of a nest that have a batch axis, and can replace them.

    Args:
        nest: Any nest of tensors, `None` and other values.
        batched: Optional list with a bool for each leaf in `tf.nest.flatten(nest)`: whether the
            leaf has a batch axis. By default every tensor has one.
    """

    def __init__(self, nest, batched=None):
        self._nest = nest
        self._leaves = tf.nest.flatten(nest)
        if batched is None:
            batched = [tf.is_tensor(leaf) for leaf in self._leaves]
        self._batched = batched
        self.tensors = [leaf for leaf, flag in zip(self._leaves, batched, strict=True) if flag]

    def pack(self, tensors, keep_others=True):
        """Returns the nest with `tensors` in place of the tensors that have a batch axis.

        Args:
            tensors: Iterable of tensors, in the order of the nest.
            keep_others: Bool. True keeps tensors without a batch axis, and False makes them None.
        """
        replacements = iter(tensors)
        leaves = [
            next(replacements) if flag else leaf if keep_others or not tf.is_tensor(leaf) else None
            for leaf, flag in zip(self._leaves, self._batched, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._nest, leaves)

    def map(self, function):
        """Returns the nest with `function` applied to its tensors that have a batch axis."""
        return self.pack([function(tensor) for tensor in self.tensors])

    @property
    def count(self):
        """Returns the length of the batch axis: an int if static, else a scalar int32 tensor."""
        static = self.tensors[0].shape[0]
        return tf.shape(self.tensors[0])[0] if static is None else static


def split_views(tensor, num_views):
    """Reshapes a tensor [B * K, ...] to [B, K, ...], for example [6, 5] to [3, 2, 5].

    Static lengths of the other axes remain static.
    """
    rows, *rest = tensor.shape
    static_shape = [None if rows is None else rows // num_views, num_views, *rest]
    if static_shape.count(None) <= 1:
        return tf.reshape(tensor, [-1 if size is None else size for size in static_shape])
    shape = tf.shape(tensor)
    split = tf.reshape(tensor, tf.concat([[shape[0] // num_views, num_views], shape[1:]], axis=0))
    split.set_shape(static_shape)
    return split


def sum_rows(tensor, num_views, axes=()):
    """Sums a tensor [B * K, ...] over the views of each example, and over `axes`. Returns [B, ...].

    Args:
        tensor: Tensor [B * K, ...] of numbers.
        num_views: Int K, the number of views of an example.
        axes: Sequence of positive ints, further axes of `tensor` to sum over.
    """
    if num_views == 1:
        return tf.reduce_sum(tensor, list(axes)) if axes else tensor
    return tf.reduce_sum(split_views(tensor, num_views), [1, *(axis + 1 for axis in axes)])


def repeat_views(tensor, num_views):
    """Repeats each entry of a tensor [B] for the K views of an example. Returns [B * K]."""
    return tensor if num_views == 1 else tf.repeat(tensor, num_views)


def along(values, tensor):
    """Reshapes `values` [rows] to broadcast with `tensor`, for example [4] to [4, 1, 1]."""
    return tf.reshape(values, [-1] + [1] * (tensor.shape.rank - 1))


def merge_views(tensor):
    """Reshapes a tensor [B, K, ...] to [B * K, ...]."""
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], axis=0))


class Outputs:
    """Splits a nest of outputs into plain tensors, and rebuilds the nest with other tensors.

    Keras's cross-entropies read the logits in the attribute `_keras_logits` of a prediction, and so
    bypass the last activation. A tape must watch these logits, too. Otherwise it misses gradients
    of the loss.

    Attributes:
        tensors: List of all tensors of the nest. Each is followed by its mask and its logits, if it
            has them.
        differentiable: List with a bool for each of `tensors`: True for floating-point tensors that
            are not masks.
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
        """Returns whether any output has a mask."""
        return any(has_mask for _, has_mask, _ in self._attached)

    def rebuild(self, tensors):
        """Returns the nest with `tensors` in place of `self.tensors`, which have the same order."""
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
        """Returns the differentiable ones of `tensors`, which have the order of `self.tensors`."""
        return [
            t
            for t, is_differentiable in zip(tensors, self.differentiable, strict=True)
            if is_differentiable
        ]


def positions(tensor, num_views, groups=False):
    """Reshapes a tensor to float32 [B, T, d], where T counts the positions of all K views.

    Args:
        tensor: Tensor [B * K, ..., d].
        num_views: Int K, the number of views of an example.
        groups: Bool, whether to add an axis for a single group and return [B, 1, T, d].
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
    """Sums `tensor` [B, ...] times `factors` [B] over examples. The result is [...].

    An example with the factor zero counts as zero, even if its entries are not finite.
    """
    return tf.reduce_sum(scale_examples(tensor, factors), axis=0)


def sum_each(tensors, factors):
    """Returns a list with the result of `sum_examples` for each tensor in a list."""
    small, vectors, other_tensors = rounding.join_vectors(tensors)
    sums = iter([sum_examples(tensor, factors) for tensor in other_tensors])
    if vectors is None:
        return list(sums)
    shapes = [t.shape[1:] for t, flag in zip(tensors, small, strict=True) if flag]
    parts = tf.split(sum_examples(vectors, factors), [math.prod(shape) for shape in shapes])
    parts = iter([p if s.rank else tf.squeeze(p) for p, s in zip(parts, shapes, strict=True)])
    return [next(parts if flag else sums) for flag in small]


def scale_examples(tensor, factors):
    """Multiplies `tensor` [B, ...] by `factors` [B].

    An example with the factor zero becomes zero, even if its entries are not finite.
    """
    factors = tf.reshape(factors, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.math.multiply_no_nan(tensor, factors)


def zero_excluded(tensors, factors, finite=None):
    """Returns a list of the tensors, with zeros for all examples with the factor zero.

    Args:
        tensors: List of float32 tensors [B * n, ...]. The n rows of an example are consecutive.
        factors: float32 [B].
        finite: Scalar bool tensor. True means that all tensors are finite, so they need no zeros
            and are returned unchanged. None means that this is unknown.
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


def joining_vectors(nest):
    """Returns two functions: one joins all vectors and scalars of a nest, the other splits them.

    A step on joined vectors needs fewer nodes of the graph, above all in the state of a loop.

    Args:
        nest: Nest of tensors.

    Returns:
        Pair of functions: from a nest like `nest` to a list of tensors, and from such a list back
        to the nest.
    """
    leaves = tf.nest.flatten(nest)
    shapes = [tf.TensorShape(t.shape) for t in leaves]
    flags = [shape.rank < 2 and shape.is_fully_defined() for shape in shapes]
    shapes = [shape for shape, flag in zip(shapes, flags, strict=True) if flag]

    def join(nest):
        pairs = list(zip(tf.nest.flatten(nest), flags, strict=True))
        vectors = [t if len(t.shape) else tf.expand_dims(t, 0) for t, flag in pairs if flag]
        joined = [tf.concat(vectors, axis=0)] if vectors else []
        return joined + [t for t, flag in pairs if not flag]

    def split(tensors):
        others = iter(tensors)
        vectors = tf.split(next(others), [math.prod(s) for s in shapes]) if shapes else []
        vectors = iter(
            [v if s.rank else tf.squeeze(v) for v, s in zip(vectors, shapes, strict=True)]
        )
        leaves = [next(vectors if flag else others) for flag in flags]
        return tf.nest.pack_sequence_as(nest, leaves)

    return join, split
