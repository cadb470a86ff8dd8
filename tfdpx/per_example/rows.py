"""Rows, of which an example has one for each of its K views: split, merged, in nests."""

import tensorflow as tf


class Rows:
    """The tensors of a nest that have a batch axis, and the way back to the nest.

    Args:
        nest: Any nest of tensors, `None` and other values.
        batched: Optional flags, one a leaf of `tf.nest.flatten(nest)`; by default every tensor is.
    """

    def __init__(self, nest, batched=None):
        self._nest = nest
        self._leaves = tf.nest.flatten(nest)
        if batched is None:
            batched = [tf.is_tensor(leaf) for leaf in self._leaves]
        self._batched = batched
        self.tensors = [leaf for leaf, flag in zip(self._leaves, batched, strict=True) if flag]

    def pack(self, tensors, keep_others=True):
        """The nest with its batched tensors replaced by `tensors`, in order.

        Args:
            tensors: Iterable of tensors.
            keep_others: Bool. Whether tensors without a batch axis stay, or become None.
        """
        new = iter(tensors)
        leaves = [
            next(new) if flag else leaf if keep_others or not tf.is_tensor(leaf) else None
            for leaf, flag in zip(self._leaves, self._batched, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._nest, leaves)

    def map(self, function):
        """The nest with `function` applied to its batched tensors."""
        return self.pack([function(tensor) for tensor in self.tensors])

    @property
    def count(self):
        """The length of the batch axis: an int where it is static, else a scalar int32 tensor."""
        static = self.tensors[0].shape[0]
        return tf.shape(self.tensors[0])[0] if static is None else static


def split_views(tensor, num_views):
    """[B * K, ...] as [B, K, ...], its shape as static as it was."""
    rows, *rest = tensor.shape
    static = [None if rows is None else rows // num_views, num_views, *rest]
    if static.count(None) <= 1:
        return tf.reshape(tensor, [-1 if size is None else size for size in static])
    shape = tf.shape(tensor)
    split = tf.reshape(tensor, tf.concat([[shape[0] // num_views, num_views], shape[1:]], axis=0))
    split.set_shape(static)
    return split


def sum_rows(tensor, num_views, axes=()):
    """[B * K, ...] summed over an example's views, and over `axes` of a row: [B, ...].

    Args:
        tensor: Of any type that adds.
        num_views: Int, K.
        axes: Ints above zero, axes of `tensor`.
    """
    if num_views == 1:
        return tf.reduce_sum(tensor, list(axes)) if axes else tensor
    return tf.reduce_sum(split_views(tensor, num_views), [1, *(axis + 1 for axis in axes)])


def repeat_views(tensor, num_views):
    """[B] as [B * K]: each for all the views of its example."""
    return tensor if num_views == 1 else tf.repeat(tensor, num_views)


def along(values, tensor):
    """`values` [rows], with axes of length one for those of `tensor` [rows, ...] behind."""
    return tf.reshape(values, [-1] + [1] * (tensor.shape.rank - 1))


def merge_views(tensor):
    """[B, K, ...] as [B * K, ...]."""
    return tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], axis=0))
