"""Operations that pick entries by indices."""

from tfdpx.independence._values import (
    NotProvable,
    PerExample,
    content_of,
    ints_of,
    rank,
    require_fixed,
    require_same_for_rows,
    same_axis,
)
from tfdpx.independence.lengths import MINUS_ONE, ONE, Length
from tfdpx.independence.registry import of_rows


@of_rows("Gather GatherV2")
def gather(site, params, indices, axis=None):
    """Entries of `params` along an axis, at `indices`."""
    batch = site.attribute("batch_dims") if axis is not None else 0
    [axis] = [0] if axis is None else ints_of(axis)
    axis, batch = axis % rank(params), batch + rank(indices) * (batch < 0)
    shape = [*params.shape[:axis], *indices.shape[batch:], *params.shape[axis + 1 :]]
    if not isinstance(params, PerExample):
        require_fixed(params)
        if indices.axis < batch:
            require_same_for_rows(params, indices.axis, indices)
            return site.rows(indices, indices.axis, shape)
        return site.rows(indices, axis + indices.axis - batch, shape)
    if params.axis == axis:
        raise NotProvable("it picks examples")
    if isinstance(indices, PerExample):
        same_axis(params, indices)
        if params.axis >= batch:
            raise NotProvable("each example picks of all")
    else:
        require_fixed(indices)
        if params.axis < batch:
            require_same_for_rows(indices, params.axis, params)
    moved = rank(indices) - batch - 1 if params.axis > axis else 0
    return site.rows(params, params.axis + moved, shape)


@of_rows("GatherNd")
def gather_nd(site, params, indices):
    """Entries of what all rows share, at indices of each row."""
    require_fixed(params)
    if indices.axis == rank(indices) - 1:
        raise NotProvable("an index is made of several examples")
    return site.rows(indices, indices.axis)


@of_rows("ReverseV2")
def reverse(site, x, axes):
    """The entries of some axes the other way round."""
    if not isinstance(x, PerExample) or x.axis in [axis % rank(x) for axis in ints_of(axes)]:
        raise NotProvable("it moves examples")
    return site.rows(x, x.axis, x.shape)


@of_rows("Roll")
def roll(site, x, shift, axes):
    """The entries of some axes moved on."""
    require_fixed(shift)
    return reverse(site, x, axes)


@of_rows("Slice")
def cut(site, x, begin, size):
    """A part of each axis."""
    require_fixed(begin)
    begin, size = content_of(begin), content_of(size)
    if not isinstance(x, PerExample) or begin[x.axis] != Length(0):
        raise NotProvable("it picks examples")
    if size[x.axis] not in (MINUS_ONE, x.shape[x.axis]):
        raise NotProvable("it picks examples")
    if any(n.counts_rows for a, n in enumerate(size) if a != x.axis):
        raise NotProvable("another axis becomes as long as there are examples")
    return site.rows(x, x.axis)


@of_rows("StridedSlice")
def strided_slice(site, x, begin, end, strides):
    """Python's `x[a:b:c, d, ..., newaxis]`; all rows must be taken, in order."""
    require_fixed(begin, strides)
    if not isinstance(x, PerExample):
        raise NotProvable("what it picks depends on the examples")
    steps = ints_of(strides)
    shape, place, axis = [], None, 0
    for index, kind in enumerate(kinds(site, len(steps), rank(x))):
        if kind == "new":
            shape.append(ONE)
            continue
        if kind == "rest":
            count = rank(x) - sum(k in ("one", "part") for k in kinds(site, len(steps), rank(x)))
            kept = range(axis, axis + count)
            place = len(shape) + x.axis - axis if x.axis in kept else place
            shape.extend(x.shape[a] for a in kept)
            axis += count
            continue
        if axis == x.axis:
            if kind == "one" or not _takes_all(site, index, x, begin, end, steps[index]):
                raise NotProvable("it picks examples")
            place = len(shape)
        if kind == "part":
            whole = _takes_all(site, index, x, begin, end, steps[index], axis)
            if not whole:
                _require_no_count(site, index, end)
            shape.append(x.shape[axis] if whole else None)
        axis += 1
    if axis <= x.axis:
        place = len(shape) + x.axis - axis
    return site.rows(x, place, [*shape, *x.shape[axis:]])


def kinds(site, count, axes):
    """What each of `count` entries of a slice does: "new", "rest" (an ellipsis), "one" or "part".

    Args:
        site: `Site` of a `StridedSlice`.
        count: Int.
        axes: Int, of the tensor that is cut.
    """
    masks = {
        "new": site.attribute("new_axis_mask"),
        "rest": site.attribute("ellipsis_mask"),
        "one": site.attribute("shrink_axis_mask"),
    }
    # An ellipsis wins over a new axis, that over a single index.
    order = ("rest", "new", "one")
    return [next((k for k in order if masks[k] >> n & 1), "part") for n in range(count)]


def _takes_all(site, index, x, begin, end, step, axis=None):
    axis = x.axis if axis is None else axis
    if step != 1:
        return False
    first = site.attribute("begin_mask") >> index & 1
    last = site.attribute("end_mask") >> index & 1
    if not first:
        first = begin.content is not None and begin.content[index] == Length(0)
    if not last:
        content = getattr(end, "content", None)
        last = content is not None and content[index] == x.shape[axis]
    return bool(first and last)


def _require_no_count(site, index, end):
    """Raises `NotProvable` if where a slice ends depends on the number of examples."""
    if site.attribute("end_mask") >> index & 1:
        return
    content = getattr(end, "content", None)
    if content is None:
        require_fixed(end)
    elif content[index].counts_rows:
        raise NotProvable("another axis is cut by the number of examples")
