"""Per-example rules for Keras' own layers; importing the package registers them."""

from tfdpx.per_example.rules import (
    contraction,
    convolution,
    embedding,
    lora,
    normalization,
    recurrent,
)

__all__ = ["contraction", "convolution", "embedding", "lora", "normalization", "recurrent"]
