"""Private names of TensorFlow: no other file touches them."""

import contextlib
import functools
import threading
import weakref

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context, record
from tensorflow.python.eager.record import VariableWatcher as VariableWatcher
from tensorflow.python.framework import function_def_to_graph
from tensorflow.python.ops import (
    gen_random_ops,
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
    own = {"BatchMatMulV2": products, **_OWN}
    before, _active.converters = getattr(_active, "converters", None), (held, own)
    try:
        yield
    finally:
        _active.converters = before


class _Converters(dict):
    """By type of operation; what is missing, TensorFlow runs in a loop over the examples."""

    def get(self, key, default=None):
        held, own = getattr(_active, "converters", None) or (self, {})
        return own.get(key, super().get(key, default)) if key in held or key in own else default


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


def _zeros_like(operation):
    tensor = operation.stacked_input(0)
    if tensor.dtype == tf.variant:  # A list, whose entries have the axis of the examples.
        zeros = tf.raw_ops.ZerosLike(x=pfor._untile_variant(tensor))
        return pfor.wrap(pfor._tile_variant(zeros, operation), True)
    return dict.get(pfor._pfor_converter_registry, "ZerosLike")(operation)


def _segments(operation):
    """A sum, a product or an extreme by segments that keeps to the segments of its own example."""
    operation.stack_inputs([0, 1])
    ids, count = operation.stacked_input(1), operation.unstacked_input(2)
    # TensorFlow counts the segments of all examples in a row: an identifier beyond the last
    # segment of its example would name one of the next.
    is_inside = tf.cast(ids, tf.int64) < tf.cast(count, tf.int64)
    operation.inputs[1] = pfor.wrap(tf.where(is_inside, ids, -tf.ones_like(ids)), True)
    return dict.get(pfor._pfor_converter_registry, operation.op_type)(operation)


_STATES = "states_of_one_example"


def mark_states(states):
    """The states of seed generators of one example, int64 [n, 2], marked for `vectorizing_by`.

    A draw of TensorFlow's stateless generators that follows from them alone is vectorized as one
    draw for all examples, by the key of the first. So the examples' bits are independent, and the
    place of an example says which are its own.
    """
    return tf.identity(states, name=_STATES)


def _follows_from_states(tensor):
    """Whether a tensor of one example is computed from marked states and constants alone."""
    waiting, seen, is_marked = [tensor.op], set(), False
    while waiting:
        operation = waiting.pop()
        if operation.name.rpartition("/")[2].startswith(_STATES):
            is_marked = True
        elif operation not in seen:
            if operation.type != "Const" and not operation.inputs:
                return False
            seen.add(operation)
            waiting.extend(t.op for t in operation.inputs)
    return is_marked


def _of_first(operation):
    """The key and the counter of one draw for all examples."""
    if not _follows_from_states(operation.op.inputs[0]):
        raise pfor.ConversionNotImplementedError("The seed depends on the example.")
    of_first = tf.raw_ops.StatelessRandomGetKeyCounter(seed=operation.stacked_input(0)[0])
    count = operation.pfor.loop_len_vector[0]
    return [pfor.wrap(tf.tile(t[tf.newaxis], [count, 1]), True) for t in of_first]


def _draw(operation):
    """One draw for all examples in place of a draw for one."""
    given = [operation.input(number) for number in range(operation.num_inputs)]
    if any(place not in (1, 2) and is_stacked for place, (_, is_stacked, _) in enumerate(given)):
        raise pfor.ConversionNotImplementedError("The shape depends on the example.")
    if not _follows_from_states(operation.op.inputs[1]):
        raise pfor.ConversionNotImplementedError("The seed depends on the example.")
    (shape, *_), (key, *_), (counter, *_), *others = given
    count = tf.cast(operation.pfor.loop_len_vector, shape.dtype)
    inputs = [tf.concat([count, shape], 0), key[0], counter[0], *(t for t, *_ in others)]
    outputs = operation.op.outputs
    made = pfor._create_op(
        operation.op_type, inputs, [t.dtype for t in outputs], operation.op.node_def.attr
    )
    return [pfor.wrap(t, True) for t in made.outputs]


_OWN = {
    "Einsum": _einsum,
    "Squeeze": _squeeze,
    "ZerosLike": _zeros_like,
    **dict.fromkeys(
        [f"UnsortedSegment{kind}" for kind in ("Max", "Min", "Prod", "Sum")], _segments
    ),
    "StatelessRandomGetKeyCounter": _of_first,
    **dict.fromkeys(
        (
            "StatelessRandomNormalV2",
            "StatelessRandomUniformIntV2",
            "StatelessRandomUniformV2",
            "StatelessTruncatedNormalV2",
        ),
        _draw,
    ),
}


@functools.cache
def _install_converters():
    pfor._pfor_converter_registry = _Converters(pfor._pfor_converter_registry)
    for loop in pfor.WhileOp, pfor.WhileV2:
        loop._process_cond_stacked = _same_rounds(loop._process_cond_stacked)
    pfor._stack_tensor_list_shape = _known_shape(pfor._stack_tensor_list_shape)


def _known_shape(original):
    @functools.wraps(original)
    def stack(shape, count):
        known = tf.get_static_value(shape)
        if known is not None and known.ndim and known.size and (known >= 0).all():
            # TensorFlow's forgets it, and a gradient then fails.
            return tf.concat([count, shape], axis=0)
        return original(shape, count)

    return stack


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
def optimizing_graphs_once():
    """Within it, in this thread, TensorFlow optimizes each graph that it runs once, not twice.

    The second round changes next to nothing, because the first has done it, and takes as long.
    """
    eager = context.context()
    before = eager.function_call_options
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    once = context.FunctionCallOptions(before.executor_type, config)
    eager.function_call_options = once
    try:
        yield
    finally:
        if eager.function_call_options is once:  # Else the user has set options of TensorFlow's.
            eager.function_call_options = before


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
    graph, graphs = operation.graph, []
    if is_function(graph, operation.type):
        graphs.append(("f", called_graph(graph, operation.type)))
    for name in _function_attributes(operation):
        attribute = operation.get_attr(name)
        for function in attribute if isinstance(attribute, list) else [attribute]:
            if function.name:
                graphs.append((name, called_graph(graph, function.name)))
    return graphs


_functions_of_types: dict[str, list[str]] = {}


def _function_attributes(operation):
    """List of the names of an operation's attributes that are functions: few types have any."""
    names = _functions_of_types.get(operation.type)
    if names is None:
        attributes = operation.op_def.attr
        names = [each.name for each in attributes if each.type in ("func", "list(func)")]
        _functions_of_types[operation.type] = names
    return names


def differentiated_by(gradient, function, *tensors):
    """Runs `function(*tensors)`, and gives every `tf.GradientTape` a gradient for it.

    As with `tf.custom_gradient`, but the graph has no operation for it.

    Args:
        gradient: Function of the gradients at the outputs, to a list of those at `tensors`.
        function: Function of tensors to a list of tensors.
        *tensors: Tensors.
    """
    with record.stop_recording():
        outputs = function(*tensors)
    record.record_operation("Given", outputs, list(tensors), gradient)
    return outputs


def sources_of(dataset):
    """Names of the classes of a `tf.data.Dataset` and of all data sets that it reads."""
    kinds = {type(dataset).__name__.removeprefix("_")}
    return kinds.union(*(sources_of(source) for source in inputs_of(dataset)))


def inputs_of(dataset):
    """List of the data sets that a `tf.data.Dataset` reads."""
    return dataset._inputs()


def call_cached_trace(function, kind, *tensors):
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
