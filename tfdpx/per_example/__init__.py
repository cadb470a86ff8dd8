"""Per-example gradient norms and clipped sums for any Keras model.

`register` adds a rule for a layer class, a subclass of `Rule`. `GenericRule` forms the whole
gradient of each example. `tfdpx.gradient_norms` computes norms for choosing a clip.
"""

from tfdpx import _keras as _keras  # Refuses other backends of Keras first.
from tfdpx.per_example import rules as rules  # Registers the rules.
from tfdpx.per_example.engine import explain
from tfdpx.per_example.rule import GenericRule, Rule, register

__all__ = ["GenericRule", "Rule", "explain", "register"]
