"""`tf.vectorized_map`, kept off a fault of TensorFlow's matrix products on CPUs.

With oneDNN, which is on by default, TensorFlow 2.16 to 2.21 multiply `[n, 1, a, b]` with one matrix
`[1, 1, b, c]` for all wrongly from n = 5 on, and write beyond their memory. That is what
vectorization makes of an example's `[1, a, b]` times a layer's weights. Here such products get a
single batch axis first.

XLA cannot compile a loop that was vectorized: that is found while tracing, before any step.
"""

import tensorflow as tf

from tfdpx import tensorflow_internals

_LOOPS = ("While", "StatelessWhile")


def _is_of_the_user(record):
    """Whether a log message is one that the user can do something about.

    Outside of a graph `tf.vectorized_map` makes a function of its own on each call, and TensorFlow
    warns of retracing it.
    """
    message = record.getMessage()
    return not ("retracing" in message and "<function pfor." in message)


tf.get_logger().addFilter(_is_of_the_user)


def vectorized_map(function, elements, what="The function", jit_compile=False):
    """See `tf.vectorized_map`.

    Args:
        function: As there.
        elements: As there.
        what: String for the error: whose function it is.
        jit_compile: Whether XLA is to compile it later, where it does not already.

    Raises:
        ValueError: If `function` loops and XLA is to compile it.
    """
    # For good, and for all who vectorize: products come out as they should.
    tensorflow_internals.vectorize_products_by(_multiply)
    if not jit_compile and not tensorflow_internals.is_under_xla():
        return tf.vectorized_map(function, elements)

    def without_loops(element):
        result = function(element)
        # Eagerly and under XLA, pfor traces this into a graph of its own.
        if _loops(tf.compat.v1.get_default_graph()):
            raise ValueError(
                f"{what} runs a loop (as recurrent layers do) under `jit_compile=True`, which "
                'Keras may also have chosen by "auto". XLA cannot compile such a loop for each '
                "example. Use `model.compile(..., jit_compile=False)`, or build a recurrent layer "
                "with `unroll=True`, which compiles slowly for long sequences."
            )
        return result

    return tf.vectorized_map(without_loops, elements)


def _loops(graph):
    """Whether a loop is among the operations of `graph` and of the functions that it calls."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(called.node_def for called in definition.library.function)]
    return any(node.op in _LOOPS for part in nodes for node in part)


def _multiply(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b):
    """The op `BatchMatMulV2` of one example, for all; what is stacked has their axis in front."""
    adjoint = {"adjoint_a": adjoint_a, "adjoint_b": adjoint_b}
    if x_stacked and y_stacked:
        return tf.matmul(x, y, **adjoint)
    one_for_all = y if x_stacked else x
    if one_for_all.shape.rank is None or any(size != 1 for size in one_for_all.shape[:-2]):
        batch = tf.broadcast_dynamic_shape(tf.shape(x)[:-2], tf.shape(y)[:-2])
        x, y = (tf.broadcast_to(t, tf.concat([batch, tf.shape(t)[-2:]], 0)) for t in (x, y))
        return tf.matmul(x, y, **adjoint)
    batch = tf.shape(x if x_stacked else y)[:-2]
    x, y = (tf.reshape(t, tf.concat([[-1], tf.shape(t)[-2:]], 0)) for t in (x, y))
    products = tf.matmul(x, y, **adjoint)
    return tf.reshape(products, tf.concat([batch, tf.shape(products)[-2:]], 0))
