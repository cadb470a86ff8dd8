"""Contains the per-example rules for Keras's layers. Importing this package registers the rules."""

from tfdpx.per_example.rules import (
    contraction,
    convolution,
    embedding,
    lora,
    normalization,
    recurrent,
)

__all__ = ["contraction", "convolution", "embedding", "lora", "normalization", "recurrent"]
