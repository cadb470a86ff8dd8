"""Lists of tensors, in which loops keep what each round gives: all elements alike."""

from tfdpx.independence._values import (
    Fixed,
    Listed,
    NotProvable,
    PerExample,
    Sized,
    Unknown,
    joined,
    require_fixed,
)
from tfdpx.independence.registry import whatever


def _require(made, shape=None, *numbers):
    """Raises `NotProvable` unless `made` is a list and the other arguments are of no example.

    Args:
        made: A value.
        shape: Another, which the number of rows may change.
        *numbers: Others, which it may not.
    """
    for value in (made, shape, *numbers):
        if isinstance(value, Unknown):
            raise NotProvable(value.reason)
    if not isinstance(made, Listed):
        raise NotProvable("it is no list of tensors")
    if shape is not None and not isinstance(shape, (Fixed, Sized)):
        raise NotProvable("a shape depends on the examples")
    require_fixed(*numbers)


@whatever("TensorListReserve EmptyTensorList")
def reserve(site, shape, number):
    """A list of zeros."""
    _require(Listed(), shape, number)
    return Listed()


@whatever("TensorListFromTensor")
def from_tensor(site, x, shape):
    """The parts of a tensor along its first axis."""
    _require(Listed(), shape)
    if isinstance(x, PerExample) and x.axis:
        return Listed(PerExample(x.shape[1:], x.axis - 1, x.after))
    if isinstance(x, Fixed) and x.shape:
        like_rows = frozenset(a - 1 for a in x.like_rows if a)
        return Listed(Fixed(x.shape[1:], None, like_rows, x.sources))
    raise NotProvable("it makes a list of the examples")


@whatever("TensorListSetItem")
def set_item(site, made, index, item, *_):
    """One element more is known."""
    _require(made, None, index)
    return _with(site, made, item)


@whatever("TensorListPushBack")
def push_back(site, made, item):
    """One element more."""
    _require(made)
    return _with(site, made, item)


def _with(site, made, item):
    if isinstance(item, Unknown):
        return Listed(item)
    if made.element is None:
        return Listed(item)
    before, after = (getattr(value, "shape", None) for value in (made.element, item))
    if before != after:
        return Listed(Unknown(f"operation '{site.name}': elements of a list differ in shape"))
    return Listed(joined(made.element, item, site.name))


@whatever("TensorListGetItem")
def get_item(site, made, index, shape):
    """An element."""
    _require(made, shape, index)
    return _element(made)


@whatever("TensorListPopBack")
def pop_back(site, made, shape):
    """The list without its last element, and that."""
    _require(made, shape)
    return [made, _element(made)]


@whatever("TensorListStack")
def stack(site, made, shape):
    """All elements as one tensor."""
    _require(made, shape)
    element = _element(made)
    if isinstance(element, PerExample):
        return site.rows(element, element.axis + 1, [None, *element.shape])
    if isinstance(element, Fixed):
        return site.fixed([element], like_rows=(a + 1 for a in element.like_rows))
    raise NotProvable("its elements are of an unknown kind")


@whatever("TensorListLength")
def length(site, made):
    """How many elements there are."""
    _require(made)
    return Fixed((), None)


def _element(made):
    if made.element is None:
        raise NotProvable("nothing was put into the list")
    if isinstance(made.element, Unknown):
        raise NotProvable(made.element.reason)
    return made.element
