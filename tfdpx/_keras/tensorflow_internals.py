"""Private names of TensorFlow: no other file touches them."""

import contextlib
import functools
import sys
import threading
import weakref

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import function_def_to_graph, ops
from tensorflow.python.ops import (
    control_flow_assert,
    gen_array_ops,
    gen_math_ops,
    gen_nn_ops,
    gen_random_ops,
    gen_resource_variable_ops,
    gen_stateful_random_ops,
)
from tensorflow.python.ops.parallel_for import control_flow_ops, pfor

_active = threading.local()


def weakly(method):
    """Function that calls a bound method, for `tf.numpy_function` and the like.

    TensorFlow never forgets a Python function that a graph calls, nor what the function refers to.
    Whoever uses this must have the data set refer to the object.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments):
        found = reference()
        if found is None:
            raise ValueError(
                "The data set of these batches is gone. Make it outside of any tf.function and of "
                "other data sets, and keep it in a variable while it is iterated over."
            )
        return found(*arguments)

    return call


@contextlib.contextmanager
def vectorizing_by(held, multiply):
    """Within it, in this thread, `tf.vectorized_map` runs most operations in a loop of their own.

    Elsewhere it stays what it is.

    Args:
        held: Set of str, the types of operations that are vectorized as TensorFlow does.
        multiply: Function `(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b)` of two tensors as
            `tf.matmul` takes them, of whether each has an axis of all examples in front, and of
            the arguments of `tf.matmul`. Returns the products, with that axis: those of the type
            `BatchMatMulV2`.
    """

    def products(operation):
        operation.expanddim_inputs_for_broadcast()
        (x, x_stacked, _), (y, y_stacked, _) = operation.input(0), operation.input(1)
        adjoint_a, adjoint_b = operation.get_attr("adj_x"), operation.get_attr("adj_y")
        return pfor.wrap(multiply(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b), True)

    _install_converters()
    own = {"BatchMatMulV2": products, "Einsum": _einsum, "Squeeze": _squeeze}
    before, _active.converters = getattr(_active, "converters", None), (held, own)
    try:
        yield
    finally:
        _active.converters = before


class _Converters(dict):
    """By type of operation; what is missing, TensorFlow runs in a loop over the examples."""

    def get(self, key, default=None):
        held, own = getattr(_active, "converters", None) or (self, {})
        return own.get(key, super().get(key, default)) if key in held else default


def _einsum(operation):
    if b"..." in operation.get_attr("equation"):
        raise pfor.ConversionNotImplementedError("Such products are wrong on CPUs.")
    return dict.get(pfor._pfor_converter_registry, "Einsum")(operation)


def _squeeze(operation):
    axes = operation.get_attr("squeeze_dims")
    if not axes:
        # TensorFlow's would squeeze the axis of the examples, where there is one of them.
        shape = operation.op.inputs[0].shape
        if not shape.is_fully_defined():
            raise pfor.ConversionNotImplementedError("Which axes have length 1 is not known.")
        axes = [axis for axis, length in enumerate(shape) if length == 1]
    axes = [axis + 1 if axis >= 0 else axis for axis in axes]
    tensor = operation.stacked_input(0)
    return pfor.wrap(tf.squeeze(tensor, axes) if axes else tf.identity(tensor), True)


@functools.cache
def _install_converters():
    pfor._pfor_converter_registry = _Converters(pfor._pfor_converter_registry)
    for loop in pfor.WhileOp, pfor.WhileV2:
        loop._process_cond_stacked = _same_rounds(loop._process_cond_stacked)


def _same_rounds(original):
    @functools.wraps(original)
    def process(*args, **kwargs):
        if getattr(_active, "converters", None):
            # TensorFlow's gradient of it fails.
            raise ValueError("Each example decides how often a loop runs.")
        return original(*args, **kwargs)

    return process


@contextlib.contextmanager
def stateful_draws_from(next_key):
    """Within it, in this thread, what draws from a state of TensorFlow's own draws from keys.

    So do `tf.random.uniform`, `normal` and `truncated_normal`, and a `tf.random.Generator`, whose
    state is left alone.

    Args:
        next_key: Function to an int64 tensor [2], another one on each call.
    """
    _redirect_stateful_draws()
    before, _active.next_key = getattr(_active, "next_key", None), next_key
    try:
        yield
    finally:
        _active.next_key = before


@functools.cache
def _redirect_stateful_draws():
    def uniform(shape, dtype, **_):
        return tf.random.stateless_uniform(shape, _active.next_key(), dtype=dtype)

    def integers(shape, minval, maxval, **_):
        return tf.random.stateless_uniform(
            shape, _active.next_key(), minval, maxval, dtype=minval.dtype
        )

    def normal(shape, dtype, **_):
        return tf.random.stateless_normal(shape, _active.next_key(), dtype=dtype)

    def truncated(shape, dtype, **_):
        return tf.random.stateless_truncated_normal(shape, _active.next_key(), dtype=dtype)

    def counter_and_key(*_, **__):
        return tf.random.stateless_uniform([3], _active.next_key(), None, None, tf.int64)

    for module, name, keyed in (
        (gen_random_ops, "random_uniform", uniform),
        (gen_random_ops, "random_uniform_int", integers),
        (gen_random_ops, "random_standard_normal", normal),
        (gen_random_ops, "truncated_normal", truncated),
        (gen_stateful_random_ops, "rng_read_and_skip", counter_and_key),
    ):
        setattr(module, name, _redirected(getattr(module, name), keyed))


def _redirected(original, keyed):
    @functools.wraps(original)
    def draw(*args, **kwargs):
        is_keyed = getattr(_active, "next_key", None) is not None
        return (keyed if is_keyed else original)(*args, **kwargs)

    return draw


@contextlib.contextmanager
def operations_by(functions, scope):
    """Within it, in this thread, functions stand in for operations of TensorFlow's.

    What `tf.vectorized_map` makes of operations is not affected, only what it maps.

    Args:
        functions: Dict by the snake-case name of a type of operation. A function takes the
            original one and its arguments, and returns what that returns; or `NotImplemented`,
            to have the original called. In it, functions are the original ones.
        scope: Str, a name scope for what functions make.
    """
    _vectorize_with_originals()
    for name in functions:
        _replace_operation(name)
    with _replaced((functions, scope)):
        yield


@contextlib.contextmanager
def _replaced(by):
    before, _active.replaced = getattr(_active, "replaced", None), by
    try:
        yield
    finally:
        _active.replaced = before


@functools.cache
def _replace_operation(name):
    homes = (
        *(control_flow_assert, gen_array_ops, gen_math_ops, gen_nn_ops),
        gen_resource_variable_ops,
    )
    original = next(getattr(home, name) for home in homes if hasattr(home, name))
    # Modules import functions from each other.
    for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "tensorflow"]:
        if vars(module).get(name) is original:
            setattr(module, name, _replaceable(original, name))


@functools.cache
def _vectorize_with_originals():
    for owner, name in (pfor.PFor, "convert"), (control_flow_ops, "_broadcasting_gather"):
        setattr(owner, name, _with_originals(getattr(owner, name)))


def _replaceable(original, name):
    @functools.wraps(original)
    def make(*args, **kwargs):
        functions, scope = getattr(_active, "replaced", None) or ({}, None)
        if name not in functions:
            return original(*args, **kwargs)
        with _replaced(None):
            with tf.name_scope(scope):
                made = functions[name](original, *args, **kwargs)
            return original(*args, **kwargs) if made is NotImplemented else made

    return make


def _with_originals(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        with _replaced(None):
            return function(*args, **kwargs)

    return call


def is_under_xla():
    """Whether what is traced here is for XLA to compile."""
    return control_flow_ops._is_under_xla_context()


def is_for_xla(model):
    """Whether XLA compiles the step of a `keras.Model`, as it does whatever runs on a TPU."""
    return model.jit_compile or is_under_xla() or bool(tf.config.list_logical_devices("TPU"))


def is_function(graph, name):
    """Whether a type of operation is a function that `graph` knows, as TensorFlow once called."""
    return graph._is_function(name)


def called_graph(graph, name):
    """The graph of the function `name` that operations of `graph` call."""
    function, place = None, graph
    while function is None:  # An operation in a loop of its own calls what is known outside of it.
        function, place = place._get_function(name), place.outer_graph
    if not hasattr(function, "graph"):  # Made by TensorFlow itself, in an older way.
        with graph.as_default():
            definition = function.cached_definition
            return function_def_to_graph.function_def_to_graph(
                definition, include_library_functions=True
            )
    return function.graph


def called(operation):
    """List of pairs (attribute, graph) of the functions that a `tf.Operation` calls."""
    graphs = []
    if is_function(operation.graph, operation.type):
        graphs.append(("f", called_graph(operation.graph, operation.type)))
    for name, attribute in operation.node_def.attr.items():
        for function in [attribute.func, *attribute.list.func]:
            if function.name:
                graph = called_graph(operation.graph, function.name)
                graphs.append((name, graph))
    return graphs


def has_own_gradient(operation):
    """Whether somebody wrote a gradient for this operation in place of its type's."""
    try:
        operation.get_attr("_gradient_op_type")
    except ValueError:
        return False
    # That of a function is one that TensorFlow derived from what is inside.
    return not ops.get_gradient_function(operation).__module__.startswith("tensorflow.python.eager")


def differentiated_by(gradient, function, tensor):
    """`function(tensor)`, of which every `tf.GradientTape` takes a gradient that is given.

    As with `tf.custom_gradient`, but the graph has no operation for it.

    Args:
        gradient: Function of the gradient at the output, to that at `tensor`.
        function: Function of a tensor to a tensor.
        tensor: Tensor.
    """
    with record.stop_recording():
        output = function(tensor)
    record.record_operation("Given", [output], [tensor], lambda given: [gradient(given)])
    return output


def own_gradient(operation):
    """What the gradient that was written for an operation computes.

    Returns:
        Pair of a graph and a list of ints. The inputs of the graph are the gradients at the
        outputs of `operation`, and what it captures of that operation's graph; its outputs are the
        gradients at the inputs of `operation` that the list numbers.
    """
    function, which = ops.get_gradient_function(operation), []

    def gradients(*given):
        gradients = list(function(operation, *given))
        which[:] = [number for number, gradient in enumerate(gradients) if gradient is not None]
        return [gradients[number] for number in which]

    with operation.graph.as_default():
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in operation.outputs]
        traced = tf.function(gradients, autograph=False).get_concrete_function(*specs)
    return traced.graph, which


def sources_of(dataset):
    """Names of the classes of a `tf.data.Dataset` and of all data sets that it reads."""
    kinds = {type(dataset).__name__.removeprefix("_")}
    return kinds.union(*(sources_of(source) for source in inputs_of(dataset)))


def inputs_of(dataset):
    """List of the data sets that a `tf.data.Dataset` reads."""
    return dataset._inputs()
