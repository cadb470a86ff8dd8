"""Which rule says what of which type of operation; a type without one is not followed."""

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpx.independence._values import (
    BatchSum,
    Fixed,
    Handle,
    Listed,
    NotProvable,
    PerExample,
    Sized,
    Unknown,
)
from tfdpx.independence.lengths import ONE

_WHOLE, _ROWS, _SIZES, _NUMBERS, _TOTALS, _COPIES = {}, {}, {}, {}, {}, {}
_SHARED = (Fixed, Sized)


def _register(table, types):
    def add(rule):
        for name in types.split():
            table[name] = rule
        return rule

    return add


def whatever(types):
    """Registers a rule that is asked first, and takes inputs of every kind.

    Args:
        types: Str, types of operations with spaces between, also below.
    """
    return _register(_WHOLE, types)


def of_rows(types):
    """Registers a rule for inputs of which one at least is `PerExample`, others `Fixed` or `Sized`.

    As all rules it gets the `Site` and the values of the inputs, and gives the value of the output,
    or a list of those of several.
    """
    return _register(_ROWS, types)


def of_sizes(types):
    """Registers a rule that makes rows: for inputs `Fixed` and `Sized`, one of the latter."""
    return _register(_SIZES, types)


def of_numbers(types):
    """Registers a function of arrays of `Length`s: what whole numbers the operation gives."""
    return _register(_NUMBERS, types)


def of_totals(types):
    """Registers a rule for inputs of which one is `BatchSum` at least."""
    return _register(_TOTALS, types)


def of_copies(types):
    """Registers a function of `Fixed` inputs: axes along which the output repeats itself."""
    return _register(_COPIES, types)


def rule_of(name):
    """The rule of a type of operation: function of a `Site` and the values of the inputs."""
    if name in _WHOLE:
        return _WHOLE[name]
    return lambda site, *inputs: _apply(name, site, inputs)


def _apply(name, site, inputs):
    for value in inputs:
        if isinstance(value, Unknown):
            return [value] * len(site.operation.outputs)
    handles = any(isinstance(value, (Handle, Listed)) for value in inputs)
    if site.is_stateful or handles or "PyFunc" in name:
        raise NotProvable("it keeps state, or runs Python")
    if any(isinstance(value, BatchSum) for value in inputs):
        rule = _look_up(_TOTALS, name, "it takes a sum over the examples")
    elif any(isinstance(value, PerExample) for value in inputs):
        rule = _look_up(_ROWS, name, "there is no rule for this type")
    else:
        return _shared(name, site, inputs)
    made = rule(site, *inputs)
    for place, value in enumerate(inputs):
        if isinstance(value, Fixed) and value.sources and _is_for_all(rule, site, inputs, place):
            site.shares(value)
    return made


def _is_for_all(rule, site, inputs, place):
    """Whether a draw is the same for all rows: it is if it need not stand along them."""
    inputs = list(inputs)
    inputs[place] = dataclasses.replace(inputs[place], like_rows=frozenset())
    try:
        rule(site, *inputs)
    except NotProvable:
        return False
    return True


def _look_up(table, name, why):
    if name not in table:
        raise NotProvable(why)
    return table[name]


def _shared(name, site, inputs):
    """Of an operation that no example has a part in: any function of what is fixed is fixed."""
    outputs = site.operation.outputs
    if any(t.dtype in (tf.resource, tf.variant) for t in outputs):
        raise NotProvable("there is no rule for this type")
    content = _content(name, site, inputs)
    sized = any(isinstance(value, Sized) for value in inputs)
    if content is not None:
        shape = site.shape()
        if any(length.counts_rows for length in content):
            return Sized(shape, content)
        return site.fixed(inputs, content, shape)
    for value in inputs if sized else ():
        if isinstance(value, Fixed):
            site.shares(value)
    if not sized:
        axes = _like_rows(name, site, inputs)
        return [site.fixed(inputs, like_rows=axes[i], index=i) for i in range(len(outputs))]
    if name in _SIZES:
        return _SIZES[name](site, *inputs)
    return [Sized(_known_shape(site, i)) for i in range(len(outputs))]


def _content(name, site, inputs):
    """What `_NUMBERS` gives, a flat tuple; None if it cannot say."""
    if name not in _NUMBERS or any(value.content is None for value in inputs):
        return None
    numbers = _NUMBERS[name](site, *(array(value) for value in inputs))
    return None if numbers is None else tuple(np.asarray(numbers, dtype=object).flat)


def array(value):
    """The content of a value as an array of `Length`s in its shape."""
    made = np.empty(len(value.content), dtype=object)
    made[:] = value.content
    return made.reshape([length.known for length in value.shape])


def _known_shape(site, index):
    static = site.static(index)
    return None if static is None or None in static else site.shape(index)


def _like_rows(name, site, inputs):
    """A set of axes an output, along which it combines with rows, as some inputs do."""
    axes = [set() for _ in site.operation.outputs]
    rows = site.frame.walk.rows
    candidates = {a for v in inputs for a in v.like_rows if v.shape[a] == rows}
    for axis in candidates if name in _ROWS else ():
        given = [
            PerExample(v.shape, axis) if axis in v.like_rows and v.shape[axis] == rows else v
            for v in inputs
        ]
        # A draw that all rows share leaves no two of them independent.
        if any(isinstance(v, Fixed) and v.sources for v in given):
            continue
        try:
            made = _ROWS[name](site, *given)
        except NotProvable:
            continue
        for own, value in zip(axes, made if isinstance(made, list) else [made], strict=True):
            if (
                isinstance(value, PerExample)
                and value.after == ONE
                and value.shape[value.axis] == rows
            ):
                own.add(value.axis)
    if name in _COPIES and not any(v.sources for v in inputs):
        axes[0].update(_COPIES[name](site, *inputs))
    return axes
