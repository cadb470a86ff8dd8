"""Functions, branches and loops: their graphs are walked too."""

import dataclasses

from tfdpx._keras import tensorflow_internals
from tfdpx.independence._values import (
    BatchSum,
    Fixed,
    Listed,
    NotProvable,
    PerExample,
    Sized,
    Unknown,
    joined,
)
from tfdpx.independence.lengths import symbol
from tfdpx.independence.registry import whatever

# After so many rounds of a loop nothing new can be learned: each loses something.
_ROUNDS = 12


@whatever("PartitionedCall StatefulPartitionedCall")
def call(site, *inputs):
    """A function."""
    [(_, body)] = tensorflow_internals.called(site.operation)
    return _run(site, body, inputs)


def _run(site, body, inputs):
    frame = site.frame.enter(body, list(inputs), site.name)
    return frame.run(body.outputs, body.get_operations())


@whatever("If StatelessIf Case StatelessCase")
def branch(site, condition, *inputs):
    """One of several functions; which, no example may decide."""
    _require_shared(site, condition, "which branch runs")
    branches = [_run(site, body, inputs) for _, body in tensorflow_internals.called(site.operation)]
    joint = branches[0]
    for other in branches[1:]:
        joint = [
            joined(a, b, f"{site.name}:{number}")
            for number, (a, b) in enumerate(zip(joint, other, strict=True))
        ]
    return joint


def _require_shared(site, condition, what):
    if isinstance(condition, Fixed):
        site.shares(condition)
    if isinstance(condition, Unknown):
        raise NotProvable(f"{what} could not be followed, by {condition.reason}")
    if not isinstance(condition, Fixed):
        raise NotProvable(f"{what} depends on the examples or on their number")


@whatever("While StatelessWhile")
def loop(site, *inputs):
    """A body that runs until what no example may decide; its variables are followed to rest."""
    graphs = dict(tensorflow_internals.called(site.operation))
    state = list(inputs)
    for _ in range(_ROUNDS):
        after = [
            _outside(site, value, number)
            for number, value in enumerate(_run(site, graphs["body"], state))
        ]
        wider = [
            joined(a, b, f"{site.name}:{number}")
            for number, (a, b) in enumerate(zip(state, after, strict=True))
        ]
        if wider == state:
            [condition] = _run(site, graphs["cond"], state)
            _require_shared(site, condition, "how long it runs")
            return state
        state = wider
    raise NotProvable("its variables could not be followed to rest")


def _outside(site, value, number):
    """`value` without lengths that mean another number in each round."""
    inside = f"{site.name}/"
    if isinstance(value, Listed) and getattr(value.element, "shape", None) is not None:
        if any(_is_inside(length, site.name) for length in value.element.shape):
            return Listed(Unknown(f"operation '{site.name}': elements of a list differ in shape"))
        return value
    if not isinstance(value, (Fixed, Sized, PerExample, BatchSum)) or value.shape is None:
        return value
    if isinstance(value, PerExample):
        moving = (value.shape[value.axis], value.after)
        if any(_is_inside(length, inside) for length in moving):
            return Unknown(f"operation '{site.name}': how the rows are laid out changes")
    shape = tuple(
        symbol(f"{site.name}:{number}:{axis}") if _is_inside(length, inside) else length
        for axis, length in enumerate(value.shape)
    )
    changed = {"shape": shape}
    content = getattr(value, "content", None)
    if content is not None and any(_is_inside(length, inside) for length in content):
        changed["content"] = None
    return dataclasses.replace(value, **changed)


def _is_inside(length, prefix):
    return any(name.startswith(prefix) for name in length.symbols)
