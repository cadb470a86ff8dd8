"""Models that train well under differential privacy."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.models.backbones import backbone
from tfdpx.models.lenet import LeNet
from tfdpx.models.linear_on_features import LinearOnFeatures
from tfdpx.models.nf_resnet import NFResNet
from tfdpx.models.scatter_cnn import ScatterCNN
from tfdpx.models.scatter_linear import ScatterLinear
from tfdpx.models.small_cnn import SmallCNN
from tfdpx.models.wide_resnet import WideResNet
from tfdpx.models.zero_shot import zero_shot_head

__all__ = [
    "LeNet",
    "LinearOnFeatures",
    "NFResNet",
    "ScatterCNN",
    "ScatterLinear",
    "SmallCNN",
    "WideResNet",
    "backbone",
    "zero_shot_head",
]
