"""Functions that are traced once for all layers of one kind.

A model has many layers that are alike, and to trace what is done for each takes longer than a step.
"""

import functools

import tensorflow as tf


def alike(function, kind, *tensors):
    """`function(*kind, *tensors)`, as a call of a graph that is traced once for all that are alike.

    Args:
        function: Python function of what follows, that reads no tensor or variable of its own.
        kind: Tuple of hashable values.
        *tensors: Tensors; alike are those of the same static shapes and dtypes.

    Returns:
        What `function` returns, a nest of tensors.
    """
    specs = (tf.TensorSpec(t.shape, t.dtype) for t in tensors)
    return _traced(function, kind, *specs)(*tensors)


@functools.lru_cache(maxsize=512)
def _traced(function, kind, *specs):
    with tf.init_scope():  # Not for the graph that is being made alone.
        traced = tf.function(lambda *tensors: function(*kind, *tensors), autograph=False)
        return traced.get_concrete_function(*specs)
