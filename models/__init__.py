"""Models that train well under differential privacy."""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.models.networks import LeNet, NFResNet, SmallCNN, WideResNet
from tfdpx.models.on_features import LinearOnFeatures, ScatterCNN, ScatterLinear
from tfdpx.models.resnet20 import ResNet20
from tfdpx.models.transfer import backbone, zero_shot_head

__all__ = [
    "LeNet",
    "LinearOnFeatures",
    "NFResNet",
    "ResNet20",
    "ScatterCNN",
    "ScatterLinear",
    "SmallCNN",
    "WideResNet",
    "backbone",
    "zero_shot_head",
]
