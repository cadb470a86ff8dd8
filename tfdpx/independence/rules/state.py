"""Constants, variables, tables and random numbers."""

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpx.independence._values import (
    Fixed,
    Handle,
    NotProvable,
    PerExample,
    Sized,
    Unknown,
    content_of,
    require_fixed,
)
from tfdpx.independence.lengths import Length
from tfdpx.independence.registry import whatever
from tfdpx.independence.rules.copies import made_rows

# Larger constants are not looked into.
_MOST_NUMBERS, _MOST_BYTES = 64, 2**16


@whatever("Const")
def constant(site):
    """The same always; small ones with their numbers."""
    proto = site.attribute("value")
    shape = site.shape()
    if proto.ByteSize() > _MOST_BYTES:
        return Fixed(shape)
    array = tf.make_ndarray(proto)
    content = None
    if array.dtype.kind in "iu" and array.size <= _MOST_NUMBERS:
        content = tuple(Length(int(n)) for n in array.flat)
    rows = site.frame.walk.rows.known
    like_rows = frozenset(
        axis for axis, length in enumerate(array.shape) if length == rows and _is_even(array, axis)
    )
    return Fixed(shape, content, like_rows)


def _is_even(array, axis):
    return bool((array == np.take(array, [0], axis=axis)).all())


@whatever("Placeholder PlaceholderV2 _Arg")
def unexplained(site):
    """An input that nobody said anything of."""
    raise NotProvable("it is an input of which nothing is known")


@whatever("VarHandleOp MutableHashTableV2 HashTableV2")
def made_handle(site):
    """A resource that the graph makes."""
    return Handle(site.name)


@whatever("ReadVariableOp")
def read(site, handle):
    """The value of a variable: the pass puts nothing into one that an example changes."""
    _require_handle(handle)
    whole = site.operation.outputs[0].dtype.is_integer
    return Fixed(site.shape(), sources=frozenset([handle.name] if whole else []))


@whatever("VariableShape VarIsInitializedOp LookupTableSizeV2")
def described(site, handle):
    """What is known of a variable without its value."""
    _require_handle(handle)
    return Fixed(site.shape())


def _require_handle(handle):
    if isinstance(handle, Unknown):
        raise NotProvable(handle.reason)
    if not isinstance(handle, Handle):
        raise NotProvable("which variable it means depends on the examples")


@whatever("ResourceGather")
def look_up(site, handle, indices):
    """Rows of a variable at indices."""
    _require_handle(handle)
    if isinstance(indices, Unknown):
        return indices
    if site.attribute("batch_dims"):
        raise NotProvable("there is no rule for its `batch_dims`")
    if isinstance(indices, PerExample):
        static = site.static()
        if static is None:
            raise NotProvable("the number of its axes is not known")
        behind = [None] * (len(static) - len(indices.shape))
        return site.rows(indices, indices.axis, [*indices.shape, *behind])
    require_fixed(indices)
    return site.fixed([indices])


@whatever("LookupTableFindV2")
def find(site, handle, keys, default):
    """What a table has for each key; nothing in the graph writes tables."""
    _require_handle(handle)
    require_fixed(default)
    if isinstance(keys, Unknown):
        return keys
    if isinstance(keys, PerExample):
        return site.rows(keys, keys.axis, keys.shape)
    require_fixed(keys)
    return site.fixed([keys])


@whatever("AssignVariableOp AssignAddVariableOp AssignSubVariableOp")
def assign(site, handle, value):
    """A variable may change, but not by the examples."""
    _require_handle(handle)
    if isinstance(value, Unknown):
        raise NotProvable(f"it keeps something of the examples, by {value.reason}")
    if not isinstance(value, Fixed):
        raise NotProvable("it keeps something of the examples")
    site.frame.walk.writes(handle.name)
    return []


@whatever(
    "RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt RandomPoissonV2 "
    "RandomGammaV3"
)
def draw(site, shape, *others):
    """Random numbers from a state of the operation's own, anew in every run."""
    require_fixed(*others)
    site.frame.walk.writes(site.name)
    return _drawn(site, shape, frozenset([site.name]), others)


@whatever(
    "StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal "
    "StatelessRandomUniformInt StatelessRandomUniformFullInt StatelessRandomUniformV2 "
    "StatelessRandomNormalV2 StatelessTruncatedNormalV2 StatelessRandomUniformIntV2 "
    "StatelessRandomUniformFullIntV2"
)
def draw_by_seed(site, shape, seed, *others):
    """Random numbers by a seed, which must come from a variable that the graph changes."""
    require_fixed(seed, *others)
    if site.operation.type.endswith("V2"):
        counter, *others = others
        seed = dataclasses.replace(seed, sources=seed.sources | counter.sources)
    made = _drawn(site, shape, seed.sources, others)
    if isinstance(made, Fixed) and not made.like_rows:
        return made
    name = f"operation '{site.name}' (of type {site.operation.type})"
    tensor = site.operation.inputs[1]
    if tensor.op.type == "StatelessRandomGetKeyCounter":
        tensor = tensor.op.inputs[0]
    site.frame.walk.draws(name, seed.sources)
    site.frame.walk.draws_from(name, tensor, made.shape)
    return made


def _drawn(site, shape, sources, others):
    if isinstance(shape, Sized):
        for value in others:
            site.shares(value)
        return made_rows(site, content_of(shape))
    require_fixed(shape)
    lengths = site.shape()
    rows = site.frame.walk.rows
    # Of a square of random numbers, one axis may be taken for the examples' axis.
    axis = next((a for a, n in enumerate(lengths or ()) if n == rows), None)
    shared = frozenset().union(*(value.sources for value in others))
    like_rows = frozenset() if axis is None or shared else frozenset([axis])
    return Fixed(lengths, like_rows=like_rows, sources=sources | shared)
