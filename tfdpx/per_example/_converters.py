"""Types of operations that `tf.vectorized_map` vectorizes here, as far as the suite holds it right.

TensorFlow has a converter for each type, and some are wrong: the one of `PadV2` pads with zeros
whatever the value is, and the one of `Einsum` with an ellipsis, which so runs in a loop, meets the
fault of products on CPUs that `vectorize.py` describes.
`tests/tfdpx/per_example/converters_test.py` compares each type named here, and its gradient, with
the operation on each example alone. Any other type runs as it is, in a loop over the examples.
"""

HELD = frozenset(
    # Entry by entry.
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
    # What gives no tensor cannot run in a loop of its own.
    "Assert Print PrintV2".split()
)
