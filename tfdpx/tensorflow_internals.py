"""The private names of TensorFlow: besides `keras_internals`, the only file that touches such."""

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.parallel_for import control_flow_ops, pfor


def vectorize_products_by(multiply):
    """Has every `tf.vectorized_map` from here on form an example's matrix products by `multiply`.

    Args:
        multiply: Function `(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b)` of two tensors as
            `tf.matmul` takes them, of whether each has an axis of all examples in front, and of
            the arguments of `tf.matmul`. Returns the products, with that axis.
    """

    def convert(operation):
        operation.expanddim_inputs_for_broadcast()
        (x, x_stacked, _), (y, y_stacked, _) = operation.input(0), operation.input(1)
        adjoint_a, adjoint_b = operation.get_attr("adj_x"), operation.get_attr("adj_y")
        return pfor.wrap(multiply(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b), True)

    pfor._pfor_converter_registry["BatchMatMulV2"] = convert


def is_under_xla():
    """Whether what is traced here is for XLA to compile."""
    return control_flow_ops._is_under_xla_context()


def is_for_xla(model):
    """Whether XLA compiles the step of a `keras.Model`, as it does whatever runs on a TPU."""
    return model.jit_compile or is_under_xla() or bool(tf.config.list_logical_devices("TPU"))


def called_graph(graph, name):
    """The graph of the function `name` that operations of `graph` call."""
    return graph._get_function(name).graph


def has_own_gradient(operation):
    """Whether somebody wrote a gradient for this operation, in place of that of its type."""
    try:
        operation.get_attr("_gradient_op_type")
    except ValueError:
        return False
    # That of a function is one that TensorFlow derived from what is inside.
    return not ops.get_gradient_function(operation).__module__.startswith("tensorflow.python.eager")


def own_gradient(operation):
    """What the gradient that was written for an operation computes.

    Returns:
        Pair of a graph and a list of ints. The inputs of the graph are the gradients at the
        outputs of `operation`, and what it captures of that operation's graph; its outputs are the
        gradients at the inputs of `operation` that the list numbers.
    """
    function, which = ops.get_gradient_function(operation), []

    def gradients(*given):
        found = list(function(operation, *given))
        which[:] = [number for number, gradient in enumerate(found) if gradient is not None]
        return [found[number] for number in which]

    with operation.graph.as_default():
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in operation.outputs]
        traced = tf.function(gradients, autograph=False).get_concrete_function(*specs)
    return traced.graph, which


def sources_of(dataset):
    """Names of the classes of a `tf.data.Dataset` and of all data sets that it reads."""
    found = {type(dataset).__name__.removeprefix("_")}
    return found.union(*(sources_of(source) for source in dataset._inputs()))
