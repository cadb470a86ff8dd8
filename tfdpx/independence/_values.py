"""What is known of a tensor: where its rows are, or that it has none, or nothing.

A batch has rows; row i of every input of a graph belongs together. What the rules claim of a value:

- `Fixed`: no example and no number of rows changes it.
- `Sized`: the number of rows may change it, no example does. Made of shapes, and good for shapes.
- `PerExample`: cut along one axis, the part of row i is a function of row i of the inputs, the same
  function for every i and every number of rows.
- `BatchSum`: a sum over the rows of such a function of each, times and plus what is `Fixed` or
  `Sized`.
- `Listed`: a list of tensors, each of which is like one of the above, all alike.
- `Handle`: a variable or table.
- `Unknown`: none of these could be shown.
"""

import dataclasses

from tfdpx.independence.lengths import ONE, Length


class NotProvable(Exception):
    """A rule cannot show anything of its operation; the text says why."""


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Nothing is known; `reason` names the first operation where it was lost."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The same whatever the examples are and however many.

    Attributes:
        shape: Tuple of `Length`s, or None if not even the rank is known.
        content: Its whole numbers, a flat tuple of `Length`s; None if they are not known.
        like_rows: Frozenset of axes; cut along one of them, all parts are equal, or independent
            random draws of one kind. Along such an axis it combines with rows.
        sources: Frozenset of the variables of whole numbers that it was made of: seeds. Where the
            graph changes one of them, the value is another in each pass.
    """

    shape: tuple
    content: tuple = None
    like_rows: frozenset = frozenset()
    sources: frozenset = frozenset()


@dataclasses.dataclass(frozen=True)
class Sized:
    """The number of rows may change it; attributes as of `Fixed`."""

    shape: tuple
    content: tuple = None


@dataclasses.dataclass(frozen=True)
class PerExample:
    """Has a part for each row of the batch.

    Its elements in row-major order, flat index f, belong to row `f // stride % rows`, where the
    stride is `after` times the lengths of the axes behind `axis`.

    Attributes:
        shape: Tuple of `Length`s; only the one of `axis` changes with the number of rows.
        axis: Int, where the rows are: the length there is `before * rows * after`.
        after: `Length`.
    """

    shape: tuple
    axis: int
    after: Length = ONE


@dataclasses.dataclass(frozen=True)
class BatchSum:
    """A sum over the rows."""

    shape: tuple


@dataclasses.dataclass(frozen=True)
class Listed:
    """A list of tensors; `element` is None while it holds nothing but zeros."""

    element: object = None


@dataclasses.dataclass(frozen=True)
class Handle:
    """A resource, identified by `name`."""

    name: object


def rank(value):
    """The number of axes, an int.

    Raises:
        NotProvable: If it is not known.
    """
    if value.shape is None:
        raise NotProvable("the number of its axes is not known")
    return len(value.shape)


def content_of(value):
    """The whole numbers of a `Fixed` or `Sized`, a flat tuple of `Length`s.

    Raises:
        NotProvable: If they are not known.
    """
    if not isinstance(value, (Fixed, Sized)) or value.content is None:
        raise NotProvable("a shape, an axis or an index is not known")
    return value.content


def ints_of(value):
    """`content_of` as a list of ints."""
    numbers = [length.known for length in content_of(value)]
    if None in numbers:
        raise NotProvable("an axis or an index is not known")
    return numbers


def require_fixed(*values):
    """Raises `NotProvable` unless all are `Fixed`."""
    for value in values:
        if not isinstance(value, Fixed):
            raise NotProvable("an argument that all rows share depends on them or on their number")


def same_layout(first, *others):
    """Raises `NotProvable` unless these have their rows laid out alike, on whichever axis."""
    for other in others:
        if other.shape[other.axis] != first.shape[first.axis] or other.after != first.after:
            raise NotProvable("two tensors have their rows laid out in different ways")


def same_axis(first, *others):
    """Raises `NotProvable` unless these have their rows on one axis, laid out alike."""
    if any(other.axis != first.axis for other in others):
        raise NotProvable("two tensors have their rows on different axes")
    same_layout(first, *others)


def require_same_for_rows(fixed, axis, rows):
    """Raises `NotProvable` unless all rows meet the same part of `fixed` along `axis`, or a draw.

    Args:
        fixed: `Fixed`.
        axis: Int, of `fixed`; below zero where it has no such axis.
        rows: `PerExample`.
    """
    require_fixed(fixed)
    if axis < 0 or fixed.shape[axis] == ONE:
        return
    if axis not in fixed.like_rows or fixed.shape[axis] != rows.shape[rows.axis]:
        raise NotProvable("it gives rows something that goes by their place in the batch")


def joined(a, b, name):
    """What is known of a tensor that is either `a` or `b`; a `Listed` without element is either.

    Args:
        a: A value.
        b: As `a`.
        name: Str for lengths that differ.
    """
    if a == b:
        return a
    for value in (a, b):
        if isinstance(value, Unknown):
            return value
    try:
        return _joined(a, b, name)
    except NotProvable as lost:
        return Unknown(f"{name}: {lost}")


def _joined(a, b, name):
    if isinstance(a, Listed) and isinstance(b, Listed):
        if a.element is None or b.element is None:
            return Listed(b.element if a.element is None else a.element)
        return Listed(joined(a.element, b.element, name))
    if isinstance(a, Fixed) and isinstance(b, PerExample):
        a, b = b, a
    if isinstance(a, PerExample) and isinstance(b, Fixed):
        if rank(b) != len(a.shape) or b.shape[a.axis] != a.shape[a.axis]:
            raise NotProvable("its shape changes")
        require_same_for_rows(b, a.axis, a)
        return PerExample(_common(a, b, name), a.axis, a.after)
    if isinstance(a, PerExample) and isinstance(b, PerExample):
        same_axis(a, b)
        return PerExample(_common(a, b, name), a.axis, a.after)
    if isinstance(a, Fixed) and isinstance(b, Fixed):
        content = a.content if a.content == b.content else None
        return Fixed(_common(a, b, name), content, a.like_rows & b.like_rows, a.sources | b.sources)
    if isinstance(a, (Fixed, Sized)) and isinstance(b, (Fixed, Sized)):
        return Sized(a.shape if a.shape == b.shape else None)
    raise NotProvable("it is one kind of tensor first and another later")


def _common(a, b, name):
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        if isinstance(a, PerExample):
            raise NotProvable("its rank changes")
        return None
    return tuple(
        one if one == other else Length(1, (f"{name}:{axis}",))
        for axis, (one, other) in enumerate(zip(a.shape, b.shape, strict=True))
    )
