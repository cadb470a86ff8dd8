"""`tf.vectorized_map`, kept off a fault of TensorFlow's matrix products on CPUs.

With oneDNN, which is on by default, TensorFlow 2.16 to 2.21 multiply `[n, 1, a, b]` with one matrix
`[1, 1, b, c]` for all wrongly from n = 5 on, and write beyond their memory. That is what
vectorization makes of an example's `[1, a, b]` times a layer's weights. Here such products get a
single batch axis first.
"""

import tensorflow as tf
from tensorflow.python.ops.parallel_for import pfor


def vectorized_map(function, elements):
    """See `tf.vectorized_map`."""
    # For good, and for all who vectorize: products come out as they should.
    pfor._pfor_converter_registry["BatchMatMulV2"] = _multiply
    return tf.vectorized_map(function, elements)


def _multiply(pfor_input):
    """Converts the op `BatchMatMulV2` of one example to that of all."""
    pfor_input.expanddim_inputs_for_broadcast()
    (x, x_stacked, _), (y, y_stacked, _) = pfor_input.input(0), pfor_input.input(1)
    adjoint = dict(adjoint_a=pfor_input.get_attr("adj_x"), adjoint_b=pfor_input.get_attr("adj_y"))
    if x_stacked and y_stacked:
        return pfor.wrap(tf.matmul(x, y, **adjoint), True)
    one_for_all = y if x_stacked else x
    if one_for_all.shape.rank is None or any(size != 1 for size in one_for_all.shape[:-2]):
        batch = tf.broadcast_dynamic_shape(tf.shape(x)[:-2], tf.shape(y)[:-2])
        x, y = (tf.broadcast_to(t, tf.concat([batch, tf.shape(t)[-2:]], 0)) for t in (x, y))
        return pfor.wrap(tf.matmul(x, y, **adjoint), True)
    batch = tf.shape(x if x_stacked else y)[:-2]
    x, y = (tf.reshape(t, tf.concat([[-1], tf.shape(t)[-2:]], 0)) for t in (x, y))
    products = tf.matmul(x, y, **adjoint)
    return pfor.wrap(tf.reshape(products, tf.concat([batch, tf.shape(products)[-2:]], 0)), True)
