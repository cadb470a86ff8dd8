"""Operations that keep all entries: reshape, transpose, take apart, join, pad."""

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
from tfdpx.independence.lengths import MINUS_ONE, ONE, Length, product
from tfdpx.independence.registry import of_rows


@of_rows("Reshape")
def reshape(site, x, shape):
    """Entries keep their flat index, and so their row: the stride of the rows must stay."""
    wanted = list(content_of(shape))
    total = product(x.shape)
    if MINUS_ONE in wanted:
        place = wanted.index(MINUS_ONE)
        rest = total.over(product(wanted[:place] + wanted[place + 1 :]))
        if rest is None:
            raise NotProvable("its new shape could not be followed")
        wanted[place] = rest
    if product(wanted) != total:
        raise NotProvable("its new shape could not be followed")
    stride = product(x.shape[x.axis + 1 :]) * x.after
    block = stride * site.frame.walk.rows
    for axis in range(len(wanted)):
        after = stride.over(product(wanted[axis + 1 :]))
        if after is not None and product(wanted[axis:]).over(block) is not None:
            others = [n for a, n in enumerate(wanted) if a != axis]
            if not any(n.counts_rows for n in others):
                return PerExample(tuple(wanted), axis, after)
    raise NotProvable("its new shape mixes the rows")


@of_rows("Transpose ConjugateTranspose")
def transpose(site, x, order):
    """The axis of the rows moves."""
    order = [axis % rank(x) for axis in ints_of(order)]
    return site.rows(x, order.index(x.axis), [x.shape[axis] for axis in order])


@of_rows("ExpandDims")
def expand_dims(site, x, axis):
    """One more axis of length 1."""
    [axis] = ints_of(axis)
    axis = axis % (rank(x) + 1)
    shape = [*x.shape[:axis], ONE, *x.shape[axis:]]
    return site.rows(x, x.axis + (axis <= x.axis), shape)


@of_rows("Squeeze")
def squeeze(site, x):
    """Axes of length 1 go; which, must be known."""
    dropped = [axis % rank(x) for axis in site.attribute("squeeze_dims")]
    if not dropped:
        if any(n.known is None for a, n in enumerate(x.shape) if a != x.axis):
            raise NotProvable("which axes it drops is not known")
        dropped = [a for a, n in enumerate(x.shape) if n == ONE and a != x.axis]
        if len(site.static() or ()) != rank(x) - len(dropped):
            raise NotProvable("which axes it drops depends on the number of examples")
    if x.axis in dropped:
        raise NotProvable("it drops the axis of the examples")
    kept = [a for a in range(rank(x)) if a not in dropped]
    return site.rows(x, kept.index(x.axis), [x.shape[a] for a in kept])


@of_rows("Pack")
def pack(site, *inputs):
    """One more axis, along which the inputs are put."""
    axis = site.attribute("axis") % (max(rank(v) for v in inputs) + 1)
    first = _alike(inputs)
    shape = [*first.shape[:axis], Length(len(inputs)), *first.shape[axis:]]
    return site.rows(first, first.axis + (axis <= first.axis), shape)


@of_rows("Unpack")
def unpack(site, x):
    """The parts along an axis."""
    axis = site.attribute("axis") % rank(x)
    return _parts(site, x, axis, [*x.shape[:axis], *x.shape[axis + 1 :]], dropped=True)


@of_rows("ConcatV2")
def concat(site, *inputs):
    """The inputs one behind the other."""
    *inputs, axis = inputs
    [axis] = ints_of(axis)
    first = _alike(inputs)
    axis %= rank(first)
    if axis == first.axis:
        raise NotProvable("it joins along the axis of the examples")
    shape = list(first.shape)
    shape[axis] = None
    if all(v.shape[axis].known is not None for v in inputs):
        shape[axis] = Length(sum(v.shape[axis].known for v in inputs))
    return site.rows(first, first.axis, shape)


def _alike(inputs):
    """The first `PerExample` of `inputs`; raises `NotProvable` unless the others fit it."""
    rows = [v for v in inputs if isinstance(v, PerExample)]
    same_axis(*rows)
    for value in inputs:
        if not isinstance(value, PerExample):
            if rank(value) != rank(rows[0]) or value.shape[rows[0].axis] == ONE:
                raise NotProvable("it joins rows with what has none")
            require_same_for_rows(value, rows[0].axis, rows[0])
    return rows[0]


@of_rows("Split")
def split(site, axis, x):
    """Equal parts along an axis."""
    return _split(site, x, axis)


@of_rows("SplitV")
def split_as(site, x, sizes, axis):
    """Parts along an axis."""
    require_fixed(sizes)
    return _split(site, x, axis)


def _split(site, x, axis):
    [axis] = ints_of(axis)
    axis %= rank(x)
    return _parts(site, x, axis, [None if a == axis else n for a, n in enumerate(x.shape)])


def _parts(site, x, axis, shape, dropped=False):
    if not isinstance(x, PerExample) or axis == x.axis:
        raise NotProvable("it takes the examples apart")
    place = x.axis - (dropped and axis < x.axis)
    count = len(site.operation.outputs)
    return [site.rows(x, place, shape, index=index) for index in range(count)]


@of_rows("Pad PadV2 MirrorPad")
def pad(site, x, paddings, *value):
    """More entries at the ends of axes other than the rows' axis."""
    require_fixed(*value)
    around = ints_of(paddings)
    if not isinstance(x, PerExample) or any(around[2 * x.axis : 2 * x.axis + 2]):
        raise NotProvable("it adds examples")
    return site.rows(x, x.axis)
