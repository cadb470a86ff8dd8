"""Per-example rules for Keras' own layers; importing the package registers them."""

from tfdpx.per_example.rules import (
    convolution,
    dense,
    depthwise,
    einsum_dense,
    embedding,
    generic,
    group_normalization,
    lora,
    normalization,
    reversible_embedding,
)
from tfdpx.per_example.rules.base import Rule
from tfdpx.per_example.rules.convolution import Conv2DRule
from tfdpx.per_example.rules.generic import GenericRule

__all__ = [
    "Conv2DRule",
    "GenericRule",
    "Rule",
    "convolution",
    "dense",
    "depthwise",
    "einsum_dense",
    "embedding",
    "generic",
    "group_normalization",
    "lora",
    "normalization",
    "reversible_embedding",
]
