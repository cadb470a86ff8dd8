"""Per-example gradient norms and clipped sums for any Keras model.

A `Rule` computes the norms and the clipped sums of the gradients of one layer class, and `register`
adds a rule for a new class. `GenericRule` forms the whole gradient of each example. To choose a
clip, look at the norms of public examples, which `tfdpx.gradient_norms` returns.
"""

from tfdpx import _keras as _keras  # Refuses other backends of Keras first.
from tfdpx.per_example import rules as rules  # Registers the rules.
from tfdpx.per_example.engine import explain
from tfdpx.per_example.rule import GenericRule, Rule, register

__all__ = ["GenericRule", "Rule", "explain", "register"]
