"""Per-example gradient norms and clipped sums for any Keras model.

`register` makes a rule known for a layer class; `Rule` is what it derives from, and `GenericRule`
what serves every layer without one. `gradient_norms` are norms to choose a clip by.
"""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.per_example.capture import UnexplainedVariables
from tfdpx.per_example.cost_model import Cost, LayerChoice, forced_norms
from tfdpx.per_example.gradient_norms import gradient_norms
from tfdpx.per_example.layerwise import LayerwiseEngine, explain
from tfdpx.per_example.registry import register
from tfdpx.per_example.result import PerExample
from tfdpx.per_example.rules import Conv2DRule, GenericRule, Rule
from tfdpx.per_example.vmap import VmapEngine

ENGINES = {"layerwise": LayerwiseEngine, "vmap": VmapEngine}

__all__ = [
    "Conv2DRule",
    "Cost",
    "ENGINES",
    "GenericRule",
    "LayerChoice",
    "LayerwiseEngine",
    "PerExample",
    "Rule",
    "UnexplainedVariables",
    "VmapEngine",
    "explain",
    "forced_norms",
    "gradient_norms",
    "register",
]
