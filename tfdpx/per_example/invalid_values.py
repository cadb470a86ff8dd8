"""Invalid values of an example make its gradient not finite, where TensorFlow would end the run.

An index beyond its table, an assertion that fails: TensorFlow stops with an error, on CPUs at
least, and so shows that such an example was drawn. Here the operation gets a valid value in place
of the invalid one, and the example's gradient is NaN: it contributes zero and is counted, as is
every example whose gradient is not finite.

Operations that are made safe, on all devices alike:

- `tf.gather`, `tf.gather_nd`, `keras.ops.take`, `Embedding`: an entry at an index out of range is
  NaN, and so is the gradient at it. One of whole numbers is the smallest of their type (the largest
  of types without sign), which is out of range for what comes next; of strings and flags it is
  the first entry. So does `jax.numpy.take(mode="fill")`.
- `tf.nn.sparse_softmax_cross_entropy_with_logits`: the loss at an invalid label is NaN.
- `tf.debugging.check_numerics` lets NaN pass.

Where each example is computed alone, also:

- Assertions: one that fails makes the example's loss NaN.
- `tf.math.unsorted_segment_sum` and its kin, and `tf.math.bincount`, as `CategoryEncoding` uses it:
  an identifier beyond the segments, or a negative number, makes all that they give NaN.

In metrics and in gradients, sums by such an index leave out what has an invalid one.

What raises besides, `tfdpx.independence.raising` finds.
"""

import contextlib
import functools
from collections.abc import Callable

import tensorflow as tf

from tfdpx._keras import tensorflow_internals

# The names of all operations that were made safe contain the first; those of the indices by which
# the gradient of a gather is scattered again, the second.
SCOPE, IN_RANGE = "invalid_as_nan", "index_in_range"


class Conditions:
    """What was asserted of an example that the default graph computes alone."""

    def __init__(self):
        self._graph = tf.compat.v1.get_default_graph()
        self._conditions = []

    def asserted(self, original, condition, *args, **kwargs):
        """Stands for `tf.debugging.Assert`, but of what only an inner graph knows."""
        condition = tf.convert_to_tensor(condition)
        if not tf.is_symbolic_tensor(condition) or condition.graph is not self._graph:
            return NotImplemented
        self._conditions.append(condition)
        return tf.no_op()

    def applied(self, tensor):
        """`tensor`, and where a condition fails an invalid one like it: NaN, if it has floats."""
        held = [_holds(condition) for condition in self._conditions]
        return _filled(tensor, tf.reduce_all(held)) if held else tensor


@contextlib.contextmanager
def invalid_as_nan(alone=False):
    """Within it, what is traced in this thread takes invalid values as this module says.

    Args:
        alone: Whether the default graph computes a single example. Then the `Conditions` must be
            `applied` to what it gives.

    Returns:
        A context that gives `Conditions`.
    """
    conditions = Conditions()
    functions = dict(_SAFE)
    if alone:
        functions.update(_SAFE_ALONE, Assert=conditions.asserted)
    with tensorflow_internals.operations_by(functions, SCOPE):
        yield conditions


def invalid_left_out():
    """As `invalid_as_nan`, for metrics and gradients: what has an invalid index is not summed."""
    return tensorflow_internals.operations_by({**_SAFE, **_LEFT_OUT}, SCOPE)


# Each takes the function of TensorFlow's that it stands for, and its arguments;
# `bad_indices_policy` of newer versions has nothing to decide.


def _check_numerics(original, tensor, message, name=None):
    return tf.identity(tensor)


def _segments(original, data, segment_ids, num_segments, name=None):
    ids = tf.convert_to_tensor(segment_ids)
    valid = tf.reduce_all(ids < tf.cast(num_segments, ids.dtype))
    return _filled(_valid_segments(original, data, ids, num_segments), valid)


def _valid_segments(original, data, segment_ids, num_segments, name=None):
    ids = tf.convert_to_tensor(segment_ids)
    valid = ids < tf.cast(num_segments, ids.dtype)
    # What has a negative one is in no segment.
    return original(data, tf.where(valid, ids, -1), num_segments)


def _scatter(original, indices, updates, shape, **_):
    indices, updates = tf.convert_to_tensor(indices), tf.convert_to_tensor(updates)
    depth = indices.shape[-1]
    valid = tf.reduce_all(_within(indices, tf.convert_to_tensor(shape)[:depth]), -1, keepdims=True)
    behind = updates.shape.rank - (indices.shape.rank - 1)
    kept = valid[(..., 0, *[tf.newaxis] * behind)]
    updates = tf.where(kept, updates, tf.zeros_like(updates))
    return original(tf.where(valid, indices, 0), updates, shape)


def _scatter_or_nothing(original, indices, updates, shape, **_):
    made = _scatter(original, indices, updates, shape)
    depth = indices.shape[-1]
    valid = tf.reduce_all(_within(indices, tf.convert_to_tensor(shape)[:depth]))
    return _filled(made, valid)


def _bincount(original, input, size, weights, binary_output=False, name=None):
    numbers = tf.convert_to_tensor(input)
    valid = numbers >= 0
    # What is `size` or more is in no bin.
    counts = original(tf.where(valid, numbers, size), size, weights, binary_output)
    return _filled(counts, tf.reduce_all(valid))


def _cross_entropy(original, features, labels, name=None):
    labels = tf.convert_to_tensor(labels)
    valid = _within(labels, tf.shape(features)[-1])
    losses, gradients = original(features, tf.where(valid, labels, 0))
    return _filled(losses, valid), gradients


def _gather(original, params, indices, axis, batch_dims=0, name=None):
    params, axis = tf.convert_to_tensor(params), tf.get_static_value(axis)
    if axis is None or params.shape.rank is None:
        return NotImplemented
    axis %= params.shape.rank

    def gather(indices):
        return original(params, indices, axis, batch_dims=batch_dims)

    length = params.shape[axis] or tf.shape(params)[axis]
    return _gathered(gather, indices, length, axis, batch_dims)


def _resource_gather(original, resource, indices, dtype, batch_dims=0, **_):
    def gather(indices):
        return original(resource, indices, dtype, batch_dims=batch_dims)

    length = tf.raw_ops.VariableShape(input=resource)[batch_dims]
    return _gathered(gather, indices, length, batch_dims, batch_dims)


def _gathered(gather, indices, length, axis, batch_dims):
    indices = tf.convert_to_tensor(indices)
    rank, known = indices.shape.rank, tf.get_static_value(indices)
    if rank is None:
        return NotImplemented
    if known is not None and isinstance(length, int) and ((0 <= known) & (known < length)).all():
        return NotImplemented
    valid = _within(indices, length)
    entries = gather(tf.where(valid, indices, 0, name=IN_RANGE))
    batch_dims += rank * (batch_dims < 0)
    behind = entries.shape.rank - axis - (rank - batch_dims)
    place = [slice(None)] * batch_dims + [tf.newaxis] * (axis - batch_dims)
    return _filled(entries, valid[(*place, ..., *[tf.newaxis] * behind)])


def _gather_nd(original, params, indices, name=None, **_):
    params = tf.convert_to_tensor(params)
    return _gathered_nd(functools.partial(original, params), indices, tf.shape(params))


def _resource_gather_nd(original, resource, indices, dtype, name=None):
    shape = tf.raw_ops.VariableShape(input=resource)
    gather = functools.partial(original, resource, dtype=dtype)
    return _gathered_nd(gather, indices, shape)


def _gathered_nd(gather, indices, shape):
    indices = tf.convert_to_tensor(indices)
    depth = indices.shape[-1]
    if depth is None:
        return NotImplemented
    valid = tf.reduce_all(_within(indices, shape[:depth]), axis=-1)
    entries = gather(tf.where(valid[..., tf.newaxis], indices, 0, name=IN_RANGE))
    behind = entries.shape.rank - valid.shape.rank
    return _filled(entries, valid[(..., *[tf.newaxis] * behind)])


def _within(indices, length):
    """Whether each is at least zero and less than `length`."""
    # Of 16 bits an index may be where the length has more.
    return (indices >= 0) & (indices <= tf.cast(length - 1, indices.dtype))


def _filled(tensor, valid):
    """`tensor` where it is valid, of which the shape goes with it, and elsewhere not a number."""
    dtype = tensor.dtype
    if dtype.is_floating or dtype.is_complex:
        # A product, so that the gradient is NaN as well.
        return tensor * tf.cast(tf.where(valid, 1.0, float("nan")), dtype)
    if dtype.is_integer:
        return tf.where(valid, tensor, dtype.max if dtype.is_unsigned else dtype.min)
    return tensor


_SAFE = {
    "check_numerics": _check_numerics,
    "gather_nd": _gather_nd,
    "gather_v2": _gather,
    "resource_gather": _resource_gather,
    "resource_gather_nd": _resource_gather_nd,
    "sparse_softmax_cross_entropy_with_logits": _cross_entropy,
}
_SEGMENTS = [f"unsorted_segment_{how}" for how in ("max", "min", "prod", "sum")]
_SAFE_ALONE = {
    "dense_bincount": _bincount,
    "scatter_nd": _scatter_or_nothing,
    **dict.fromkeys(_SEGMENTS, _segments),
}
_LEFT_OUT: dict[str, Callable] = {
    "scatter_nd": _scatter,
    **dict.fromkeys(_SEGMENTS, _valid_segments),
}


def _holds(condition):
    """Bool scalar: whether all of a condition holds."""
    # Keras's lookups count what `tf.where` finds: of that number no vectorization is possible.
    if condition.op.type == "Equal" and tf.get_static_value(condition.op.inputs[1]) == 0:
        counted = condition.op.inputs[0].op
        found = counted.inputs[0].op if counted.type == "Size" else counted
        if found.type == "Where":
            return ~tf.reduce_any(tf.cast(found.inputs[0], tf.bool))
    return tf.reduce_all(condition)
