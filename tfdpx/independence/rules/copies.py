"""Operations that repeat entries, and such that make rows out of a shape."""

from tfdpx.independence._values import (
    NotProvable,
    PerExample,
    content_of,
    rank,
    require_fixed,
    require_same_for_rows,
)
from tfdpx.independence.lengths import MINUS_ONE, ONE
from tfdpx.independence.registry import of_copies, of_rows, of_sizes


@of_rows("Tile")
def tile(site, x, multiples):
    """Copies along axes other than the rows' axis."""
    require_fixed(multiples)
    multiples = content_of(multiples)
    if not isinstance(x, PerExample) or multiples[x.axis] != ONE:
        raise NotProvable("it repeats the examples")
    shape = [n * m for n, m in zip(x.shape, multiples, strict=True)]
    return site.rows(x, x.axis, shape)


@of_rows("BroadcastTo")
def broadcast_to(site, x, shape):
    """Copies along axes of length 1 and new ones."""
    wanted = content_of(shape)
    extra = len(wanted) - rank(x)
    if not isinstance(x, PerExample) or wanted[x.axis + extra] != x.shape[x.axis]:
        raise NotProvable("it repeats the examples")
    if any(n.counts_rows for a, n in enumerate(wanted) if a != x.axis + extra):
        raise NotProvable("another axis becomes as long as there are examples")
    return site.rows(x, x.axis + extra, list(wanted))


@of_sizes("Fill")
def fill(site, shape, value):
    """The same everywhere."""
    require_fixed(value)
    return made_rows(site, content_of(shape))


@of_sizes("BroadcastTo")
def copies(site, x, shape):
    """The same for every row, where an axis of the length of the batch comes in."""
    require_fixed(x)
    made = made_rows(site, content_of(shape))
    # Axes are lined up at the last one.
    require_same_for_rows(x, rank(x) - len(made.shape) + made.axis, made)
    return made


@of_sizes("Tile")
def copies_of_one(site, x, multiples):
    """The same for every row, where an axis of length 1 is repeated as often as there are rows."""
    require_fixed(x)
    multiples = content_of(multiples)
    made = made_rows(site, [n * m for n, m in zip(x.shape, multiples, strict=True)])
    if x.shape[made.axis] != ONE:
        raise NotProvable("it gives rows something that goes by their place in the batch")
    return made


def made_rows(site, shape):
    """`PerExample` of a shape of which one length alone is, or depends on, the number of rows."""
    axes = [axis for axis, length in enumerate(shape) if length.counts_rows]
    if len(axes) != 1 or shape[axes[0]] != site.frame.walk.rows:
        raise NotProvable("its shape could not be followed")
    if MINUS_ONE in shape:
        raise NotProvable("its shape is not known")
    return PerExample(tuple(shape), axes[0])


@of_copies("Fill OnesLike ZerosLike")
def everywhere(site, *_):
    """All axes: the parts along each are equal."""
    return range(len(site.static() or ()))


@of_copies("BroadcastTo Tile")
def repeated(site, x, *_):
    """Axes along which one part was repeated."""
    length = len(site.static() or ())
    if x.shape is None:
        return ()
    extra = length - len(x.shape)
    return [a for a in range(length) if a < extra or x.shape[a - extra] == ONE]
