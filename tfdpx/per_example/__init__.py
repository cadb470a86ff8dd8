"""Per-example gradient norms and clipped sums for any Keras model.

`register` adds a rule for a layer class, a subclass of `Rule`; `GenericRule` leaves a layer to the
map. `gradient_norms` computes norms for choosing a clip.
"""

import importlib as _importlib

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.per_example import rules as rules  # Registers them.
from tfdpx.per_example.engine import explain
from tfdpx.per_example.rule import GenericRule, Rule, register

__all__ = ["GenericRule", "Rule", "explain", "gradient_norms", "register"]


def __getattr__(name):
    if name != "gradient_norms":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # It prepares a model as training does, which imports this package.
    return _importlib.import_module("tfdpx.training.gradient_norms").gradient_norms
