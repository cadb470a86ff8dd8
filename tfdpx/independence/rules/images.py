"""Operations on images and their like, which have the examples on the first axis."""

from tfdpx.independence._values import (
    Fixed,
    NotProvable,
    PerExample,
    Sized,
    ints_of,
    rank,
    require_fixed,
    require_same_for_rows,
    same_axis,
)
from tfdpx.independence.lengths import Length, product
from tfdpx.independence.registry import of_rows


@of_rows(
    "Conv2D Conv3D DepthwiseConv2dNative Dilation2D AvgPool AvgPool3D MaxPool MaxPool3D "
    "DepthToSpace SpaceToDepth LRN ExtractImagePatches ExtractVolumePatches ResizeArea "
    "ResizeBicubic ResizeBilinear ResizeNearestNeighbor"
)
def of_images(site, images, *others):
    """Each image by itself, with a filter, a size or a factor that all share."""
    require_fixed(*others)
    _first(images)
    for name in ("ksize", "strides", "dilations", "ksizes", "rates"):
        sizes = _list(site, name)
        if sizes and sizes[0] != 1:
            raise NotProvable("it works along the axis of the examples")
    return site.rows(images, 0)


def _list(site, name):
    try:
        return site.attribute(name)
    except ValueError:
        return None


def _first(images):
    if not isinstance(images, PerExample) or images.axis:
        raise NotProvable("the examples are not on the first axis")


@of_rows("ImageProjectiveTransformV3")
def transform(site, images, transforms, *others):
    """Each image by the transform of its own, or by one for all."""
    require_fixed(*others)
    _first(images)
    if isinstance(transforms, PerExample):
        same_axis(images, transforms)
    else:
        require_same_for_rows(transforms, 0, images)
    return site.rows(images, 0)


@of_rows("Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput")
def transposed_convolution(site, sizes, kernel, images):
    """A convolution the other way; the sizes of the output agree with the images."""
    require_fixed(kernel)
    if not isinstance(sizes, (Fixed, Sized)):
        raise NotProvable("the size of its output depends on the examples")
    if sizes.content is None or any(n.counts_rows for n in sizes.content[1:]):
        raise NotProvable("the size of its output could not be followed")
    _first(images)
    return site.rows(images, 0, [None, *sizes.content[1:]])


@of_rows("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
def batch_norm(site, images, *others):
    """With fixed statistics only: those of a batch mix its examples."""
    if site.attribute("is_training"):
        raise NotProvable("it normalizes by the statistics of the batch")
    require_fixed(*others)
    _first(images)
    count = len(site.operation.outputs)
    # The others are the statistics again, and what a gradient may need.
    return [
        site.rows(images, 0, images.shape),
        *(site.fixed(others, index=index) for index in range(1, count)),
    ]


@of_rows("SpaceToBatchND")
def space_to_batch(site, x, block, paddings):
    """Blocks of positions become rows, in front of the examples."""
    require_fixed(paddings)
    _first(x)
    return _with_blocks(site, x, x.shape[0] * product(map(Length, ints_of(block))))


@of_rows("BatchToSpaceND")
def batch_to_space(site, x, block, crops):
    """Rows that were blocks of positions become positions again."""
    require_fixed(crops)
    _first(x)
    length = x.shape[0].over(product(map(Length, ints_of(block))))
    if length is None or length.over(site.frame.walk.rows * x.after) is None:
        raise NotProvable("it takes the examples apart")
    return _with_blocks(site, x, length)


def _with_blocks(site, x, length):
    others = site.shape(shape=[length, *[None] * (rank(x) - 1)])[1:]
    return PerExample((length, *others), 0, x.after)
