"""Per-example gradient norms and clipped sums for any Keras model.

`register` adds a rule for a layer class, a subclass of `Rule`; `GenericRule` leaves a layer to the
map. `tfdpx.gradient_norms` computes norms for choosing a clip.
"""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.per_example import rules as rules  # Registers them.
from tfdpx.per_example.engine import explain
from tfdpx.per_example.rule import GenericRule, Rule, register

__all__ = ["GenericRule", "Rule", "explain", "register"]
