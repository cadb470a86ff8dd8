"""Operations that end a run for some values of an example, and so tell that it was drawn.

An inverse of a singular matrix, a text that is no number, an index beyond its table: TensorFlow
raises an error, at least on CPUs. Some are made safe as they are traced
(`tfdpx.per_example.invalid_values`). Here a graph is searched for the others.

Found is every operation that depends on an example and is neither made safe nor of a type of which
an experiment on CPUs found no value that raises: NaN, infinities, zeros, integers of all sizes and
signs, odd texts. Of arguments that decide a shape, an axis or a place, every type is found: for
most of them some values raise, and others make tensors whose shapes depend on the example.
"""

from tfdpx._keras import tensorflow_internals
from tfdpx.independence.hidden_state import start_of
from tfdpx.independence.rules.texts import SPLIT, is_of_words, texts_of
from tfdpx.per_example import invalid_values

# Types that raise for no value of an argument that is not among `_PLACES`.
_HARMLESS = frozenset(
    "Abs Acos Acosh Add AddN AddV2 AdjustContrastv2 AdjustHue AdjustSaturation All Angle Any "
    "ApproxTopK ApproximateEqual ArgMax ArgMin AsString Asin Asinh AssignAddVariableOp "
    "AssignSubVariableOp AssignVariableOp Atan Atan2 Atanh AudioSpectrogram AvgPool AvgPool3D "
    "AvgPool3DGrad AvgPoolGrad BatchMatMul BatchMatMulV2 BatchMatMulV3 BatchToSpaceND BesselI0 "
    "BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 "
    "BesselY1 Betainc BiasAdd BiasAddGrad Bitcast BitwiseAnd BitwiseOr BitwiseXor BroadcastTo "
    "Bucketize Cast Ceil Cholesky CholeskyGrad ClipByValue Complex ComplexAbs ConcatV2 Conj "
    "ConjugateTranspose Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D "
    "Conv3DBackpropFilterV2 Conv3DBackpropInputV2 Cos Cosh Cross Cumprod Cumsum "
    "CumulativeLogsumexp Dawsn DepthToSpace DepthwiseConv2dNative "
    "DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput Diag DiagPart Digamma "
    "Dilation2D Dilation2DBackpropFilter Dilation2DBackpropInput Div DivNoNan Einsum Elu EluGrad "
    "EmptyTensorList EncodeBase64 EnsureShape Equal Erf Erfc Erfinv EuclideanNorm Exp ExpandDims "
    "Expint Expm1 ExtractImagePatches ExtractVolumePatches FFT FFT2D FFT3D FakeQuantWithMinMaxArgs "
    "FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsGradient "
    "FakeQuantWithMinMaxVarsPerChannel FakeQuantWithMinMaxVarsPerChannelGradient Fill Floor "
    "FloorDiv FloorMod FresnelCos FresnelSin FusedBatchNorm FusedBatchNormGradV3 FusedBatchNormV2 "
    "FusedBatchNormV3 Gather GatherNd GatherV2 Greater GreaterEqual GuaranteeConst HSVToRGB IFFT "
    "IFFT2D IFFT3D IRFFT IRFFT2D IRFFT3D Identity IdentityN Igamma IgammaGradA Igammac Imag "
    "ImageProjectiveTransformV3 InTopK InTopKV2 Inv InvGrad Invert IsFinite IsInf IsNan "
    "IsotonicRegression L2Loss LRN LRNGrad LeakyRelu LeakyReluGrad LeftShift Less LessEqual Lgamma "
    "Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr LookupTableFindV2 LowerBound MatMul "
    "MatrixBandPart MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 "
    "MatrixDiagV3 MatrixSetDiag MatrixSetDiagV2 MatrixSetDiagV3 MatrixTriangularSolve Max MaxPool "
    "MaxPool3D MaxPool3DGrad MaxPool3DGradGrad MaxPoolGrad MaxPoolGradGrad MaxPoolGradGradV2 "
    "MaxPoolGradV2 MaxPoolV2 MaxPoolWithArgmax Maximum Mean Min Minimum MirrorPad MirrorPadGrad "
    "Mod Mul MulNoNan Multinomial Ndtri Neg NextAfter NotEqual OneHot Pack Pad PadV2 "
    "PlaceholderWithDefault Polygamma PopulationCount Pow PreventGradient PrintV2 Prod Qr "
    "QuantizeAndDequantizeV2 QuantizeAndDequantizeV4 RFFT RFFT2D RFFT3D RGBToHSV "
    "RandomStandardNormal RandomUniform RandomUniformInt Range Real RealDiv Reciprocal "
    "ReciprocalGrad ReduceJoin Relu Relu6 Relu6Grad ReluGrad Reshape ResizeArea ResizeBicubic "
    "ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad "
    "ResourceGather ReverseSequence ReverseV2 RightShift Rint Roll Round Rsqrt RsqrtGrad "
    "ScaleAndTranslateGrad ScatterNd Select SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin "
    "Sinh Slice Snapshot Softmax SoftmaxCrossEntropyWithLogits Softplus SoftplusGrad Softsign "
    "SoftsignGrad SpaceToBatchND SpaceToDepth Spence Split SplitV Sqrt SqrtGrad Square "
    "SquaredDifference Squeeze StatelessMultinomial StatelessRandomNormal StatelessRandomNormalV2 "
    "StatelessRandomUniform StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 "
    "StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformV2 "
    "StatelessTruncatedNormal StatelessTruncatedNormalV2 StaticRegexFullMatch StaticRegexReplace "
    "StopGradient StridedSlice StridedSliceGrad StringFormat StringJoin StringLength StringLower "
    "StringStrip StringToHashBucketFast StringToHashBucketStrong StringUpper Sub Substr Sum Svd "
    "Tan Tanh TanhGrad TensorListFromTensor TensorListGetItem TensorListPopBack TensorListPushBack "
    "TensorListReserve TensorListSetItem TensorListStack TensorScatterAdd TensorScatterUpdate Tile "
    "TopK TopKV2 Transpose TridiagonalMatMul TridiagonalSolve TruncateDiv TruncateMod "
    "TruncatedNormal UnicodeScript Unpack UnsortedSegmentSum UpperBound "
    "Xdivy Xlog1py Xlogy Zeta".split()
)
_PLACES = frozenset(
    "axis begin block_shape concat_dim crops delta depth dim dimension dims element_shape end "
    "fft_length filter_sizes index indices input_sizes k ksize len limit max_num_elements maxval "
    "minval multiples num_cols num_elements num_lower num_rows num_samples num_segments num_upper "
    "orig_input_shape output_shape paddings perm pos reduction_indices segment_ids seq_lengths "
    "shape size size_splits split_dim start strides".split()
)
# Their second argument must not be zero, or in `Pow` not negative, if it is of whole numbers.
_DIVISIONS = frozenset("Div FloorDiv FloorMod Mod Pow TruncateDiv TruncateMod".split())
# Tensors of these are as long as the values of examples make them, and they raise for none.
_VARYING, _OF_WORDS = frozenset(["Unique", "UniqueV2", "Where"]), frozenset([SPLIT])
# No value of an example changes what they give.
_OF_SHAPES = frozenset(
    "BroadcastGradientArgs OnesLike Rank Shape ShapeN Size TensorListElementShape TensorListLength "
    "ZerosLike".split()
)
# Indices that are in range stay so by these, and may be the second argument of the others.
_REARRANGING = frozenset("Cast ConcatV2 Identity Reshape".split())
_BY_INDICES = frozenset(["GatherV2", "UnsortedSegmentSum"])
_LOOPS = frozenset(["While", "StatelessWhile"])
_INSTEAD = {
    "MatrixInverse": "; use `tf.linalg.pinv`",
    "MatrixSolve": "; use `tf.linalg.pinv`",
    "SegmentSum": "; use `tf.math.unsorted_segment_sum`",
    "Slice": "; use `tf.gather`",
    SPLIT: "; map the layer over the data set",
    "StridedSlice": "; use `tf.gather`",
}


def problems(graph, examples, alone=False, varying=False):
    """Texts of the operations of a graph that some values of an example make raise an error.

    Args:
        graph: `tf.Graph` of a function.
        examples: Tensors of `graph` that hold examples; all others are taken to be free of them.
        alone: Whether each example is computed alone: then all must have the same shapes.
        varying: Whether shapes may depend on examples.

    Returns:
        List of str.
    """
    problems, harmless = {}, _HARMLESS
    if not alone:
        harmless |= _OF_WORDS
    if varying:
        harmless |= _VARYING
    _follow(graph, examples, graph.outputs, "", problems, harmless)
    return list(problems)


def _follow(graph, examples, targets, path, found, harmless, chosen=False):
    """Which of `targets` depend on examples, a list of bool.

    Args:
        graph: As of `problems`, like what follows.
        examples: Iterable of tensors.
        targets: List of tensors.
        path: Str, the operations that called this graph.
        found: Dict, whose keys become the texts.
        harmless: Set of types.
        chosen: Whether an example decides whether or how often the graph runs.
    """
    depends, in_range, words = {id(t) for t in examples}, set(), set()
    for operation in _ordered([*(t.op for t in targets), *graph.control_outputs]):
        flags = [id(t) in depends for t in operation.inputs]
        if _original(operation):  # Which is looked at in its place.
            made = [any(flags)] * len(operation.outputs)
        elif start_of(operation) is not None:
            made = _call(operation, flags, path, found, harmless, chosen)
        else:
            made = [any(flags) and operation.type not in _OF_SHAPES] * len(operation.outputs)
            if invalid_values.IN_RANGE in operation.name or (
                operation.type in _REARRANGING and id(operation.inputs[0]) in in_range
            ):
                in_range.update(map(id, operation.outputs))
            if operation.type in _BY_INDICES and id(operation.inputs[1]) in in_range:
                flags[1] = False
            why = _why(operation, flags, harmless, chosen)
            of_words = any(id(t) in words for t in operation.inputs)
            if of_words or operation.type == SPLIT and SPLIT in harmless:
                why = None if is_of_words(operation) else "how many words it gets, examples decide"
                words.update(map(id, operation.outputs if texts_of(operation) is None else []))
            if why:
                name = f"operation '{path}{operation.name}' (of type {operation.type})"
                found[f"{name}: {why}{_INSTEAD.get(operation.type, '')}"] = None
        depends.update(id(t) for t, flag in zip(operation.outputs, made, strict=True) if flag)
    return [id(t) in depends for t in targets]


def _ordered(operations):
    """`operations` and what they need, each after its own needs."""
    order, seen, stack = [], set(), [(operation, False) for operation in operations]
    while stack:
        operation, ready = stack.pop()
        if ready:
            order.append(operation)
        elif operation.name not in seen:
            seen.add(operation.name)
            stack.append((operation, True))
            before = [*operation.control_inputs, *(t.op for t in operation.inputs)]
            stack.extend((other, False) for other in [*before, *_original(operation)])
    return order


def _original(operation):
    """The operation that vectorization made this one of, a list of at most one."""
    name, vectorized, _ = operation.name.partition("/pfor/")
    try:
        return [operation.graph.get_operation_by_name(name)] if vectorized else []
    except KeyError:
        return []


def _call(operation, flags, path, found, harmless, chosen):
    """Which outputs of a function, a branch or a loop depend on examples."""
    called, name = tensorflow_internals.called(operation), f"{path}{operation.name}/"
    start = start_of(operation)

    def follow(body, flags, chosen, found):
        inputs = [t for t, flag in zip(body.inputs, flags, strict=True) if flag]
        return _follow(body, inputs, body.outputs, name, found, harmless, chosen)

    if operation.type not in _LOOPS:
        chosen |= any(flags[:start])
        made = [follow(body, flags[start:], chosen, found) for _, body in called]
        return [any(flags[:start]) or any(each) for each in zip(*made, strict=True)]
    bodies, before = dict(called), None
    body = bodies["body"]
    while before != flags:
        before = flags
        [decided] = follow(bodies["cond"], flags, chosen, {})
        after = follow(body, flags, chosen, {})
        kept = [out is given for out, given in zip(body.outputs, body.inputs, strict=True)]
        flags = [
            old or new or (decided and not same)
            for old, new, same in zip(flags, after, kept, strict=True)
        ]
    for each in bodies.values():
        follow(each, flags, chosen or decided, found)
    return flags


def _why(operation, flags, harmless, chosen):
    """What may raise in an operation, a str, of whose inputs `flags` says which depend; or None."""
    if chosen and operation.type == "Assert":
        return "an example decides whether it runs"
    if not any(flags) or operation.type in _OF_SHAPES or invalid_values.SCOPE in operation.name:
        return None
    if operation.type not in harmless:
        return "it is not known to take every value, or to give the same shape for all"
    if operation.type in _DIVISIONS and flags[1] and operation.inputs[1].dtype.is_integer:
        return "not every whole number can be its second argument"
    names = [name for name, flag in zip(_arguments(operation), flags, strict=True) if flag]
    names = [name for name in names if name in _PLACES]
    return f"its argument `{names[0]}` depends on an example" if names else None


def _arguments(operation):
    """The name of the argument that each input of an operation belongs to, a list of str."""
    names = []
    for argument in operation.op_def.input_arg:
        count = 1
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        # Where its indices are out of range, a one-hot vector is zero.
        name = "" if operation.type == "OneHot" and argument.name == "indices" else argument.name
        names += [name] * count
    return names
