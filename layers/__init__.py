"""Layers that train well under differential privacy, beyond those of Keras."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.layers import ws_conv2d_rule as _ws_conv2d_rule  # noqa: F401  Registers its rule.
from tfdpx.layers.channel_whitening import ChannelWhitening
from tfdpx.layers.group_norm import GroupNorm
from tfdpx.layers.replace_batch_norm import replace_batch_norm
from tfdpx.layers.scattering2d import Scattering2D
from tfdpx.layers.skip_init import SkipInit
from tfdpx.layers.trainable import trainable
from tfdpx.layers.unit_norm_with_constant import UnitNormWithConstant
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
