"""The engines of per-example gradients, by the names of `per_example_engine`."""

from tfdpx.per_example.layerwise import LayerwiseEngine
from tfdpx.per_example.vmap import VmapEngine

ENGINES = {"layerwise": LayerwiseEngine, "vmap": VmapEngine}
