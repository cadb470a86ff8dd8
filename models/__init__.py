"""Models that train well under differential privacy."""

from tfdpx.models.backbones import backbone
from tfdpx.models.edge_linear import EdgeLinear
from tfdpx.models.lenet import LeNet
from tfdpx.models.nf_resnet import NFResNet
from tfdpx.models.small_cnn import SmallCNN
from tfdpx.models.wide_resnet import WideResNet

__all__ = ["EdgeLinear", "LeNet", "NFResNet", "SmallCNN", "WideResNet", "backbone"]
