"""A `tf.vectorized_map` that uses only converters that our tests found to be right.

To vectorize a function, TensorFlow has a converter for each type of operation. Some converters are
wrong: for example, the converter of `PadV2` always pads with zeros. `SAFE_TO_VECTORIZE` lists the
tested types. `tests/tfdpx/per_example/converters_test.py` checks that their converters give the
same results and gradients as the operation on each example separately. An operation of any other
type is not converted, but runs in a loop over the examples.

With oneDNN, which is on by default, TensorFlow 2.16 to 2.21 have a bug: they multiply
`[n, 1, a, b]` with a common matrix `[1, 1, b, c]` wrongly if n is at least 5, and write beyond the
end of a buffer. Vectorization creates such a product if a function multiplies an example's
`[1, a, b]` by a layer's weights. To avoid the bug, the operands are first reshaped to have a single
batch axis.

XLA cannot compile a vectorized loop. For such a loop under XLA, an error is raised during tracing,
before any step.
"""

import tensorflow as tf

from tfdpx._keras import tensorflow_internals

_LOOPS = ("While", "StatelessWhile")
# Operations whose result has a shape that depends on the values of the inputs. The results of
# several examples cannot be stacked.
_ANY_LENGTH = frozenset(
    "DynamicPartition ListDiff NonMaxSuppressionV3 NonMaxSuppressionV4 NonMaxSuppressionV5 "
    "StringNGrams StringSplit StringSplitV2 UnicodeDecode UnicodeDecodeWithOffsets Unique "
    "UniqueV2 UniqueWithCounts UniqueWithCountsV2 Where".split()
)


def _is_of_the_user(record):
    """Returns whether to show a log message of TensorFlow to the user.

    Two kinds of messages are dropped. Outside of a graph, `tf.vectorized_map` makes a new function
    in each call, so TensorFlow warns of retracing. And if TensorFlow cannot vectorize a graph, it
    logs hundreds of lines, although tfdpx then raises an error or runs a loop instead.
    """
    message = record.getMessage()
    is_retracing = "retracing" in message and "<function pfor." in message
    is_failure = "while pfor was converting" in message or "\ncreated at:\n" in message
    return not (is_retracing or is_failure)


tf.get_logger().addFilter(_is_of_the_user)


class TakesBatch(ValueError):
    """Raised if a function of one example reads a tensor that was computed from the batch."""


def vectorized_map(
    function, elements, name="The function", jit_compile=False, loop=False, shared=()
):
    """Maps a function of one example over a batch, and checks that it reads no other example.

    Operations of the types in `SAFE_TO_VECTORIZE` are vectorized. Other operations run in a loop
    over the examples. If TensorFlow fails to vectorize the function, all of it runs in such a loop.

    Args:
        function: As in `tf.vectorized_map`. It may also read variables and constants.
        elements: Nest of tensors [n, ...].
        name: String that begins error messages, for example "The loss".
        jit_compile: Bool, whether XLA will compile the result. The argument is not needed while a
            graph for XLA is traced.
        loop: Bool, whether to run the whole function in a loop from the start.
        shared: List of further tensors that `function` may read.

    Returns:
        Nest of tensors [n, ...].

    Raises:
        TakesBatch: If `function` reads a tensor that was computed from the batch.
        ValueError: If `function` loops and XLA is to compile it.
    """
    under_xla = jit_compile or tensorflow_internals.is_under_xla()
    tensors, traces, argument_ids, names = tf.nest.flatten(elements), [], set(), []
    allowed, failures = list(shared), []

    def run_one(element):
        try:
            result = function(element)
        except Exception as error:
            failures.append(error)
            raise
        graph = tf.compat.v1.get_default_graph()
        if under_xla and _has_loop(graph):
            raise ValueError(
                f"{name} runs a loop (as recurrent layers do) under `jit_compile=True`, which "
                'Keras may also have chosen by "auto". XLA cannot compile such a loop for each '
                "example. Use `model.compile(..., jit_compile=False)`, or build a recurrent layer "
                "with `unroll=True`, which compiles slowly for long sequences."
            )
        for outer_tensor, _ in graph.captures:
            # Under XLA, the arguments of the map are captures too.
            if id(outer_tensor) not in argument_ids and _source(outer_tensor, allowed) is not None:
                names.append(outer_tensor.name)
        traces.append(True)
        if not loop and not _ANY_LENGTH.isdisjoint(
            _operation_types(filter(tf.is_tensor, tf.nest.flatten(result)))
        ):
            raise ValueError("The shapes of an example's tensors depend on its values.")
        return result

    def map_examples(*tensors):
        argument_ids.update(map(id, tensors))
        example_elements = tf.nest.pack_sequence_as(elements, tensors)
        # Without a name scope, TensorFlow mixes up the names of nested maps.
        with (
            tensorflow_internals.vectorizing_by(SAFE_TO_VECTORIZE, _multiply),
            tf.name_scope("map"),
        ):
            return tf.vectorized_map(run_one, example_elements, warn=False)

    specs = [tf.TensorSpec(t.shape, t.dtype) for t in tensors]
    try:
        # The map is traced into a separate graph. Its captures can be read, and it is dropped if
        # vectorization fails.
        traced_map = tf.function(
            _make_loop(run_one, elements) if loop else map_examples, autograph=False
        )
        traced_map = traced_map.get_concrete_function(*specs)
        if not names:
            return traced_map(*tensors)
    except Exception:
        if failures:  # Under XLA, TensorFlow replaces the error of the function by another one.
            raise failures[-1] from None
        if not traces or loop:
            raise
    if names:
        raise TakesBatch(
            f"{name} reads '{names[0]}', which was computed from other examples too, or was kept "
            "from elsewhere. Compute it from the inputs, and keep no tensor as an attribute."
        )
    return vectorized_map(function, elements, name, jit_compile, True, allowed)


def _make_loop(run_one, elements):
    """Returns a function that calls `run_one` on one example after the other, in a loop."""

    def map_examples(*tensors):
        specs = [tf.TensorSpec(t.shape[1:], t.dtype) for t in tensors]
        specs = tf.nest.pack_sequence_as(elements, specs)
        body = tf.function(run_one, autograph=False).get_concrete_function(specs)
        nest = body.structured_outputs

        def flat(rows):
            return tf.nest.flatten(body(*rows))

        signature = [tf.TensorSpec(t.shape, t.dtype) for t in tf.nest.flatten(nest)]
        results = tf.map_fn(flat, list(tensors), fn_output_signature=signature)
        return tf.nest.pack_sequence_as(nest, results)

    return map_examples


def _source(tensor, allowed):
    """Returns an argument of a traced function that `tensor` is computed from, or None.

    Arguments that are variables or tables do not count, and neither do the tensors in the list
    `allowed`.
    """
    visited, waiting = {id(t) for t in allowed}, [tensor]
    while waiting:
        tensor = waiting.pop()
        # A value that is known while a graph is traced is a constant in it.
        if not tf.is_symbolic_tensor(tensor) or tensor.dtype == tf.resource:
            continue
        if id(tensor) in visited:
            continue
        visited.add(id(tensor))
        if tensor.op.type == "Placeholder":
            outer = {id(inner): outer_tensor for outer_tensor, inner in tensor.graph.captures}.get(
                id(tensor)
            )
            if outer is None:
                return tensor
            waiting.append(outer)
        waiting.extend(tensor.op.inputs)
    return None


def _has_loop(graph):
    """Returns whether a graph, or a function that the graph calls, contains a loop."""
    definition = graph.as_graph_def()
    nodes = [definition.node, *(function.node_def for function in definition.library.function)]
    return any(node.op in _LOOPS for part in nodes for node in part)


def _operation_types(tensors):
    """Returns a set with the types of all operations that compute `tensors`.

    The set includes operations inside of functions and loops.
    """
    visited, waiting, types = set(), [t.op for t in tensors], set()
    while waiting:
        operation = waiting.pop()
        if operation in visited:
            continue
        visited.add(operation)
        waiting.extend(t.op for t in operation.inputs)
        types.add(operation.type)
        for attribute in operation.node_def.attr.values():
            for name in filter(None, [attribute.func.name, *(f.name for f in attribute.list.func)]):
                body = tensorflow_internals.called_graph(operation.graph, name)
                types.update(inner.type for inner in body.get_operations())
    return types


def _multiply(x, y, x_stacked, y_stacked, adjoint_a, adjoint_b):
    """Computes `BatchMatMulV2` for all examples. A stacked operand has one entry per example."""
    adjoint = {"adjoint_a": adjoint_a, "adjoint_b": adjoint_b}
    if x_stacked and y_stacked:
        return tf.matmul(x, y, **adjoint)
    matrix = y if x_stacked else x
    if matrix.shape.rank is None or any(size != 1 for size in matrix.shape[:-2]):
        batch = tf.broadcast_dynamic_shape(tf.shape(x)[:-2], tf.shape(y)[:-2])
        x, y = (tf.broadcast_to(t, tf.concat([batch, tf.shape(t)[-2:]], 0)) for t in (x, y))
        return tf.matmul(x, y, **adjoint)
    batch = tf.shape(x if x_stacked else y)[:-2]
    x, y = (tf.reshape(t, tf.concat([[-1], tf.shape(t)[-2:]], 0)) for t in (x, y))
    products = tf.matmul(x, y, **adjoint)
    return tf.reshape(products, tf.concat([batch, tf.shape(products)[-2:]], 0))


SAFE_TO_VECTORIZE = frozenset(
    # Element-wise.
    "Abs Acos Add AddN AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BitwiseAnd "
    "BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj "
    "Cos Cosh Digamma Div DivNoNan Elu EluGrad EnsureShape Equal Erf Erfc Erfinv Exp Expm1 Floor "
    "FloorDiv FloorMod Greater GreaterEqual Identity IdentityN Igamma IgammaGradA Igammac Imag Inv "
    "Invert IsFinite IsInf IsNan LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma Log Log1p "
    "LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike "
    "Pow Real RealDiv Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad RightShift Rint "
    "Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh "
    "Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad Square SquaredDifference "
    "StopGradient Sub Tan Tanh TanhGrad TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike "
    # Places and shapes.
    "BatchToSpaceND BroadcastTo ConcatV2 ConjugateTranspose DepthToSpace ExpandDims Fill Gather "
    "GatherNd GatherV2 LowerBound MatrixBandPart MatrixDiagPartV3 MatrixDiagV3 MatrixSetDiagV3 "
    "OneHot Pack Pad Rank Reshape ReverseV2 Roll Shape ShapeN Size Slice SpaceToBatchND "
    "SpaceToDepth Split SplitV Squeeze StridedSlice StridedSliceGrad TensorScatterUpdate Tile "
    "Transpose Unpack UpperBound "
    # Along axes.
    "All Any ArgMax ArgMin Cumprod Cumsum LogSoftmax Max Mean Min Prod Softmax "
    "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits Sum TopKV2 "
    "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum "
    # Products.
    "BatchMatMul BatchMatMulV2 BiasAdd BiasAddGrad Cholesky Cross Einsum FFT FFT2D IFFT IFFT2D "
    "IRFFT IRFFT2D LogMatrixDeterminant MatMul MatrixInverse MatrixSolve MatrixTriangularSolve "
    "RFFT RFFT2D "
    # Images.
    "AdjustContrastv2 AvgPool AvgPool3D AvgPool3DGrad AvgPoolGrad Conv2D Conv2DBackpropFilter "
    "Conv2DBackpropInput DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput MaxPool MaxPool3D MaxPool3DGrad MaxPoolGrad "
    # Calls, branches, loops and their lists.
    "If PartitionedCall StatefulPartitionedCall StatelessIf StatelessWhile TensorListElementShape "
    "TensorListFromTensor TensorListGetItem TensorListLength TensorListPopBack TensorListPushBack "
    "TensorListReserve TensorListSetItem TensorListStack While "
    # An operation without an output cannot run in a loop.
    "Assert Print PrintV2".split()
)
