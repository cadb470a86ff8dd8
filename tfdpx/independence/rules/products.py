"""Products: the rows must be on an axis of the output, none that is summed over."""

import re

from tfdpx.independence._values import (
    NotProvable,
    PerExample,
    rank,
    require_fixed,
    require_same_for_rows,
    same_layout,
)
from tfdpx.independence.lengths import ONE
from tfdpx.independence.registry import of_rows


@of_rows("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3")
def matmul(site, a, b):
    """Leading axes go in pairs; the rows of `a` and the columns of `b` stay."""
    plain = site.operation.type == "MatMul"
    names = ("transpose_a", "transpose_b") if plain else ("adj_x", "adj_y")
    flips = [site.attribute(name) for name in names]
    a_last, b_last = (
        axes[::-1] if f else axes for axes, f in zip(("mk", "kn"), flips, strict=True)
    )
    batch = max(rank(a), rank(b)) - 2
    # Labels as in an equation; a leading axis is labelled by its distance from the last.
    labels = [
        [f"batch {rank(v) - 2 - n}" for n in range(rank(v) - 2)] + list(last)
        for v, last in ((a, a_last), (b, b_last))
    ]
    output = [f"batch {batch - n}" for n in range(batch)] + ["m", "n"]
    return _contract(site, (a, b), labels, output)


@of_rows("Einsum")
def einsum(site, *inputs):
    """As its equation says."""
    equation = site.attribute("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    left, output = equation.replace(" ", "").split("->")
    labels = [_labels(term, rank(v)) for term, v in zip(left.split(","), inputs, strict=True)]
    longest = max((sum(n.startswith("...") for n in names) for names in labels), default=0)
    named = len(re.sub(r"\.\.\.", "", output))
    return _contract(site, inputs, labels, _labels(output, named + longest * ("..." in output)))


def _labels(term, axes):
    """Names of the axes of a term; those of an ellipsis are counted from the last."""
    before, dots, behind = term.partition("...")
    hidden = axes - len(before) - len(behind) if dots else 0
    return [*before, *(f"...{n}" for n in range(hidden, 0, -1)), *behind]


def _contract(site, inputs, labels, output):
    """Products of entries, summed over the labels that the output lacks."""
    rows = [
        (v, n[v.axis]) for v, n in zip(inputs, labels, strict=True) if isinstance(v, PerExample)
    ]
    first, name = rows[0]
    if any(other != name for _, other in rows):
        raise NotProvable("two tensors have their rows on different axes")
    same_layout(*(value for value, _ in rows))
    for value, names in zip(inputs, labels, strict=True):
        if names.count(name) > 1:
            raise NotProvable("it takes a diagonal through the rows")
        if not isinstance(value, PerExample):
            require_same_for_rows(value, names.index(name) if name in names else -1, first)
    if name not in output:
        raise NotProvable("it sums over the examples")
    lengths = {}
    for value, names in zip(inputs, labels, strict=True):
        for label, length in zip(names, value.shape, strict=True):
            if lengths.get(label, ONE) == ONE:
                lengths[label] = length
    shape = [lengths[label] for label in output]
    return site.rows(first, output.index(name), shape)


@of_rows("BiasAdd")
def bias_add(site, x, bias):
    """A bias for each channel."""
    require_fixed(bias)
    channels = 1 if site.attribute("data_format") == b"NCHW" else len(x.shape) - 1
    if x.axis == channels:
        raise NotProvable("it gives rows something that goes by their place in the batch")
    return site.rows(x, x.axis, x.shape)
