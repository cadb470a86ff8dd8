"""Layers that Keras does not have and that train well under differential privacy."""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.layers.blocks import ChannelWhitening, GroupNorm, SkipInit, UnitNormWithConstant
from tfdpx.layers.few_weights import trainable
from tfdpx.layers.private_model import replace_batch_norm
from tfdpx.layers.scattering2d import Scattering2D
from tfdpx.layers.ws_conv2d import WSConv2D

__all__ = [
    "ChannelWhitening",
    "GroupNorm",
    "Scattering2D",
    "SkipInit",
    "UnitNormWithConstant",
    "WSConv2D",
    "replace_batch_norm",
    "trainable",
]
