"""Operations that treat each entry by itself, with the broadcasting of NumPy."""

from tfdpx.independence._values import (
    BatchSum,
    Fixed,
    NotProvable,
    PerExample,
    Sized,
    rank,
    require_same_for_rows,
    same_layout,
)
from tfdpx.independence.lengths import ONE
from tfdpx.independence.registry import of_rows, of_totals, whatever

_UNARY = (
    "Abs Acos Acosh Angle AsString Asin Asinh Atan Atanh BesselI0e BesselI1e Bitcast Bucketize "
    "Cast Ceil CheckNumerics ComplexAbs Conj Cos Cosh DecodeBase64 Digamma Elu EncodeBase64 Erf "
    "Erfc Erfinv Exp Expm1 Floor Gelu Imag Inv Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log "
    "Log1p LogicalNot Mish Ndtri Neg OnesLike PreventGradient Real Reciprocal Relu Relu6 Rint "
    "Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square StaticRegexFullMatch "
    "StaticRegexReplace StopGradient StringLength StringLower StringStrip StringToHashBucketFast "
    "StringToHashBucketStrong StringToNumber StringUpper Tan Tanh ZerosLike"
)
_BINARY = (
    "Add AddV2 ApproximateEqual Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan "
    "EluGrad Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac InvGrad LeakyReluGrad "
    "LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan NextAfter "
    "NotEqual Pow RealDiv ReciprocalGrad Relu6Grad ReluGrad RightShift RsqrtGrad SeluGrad "
    "SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub TanhGrad TruncateDiv "
    "TruncateMod Xdivy Xlog1py Xlogy Zeta"
)
_MORE = "AddN Betainc ClipByValue SelectV2 FakeQuantWithMinMaxVars FakeQuantWithMinMaxArgs"


@of_rows(f"{_UNARY} {_BINARY} {_MORE}")
def elementwise(site, *inputs):
    """Entries of row i meet those of row i, or what all rows share."""
    if site.operation.type == "Bitcast" and len(site.static() or ()) != rank(inputs[0]):
        raise NotProvable("it changes the number of axes")
    rows = [value for value in inputs if isinstance(value, PerExample)]
    length = max(rank(value) for value in inputs)
    first = rows[0]
    # Axes are lined up at the last one.
    place = len(first.shape) - first.axis
    if any(len(other.shape) - other.axis != place for other in rows):
        raise NotProvable("two tensors have their rows on different axes")
    same_layout(*rows)
    for value in inputs:
        if not isinstance(value, PerExample):
            require_same_for_rows(value, rank(value) - place, first)
    return site.rows(first, length - place, _broadcast(inputs, length))


def _broadcast(inputs, length):
    """Lengths of the axes of the output, a list of `Length` or None."""
    shapes = [(ONE,) * (length - len(v.shape)) + v.shape for v in inputs]
    made = []
    for lengths in zip(*shapes, strict=True):
        longer = {one for one in lengths if one != ONE}
        made.append(longer.pop() if len(longer) == 1 else None if longer else ONE)
    return made


@of_rows("Select")
def select(site, condition, *branches):
    """As `SelectV2`, but that a vector of conditions would choose whole slices."""
    if any(rank(branch) != rank(condition) for branch in branches):
        raise NotProvable("its condition has another rank")
    return elementwise(site, condition, *branches)


@whatever("Identity Snapshot EnsureShape PlaceholderWithDefault")
def same(site, value, *_):
    """The value itself."""
    return value


@whatever("IdentityN")
def same_of_several(site, *inputs):
    """The values themselves."""
    return list(inputs)


@of_totals("Add AddV2 Sub AddN Neg Cast StopGradient")
def linear(site, *inputs):
    """Sums of sums over the rows are such, and so are their multiples."""
    if site.operation.type == "Cast" and not site.operation.outputs[0].dtype.is_floating:
        raise NotProvable("it rounds a sum over the examples")
    if any(isinstance(value, PerExample) for value in inputs):
        raise NotProvable("it gives rows a sum over the examples")
    return BatchSum(site.shape())


@of_totals("Mul RealDiv Div DivNoNan")
def multiples(site, first, second):
    """A sum over the rows times what no example changes."""
    factors = [first, second]
    if site.operation.type == "Mul" and isinstance(first, (Fixed, Sized)):
        factors.reverse()
    if not isinstance(factors[0], BatchSum) or not isinstance(factors[1], (Fixed, Sized)):
        raise NotProvable("it takes a sum over the examples, and is not linear in it")
    return BatchSum(site.shape())


@of_totals("Reshape ExpandDims Squeeze")
def reshaped(site, value, *others):
    """A sum over the rows in another shape."""
    if not isinstance(value, BatchSum) or not all(isinstance(v, (Fixed, Sized)) for v in others):
        raise NotProvable("it takes a sum over the examples")
    return BatchSum(site.shape())
