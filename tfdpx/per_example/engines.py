"""The engines of per-example gradients, by the names of `per_example_engine`."""

from tfdpx.per_example._vmap import VmapEngine
from tfdpx.per_example.layerwise import LayerwiseEngine

ENGINES = {"layerwise": LayerwiseEngine, "vmap": VmapEngine}
