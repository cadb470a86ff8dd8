"""Private names of TensorFlow, which no other file uses."""

import contextlib
import copy
import functools
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context, record
from tensorflow.python.eager.record import VariableWatcher as VariableWatcher
from tensorflow.python.framework import function_def_to_graph, ops
from tensorflow.python.ops import (
    gen_random_ops,
    gen_stateful_random_ops,
)
from tensorflow.python.ops.parallel_for import control_flow_ops, pfor

from tfdpx._keras import step_context
from tfdpx._keras.step_context import active

# Numbers in a shared constant.
_LARGEST_SHARED = 16


def weakly(method):
    """Returns a function that calls a bound method, but does not keep its object alive.

    Before version 2.22, TensorFlow never frees a Python function that a graph calls, for example by
    `tf.numpy_function`, nor the objects that the function refers to. The graph of a data set may
    call the returned function instead. The object must then be an attribute of the data set, which
    keeps it alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments):
        bound_method = reference()
        if bound_method is None:
            raise ValueError(
                "The data set of these batches is gone. Make it outside of any tf.function and of "
                "other data sets, and keep it in a variable while it is iterated over."
            )
        return bound_method(*arguments)

    return call


def vectorizing_by(held, multiply):
    """Context manager in which `tf.vectorized_map` vectorizes only some types of operations.

    All other operations run in a loop over examples. Other threads are not affected.

    Args:
        held: Set of str, the types of the operations that TensorFlow's converters vectorize as
            usual.
        multiply: Function `multiply(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b)` that
            converts operations of the type `BatchMatMulV2`. `x`, `y`, `adjoint_a` and `adjoint_b`
            are as for `tf.matmul`. `x_stacked` and `y_stacked` tell whether `x` and `y` have a
            leading axis for the examples. The returned products have this axis.
    """

    def products(operation):
        operation.expanddim_inputs_for_broadcast()
        (x, x_stacked, _), (y, y_stacked, _) = operation.input(0), operation.input(1)
        adjoint_a, adjoint_b = operation.get_attr("adj_x"), operation.get_attr("adj_y")
        return pfor.wrap(multiply(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b), True)

    converters = {"BatchMatMulV2": products, **_CONVERTERS}
    return step_context.setting("converters", (held, converters))


class _Converters(dict):
    """Dict of converters by type of operation. Other operations run in a loop over examples."""

    def get(self, key, default=None):
        held, converters = active.converters or (self, {})
        return (
            converters.get(key, super().get(key, default))
            if key in held or key in converters
            else default
        )


def _einsum(operation):
    if b"..." in operation.get_attr("equation"):
        raise pfor.ConversionNotImplementedError("Such products are wrong on CPUs.")
    return dict.get(pfor._pfor_converter_registry, "Einsum")(operation)


def _slice(operation):
    sizes = tf.get_static_value(operation.op.inputs[2])
    if operation.input(1)[1] and (sizes is None or (sizes < 0).any()):
        # TensorFlow's converter would take the longest slice of all examples for each.
        raise pfor.ConversionNotImplementedError("The length of a slice depends on the example.")
    return dict.get(pfor._pfor_converter_registry, "Slice")(operation)


def _softmax(operation):
    # oneDNN, on processors where TensorFlow uses it, takes five axes at most.
    logits = operation.stacked_input(0)
    rows = tf.reshape(logits, [-1, tf.shape(logits)[-1]])
    shares = getattr(tf.raw_ops, operation.op_type)(logits=rows)
    return pfor.wrap(tf.ensure_shape(tf.reshape(shares, tf.shape(logits)), logits.shape), True)


def _squeeze(operation):
    axes = operation.get_attr("squeeze_dims")
    if not axes:
        # TensorFlow's converter would squeeze the axis of the examples if there is only one.
        shape = operation.op.inputs[0].shape
        if not shape.is_fully_defined():
            raise pfor.ConversionNotImplementedError("Which axes have length 1 is not known.")
        axes = [axis for axis, length in enumerate(shape) if length == 1]
    axes = [axis + 1 if axis >= 0 else axis for axis in axes]
    tensor = operation.stacked_input(0)
    return pfor.wrap(tf.squeeze(tensor, axes) if axes else tf.identity(tensor), True)


def _zeros_like(operation):
    tensor = operation.stacked_input(0)
    if tensor.dtype == tf.variant:  # A list; its entries have the axis of the examples.
        zeros = tf.raw_ops.ZerosLike(x=pfor._untile_variant(tensor))
        return pfor.wrap(pfor._tile_variant(zeros, operation), True)
    return dict.get(pfor._pfor_converter_registry, "ZerosLike")(operation)


def _segments(operation):
    """Converts an operation such as `UnsortedSegmentSum`, and keeps the examples separate."""
    operation.stack_inputs([0, 1])
    ids, count = operation.stacked_input(1), operation.unstacked_input(2)
    # TensorFlow numbers the segments of all examples in a row, so an identifier beyond the last
    # segment of its example would name a segment of the next.
    is_inside = tf.cast(ids, tf.int64) < tf.cast(count, tf.int64)
    operation.inputs[1] = pfor.wrap(tf.where(is_inside, ids, -tf.ones_like(ids)), True)
    return dict.get(pfor._pfor_converter_registry, operation.op_type)(operation)


_STATES = "states_of_one_example"


def mark_states(states):
    """Marks the states of seed generators of one example, int64 [n, 2], for `vectorizing_by`.

    If a draw of TensorFlow's stateless generators depends only on marked states, it is vectorized
    as one draw for all examples, with the key of the first example. So the bits of the examples are
    independent, and an example's place decides which bits it gets.
    """
    return tf.identity(states, name=_STATES)


def _follows_from_states(tensor):
    """Returns whether a tensor of one example is computed from marked states and constants."""
    waiting, visited, is_marked = [tensor.op], set(), False
    while waiting:
        operation = waiting.pop()
        if operation.name.rpartition("/")[2].startswith(_STATES):
            is_marked = True
        elif operation not in visited:
            if operation.type != "Const" and not operation.inputs:
                return False
            visited.add(operation)
            waiting.extend(t.op for t in operation.inputs)
    return is_marked


_DRAWS = (
    "StatelessRandomNormalV2",
    "StatelessRandomUniformFullIntV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformV2",
    "StatelessTruncatedNormalV2",
)


def _of_first(operation):
    """Returns the key and the counter of the first example, repeated for all examples."""
    users = {user.type for output in operation.op.outputs for user in output.consumers()}
    if not users <= set(_DRAWS) or not _follows_from_states(operation.op.inputs[0]):
        raise pfor.ConversionNotImplementedError("Each example needs a key of its own.")
    of_first = tf.raw_ops.StatelessRandomGetKeyCounter(seed=operation.stacked_input(0)[0])
    count = operation.pfor.loop_len_vector[0]
    return [pfor.wrap(tf.tile(t[tf.newaxis], [count, 1]), True) for t in of_first]


def _draw(operation):
    """Converts a draw for one example into one draw for all examples."""
    operands = [operation.input(number) for number in range(operation.num_inputs)]
    if any(place not in (1, 2) and is_stacked for place, (_, is_stacked, _) in enumerate(operands)):
        raise pfor.ConversionNotImplementedError("The shape depends on the example.")
    if not _follows_from_states(operation.op.inputs[1]):
        raise pfor.ConversionNotImplementedError("The seed depends on the example.")
    (shape, *_), (key, *_), (counter, *_), *more = operands
    count = tf.cast(operation.pfor.loop_len_vector, shape.dtype)
    inputs = [tf.concat([count, shape], 0), key[0], counter[0], *(t for t, *_ in more)]
    outputs = operation.op.outputs
    operation_of_all = pfor._create_op(
        operation.op_type, inputs, [t.dtype for t in outputs], operation.op.node_def.attr
    )
    return [pfor.wrap(t, True) for t in operation_of_all.outputs]


_CONVERTERS = {
    "Einsum": _einsum,
    **dict.fromkeys(("LogSoftmax", "Softmax"), _softmax),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "ZerosLike": _zeros_like,
    **dict.fromkeys(
        [f"UnsortedSegment{kind}" for kind in ("Max", "Min", "Prod", "Sum")], _segments
    ),
    "StatelessRandomGetKeyCounter": _of_first,
    **dict.fromkeys(_DRAWS, _draw),
}


def _known_shape(original):
    def stack(shape, count):
        static_shape = tf.get_static_value(shape)
        if (
            active.converters
            and static_shape is not None
            and static_shape.ndim
            and static_shape.size
            and (static_shape >= 0).all()
        ):
            # TensorFlow's function loses the shape, and a gradient then fails.
            return tf.concat([count, shape], axis=0)
        return original(shape, count)

    return stack


def _same_rounds(original):
    def process(*args, **kwargs):
        if active.converters:
            # TensorFlow's gradient of such a loop fails.
            raise ValueError("Each example decides how often a loop runs.")
        return original(*args, **kwargs)

    return process


def stateful_draws_from(next_key):
    """Context manager in which TensorFlow's stateful random draws use keys instead of a state.

    The context covers `tf.random.uniform`, `normal` and `truncated_normal`, and the methods of a
    `tf.random.Generator`, without changing its state. Other threads are not affected.

    Args:
        next_key: Function without arguments that returns a key, an int64 tensor [2], different on
            each call.
    """
    return step_context.setting("next_key", next_key)


def _uniform(shape, dtype, **_):
    return tf.random.stateless_uniform(shape, active.next_key(), dtype=dtype)


def _integers(shape, minval, maxval, **_):
    key = active.next_key()
    return tf.random.stateless_uniform(shape, key, minval, maxval, dtype=minval.dtype)


def _normal(shape, dtype, **_):
    return tf.random.stateless_normal(shape, active.next_key(), dtype=dtype)


def _truncated(shape, dtype, **_):
    return tf.random.stateless_truncated_normal(shape, active.next_key(), dtype=dtype)


def _counter_and_key(*_, **__):
    return tf.random.stateless_uniform([3], active.next_key(), None, None, tf.int64)


def _redirected(keyed, original):
    def draw(*args, **kwargs):
        return (original if active.next_key is None else keyed)(*args, **kwargs)

    return draw


def sharing_constants():
    """Context manager in which a graph holds each small constant of integers only once.

    Otherwise, every shape, axis and permutation is a node, which takes time to trace and to run.
    Other threads are not affected. Floats are not shared: they may be differentiated.
    """
    return step_context.setting("constants", {})


def _shared(original):
    def create(value, dtype, shape, *args, **kwargs):
        if active.constants is None or shape is not None or not _holds_few_integers(value, dtype):
            return original(value, dtype, shape, *args, **kwargs)
        array = np.asarray(value)
        kind = array.dtype if value is array else None
        key = tf.compat.v1.get_default_graph(), dtype, kind, array.shape, array.tobytes()
        if key not in active.constants:
            tensor = original(value, dtype, shape, *args, **kwargs)
            if tensor.op.control_inputs:
                return tensor
            active.constants[key] = tensor
        # Keras sets attributes of tensors. They must not reach other uses of the constant.
        return copy.copy(active.constants[key])

    return create


def _holds_few_integers(value, dtype):
    if dtype is not None and not tf.as_dtype(dtype).is_integer:
        return False
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "i" and value.size <= _LARGEST_SHARED
    numbers = value if type(value) in (list, tuple) else [value]
    return 0 < len(numbers) <= _LARGEST_SHARED and all(type(number) is int for number in numbers)


# Objects of TensorFlow that `hook` replaces: an owner, a name in it, and a function from the
# original object to its replacement. They change something only within `vectorizing_by`,
# `stateful_draws_from` and `sharing_constants`.
REPLACED = (
    (ops, "_create_graph_constant", _shared),
    (pfor, "_pfor_converter_registry", _Converters),
    (pfor, "_stack_tensor_list_shape", _known_shape),
    *((loop, "_process_cond_stacked", _same_rounds) for loop in (pfor.WhileOp, pfor.WhileV2)),
    *(
        (module, name, functools.partial(_redirected, keyed))
        for module, name, keyed in (
            (gen_random_ops, "random_uniform", _uniform),
            (gen_random_ops, "random_uniform_int", _integers),
            (gen_random_ops, "random_standard_normal", _normal),
            (gen_random_ops, "truncated_normal", _truncated),
            (gen_stateful_random_ops, "rng_read_and_skip", _counter_and_key),
        )
    ),
)


# Passes of TensorFlow's graph optimizer that gain nothing here on CPUs.
_WITHOUT_GAIN = (
    "arithmetic_optimization",
    "common_subgraph_elimination",
    "implementation_selector",
    "layout_optimizer",
    "loop_optimization",
    "pin_to_host_optimization",
    "remapping",
    "scoped_allocator_optimization",
    "shape_optimization",
)


@contextlib.contextmanager
def sparing_graph_optimizer():
    """Context manager in which TensorFlow optimizes each graph of this thread once, not twice.

    A second round takes as long as the first but changes next to nothing. On CPUs, most passes of
    the optimizer gain nothing either, so only constants, calls and unused nodes are optimized. On
    GPUs all passes stay, for example the one that changes the layout of images.
    """
    eager = context.context()
    before = eager.function_call_options
    config = config_pb2.ConfigProto.FromString(before.config_proto_serialized)
    rewriting = config.graph_options.rewrite_options
    rewriting.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    if not tf.config.list_logical_devices("GPU"):
        rewriting.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
        for name in _WITHOUT_GAIN:
            setattr(rewriting, name, rewriter_config_pb2.RewriterConfig.OFF)
    sparing = context.FunctionCallOptions(before.executor_type, config)
    eager.function_call_options = sparing
    try:
        yield
    finally:
        if eager.function_call_options is sparing:  # Otherwise the user has set options.
            eager.function_call_options = before


def is_under_xla():
    """Returns whether the current trace is for XLA to compile."""
    return control_flow_ops._is_under_xla_context()


def is_for_xla(model):
    """Returns whether XLA compiles the step of a `keras.Model`. On a TPU, it always does."""
    return model.jit_compile or is_under_xla() or bool(tf.config.list_logical_devices("TPU"))


def is_function(graph, name):
    """Returns whether an operation's type is the name of a function in `graph`.

    Older versions of TensorFlow call functions in this way.
    """
    return graph._is_function(name)


def called_graph(graph, name):
    """Returns the graph of the function `name` that operations of `graph` call."""
    function, place = None, graph
    while function is None:  # An operation in a loop calls functions of an outer graph.
        function, place = place._get_function(name), place.outer_graph
    if not hasattr(function, "graph"):  # TensorFlow itself made it, in an older way.
        with graph.as_default():
            definition = function.cached_definition
            return function_def_to_graph.function_def_to_graph(
                definition, include_library_functions=True
            )
    return function.graph


def called(operation):
    """Returns a list of pairs (attribute, graph), one for each function that an operation calls."""
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
    """Returns the names of those attributes of an operation that are functions."""
    names = _functions_of_types.get(operation.type)
    if names is None:
        attributes = operation.op_def.attr
        names = [a.name for a in attributes if a.type in ("func", "list(func)")]
        _functions_of_types[operation.type] = names
    return names


def differentiated_by(gradient, function, *tensors):
    """Runs `function(*tensors)`, and registers a gradient for it with every `tf.GradientTape`.

    This has the effect of `tf.custom_gradient`, but adds no operation to the graph.

    Args:
        gradient: Function that takes the gradients with respect to the outputs, and returns a list
            of the gradients with respect to `tensors`.
        function: Function that takes `tensors` and returns a list of tensors.
        *tensors: Tensors.
    """
    with record.stop_recording():
        outputs = function(*tensors)
    record.record_operation("Given", outputs, list(tensors), gradient)
    return outputs


def is_taping():
    """Returns whether a `tf.GradientTape` or `tf.autodiff.ForwardAccumulator` is recording."""
    return record.could_possibly_record()


def repeats_examples(dataset):
    """Returns whether a `tf.data.Dataset`, or one that it reads, was made by `repeat`.

    A repeated constant that is zipped with examples does not count, because it does not repeat the
    examples.
    """
    sources = inputs_of(dataset)
    if type(dataset).__name__.endswith("ZipDataset"):
        sources = [source for source in sources if not _is_constant(source)] or sources
    return _is_repeat(dataset) or any(map(repeats_examples, sources))


def _is_repeat(dataset):
    return type(dataset).__name__.endswith("RepeatDataset")


def _is_constant(dataset):
    return _is_repeat(dataset) and inputs_of(dataset)[0].cardinality() == 1


def inputs_of(dataset):
    """Returns a list of the data sets that a `tf.data.Dataset` reads."""
    return dataset._inputs()


def padding_values(data):
    """Returns a list of the values with which a data set pads batches; [] if they are unknown."""
    if not isinstance(data, tf.data.Dataset):
        return []
    if hasattr(data, "_padding_values"):
        return tf.nest.flatten(data._padding_values)
    return next(filter(None, map(padding_values, inputs_of(data))), [])


def call_cached_trace(function, kind, *tensors):
    """Calls `function(*kind, *tensors)` as a graph that is traced once for each signature.

    Args:
        function: Python function of `kind` and `tensors` that captures no tensor or variable.
        kind: Tuple of hashable values.
        *tensors: Tensors; the signature is their static shapes and dtypes.

    Returns:
        The result of `function`, a nest of tensors.
    """
    specs = (tf.TensorSpec(t.shape, t.dtype) for t in tensors)
    return _traced(function, kind, *specs)(*tensors)


@functools.lru_cache(maxsize=512)
def _traced(function, kind, *specs):
    with tf.init_scope():  # Other graphs than the current one may call it too.
        traced = tf.function(lambda *tensors: function(*kind, *tensors), autograph=False)
        return traced.get_concrete_function(*specs)
