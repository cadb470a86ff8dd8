"""Operations along an axis other than the rows'; along the rows, a sum is a `BatchSum`."""

from tfdpx.independence._values import (
    BatchSum,
    NotProvable,
    PerExample,
    ints_of,
    rank,
    require_fixed,
    same_axis,
)
from tfdpx.independence.lengths import ONE
from tfdpx.independence.registry import of_rows, of_totals

_ALONG = "it works along the axis of the examples"


@of_rows("All Any EuclideanNorm Max Mean Min Prod Sum")
def reduce(site, x, axes):
    """One entry in place of all those along some axes."""
    if not isinstance(x, PerExample):
        raise NotProvable("along which axes depends on the examples")
    axes = {axis % rank(x) for axis in ints_of(axes)}
    if x.axis in axes:
        if site.operation.type in ("Sum", "Mean") and site.operation.outputs[0].dtype.is_floating:
            return BatchSum(site.shape(shape=_kept(site, x, axes)))
        raise NotProvable(_ALONG)
    return site.rows(x, _place(site, x.axis, axes), _kept(site, x, axes))


@of_totals("Sum Mean")
def reduce_total(site, x, axes):
    """A sum of sums over the rows."""
    require_fixed(axes)
    return BatchSum(site.shape())


def _kept(site, x, axes):
    keep = site.attribute("keep_dims")
    return [ONE if a in axes else n for a, n in enumerate(x.shape) if keep or a not in axes]


def _place(site, axis, axes):
    return axis if site.attribute("keep_dims") else axis - sum(a < axis for a in axes)


@of_rows("ArgMax ArgMin")
def arg_reduce(site, x, axis):
    """The place of an extreme along an axis."""
    if not isinstance(x, PerExample):
        raise NotProvable("along which axis depends on the examples")
    [axis] = ints_of(axis)
    axis %= rank(x)
    if axis == x.axis:
        raise NotProvable(_ALONG)
    shape = [n for a, n in enumerate(x.shape) if a != axis]
    return site.rows(x, x.axis - (axis < x.axis), shape)


@of_rows("Cumsum Cumprod CumulativeLogsumexp")
def cumulate(site, x, axis):
    """Partial results along an axis."""
    if not isinstance(x, PerExample) or x.axis in [axis % rank(x) for axis in ints_of(axis)]:
        raise NotProvable(_ALONG)
    return site.rows(x, x.axis, x.shape)


@of_rows("Softmax LogSoftmax")
def softmax(site, x):
    """Each vector of the last axis by itself."""
    _last(x, 1)
    return site.rows(x, x.axis, x.shape)


@of_rows("TopK TopKV2")
def top_k(site, x, *others):
    """The largest entries along the last axis, and where they are."""
    require_fixed(*others)
    _last(x, 1)
    return [site.rows(x, x.axis, [*x.shape[:-1], None], index=index) for index in (0, 1)]


@of_rows(
    "Cholesky FFT2D IFFT2D MatrixBandPart MatrixDeterminant MatrixDiagPart MatrixDiagPartV2 "
    "MatrixDiagPartV3 MatrixInverse"
)
def of_matrices(site, x, *others):
    """Each matrix of the last two axes by itself."""
    require_fixed(*others)
    _last(x, 2)
    return site.rows(x, x.axis)


@of_rows("AdjustContrastv2")
def of_pictures(site, x, *others):
    """Each picture of the last three axes by itself."""
    require_fixed(*others)
    _last(x, 3)
    return site.rows(x, x.axis)


@of_rows(
    "AdjustHue AdjustSaturation HSVToRGB RGBToHSV FFT IFFT RFFT IRFFT MatrixDiag MatrixDiagV2 "
    "MatrixDiagV3"
)
def of_vectors(site, x, *others):
    """Each vector of the last axis by itself."""
    require_fixed(*others)
    _last(x, 1)
    return site.rows(x, x.axis)


def _last(x, count):
    """Raises `NotProvable` unless the rows are on none of the last `count` axes of `x`."""
    if not isinstance(x, PerExample):
        raise NotProvable("how it works depends on the examples")
    if x.axis >= rank(x) - count:
        raise NotProvable(_ALONG)


@of_rows("OneHot")
def one_hot(site, indices, depth, *values):
    """One more axis, of the classes."""
    require_fixed(depth, *values)
    axis = site.attribute("axis") % (rank(indices) + 1)
    shape = [*indices.shape[:axis], None, *indices.shape[axis:]]
    return site.rows(indices, indices.axis + (axis <= indices.axis), shape)


@of_rows("SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits")
def cross_entropy(site, logits, labels):
    """The loss of each vector of logits, and its gradient."""
    for value in (logits, labels):
        if not isinstance(value, PerExample) or value.axis:
            raise NotProvable("logits or labels have no rows")
    same_axis(logits, labels)
    return [
        site.rows(logits, 0, [logits.shape[0]]),
        site.rows(logits, 0, list(logits.shape), index=1),
    ]


@of_rows("L2Loss")
def half_square(site, x):
    """Half the sum of squares."""
    return BatchSum(())
