"""The engine in each of its modes: as it chooses, mapped, and with every gradient formed whole."""

import contextlib
import unittest.mock

from tfdpx.per_example import rowwise
from tfdpx.per_example.engine import Engine

MODES = ("chosen", "mapped", "whole")


def make_engine(model, x, views=1, mode="chosen"):
    """Returns the `Engine` of a model, in one of `MODES`."""
    with mapping() if mode != "chosen" else contextlib.nullcontext():
        engine = Engine(model, x, views)
    if mode == "whole":
        layout = engine._layout
        engine._layout = layout.without(layout.variables, "a test asks for it")
    return engine


def mapping():
    """A context in which every model is mapped: none counts as acting row by row."""
    return unittest.mock.patch.object(rowwise, "find_obstacle", lambda model: "a test asks for it")
