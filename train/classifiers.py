"""Builds image classifiers by name, which take uint8 images."""

import re

import keras
import numpy as np

from tfdpx.models import (
    LeNet,
    NFResNet,
    ResNet20,
    ScatterCNN,
    ScatterLinear,
    SmallCNN,
    WideResNet,
)
from tfdpx.train.errors import UserError, checking_flags, did_you_mean

NAMES = (
    "small_cnn, scatter_linear, scatter_cnn, lenet, resnet_20, wrn_<depth>_<width> such as "
    "wrn_16_4, nf_resnet_<depth> such as nf_resnet_50"
)
_ON_FEATURES = {"scatter_linear": ScatterLinear, "scatter_cnn": ScatterCNN}
_BY_NAME = {"small_cnn": SmallCNN, "lenet": LeNet, "resnet_20": ResNet20, **_ON_FEATURES}
# The options of a WRN that the small CNN has, too.
_OF_SMALL_CNN = ("group_norm", "weight_standardization")
_WIDE_RESNET = re.compile(r"wrn_(\d+)_(\d+)")
_NF_RESNET = re.compile(r"nf_resnet_(\d+)")


def build(
    name,
    image_shape,
    num_classes,
    centre,
    deviation=None,
    *,
    variant="text",
    group_norm=True,
    weight_standardization=True,
    relu_first=False,
    skip_init=1.0,
):
    """Returns a model from uint8 images to logits.

    Its first layer maps a grey level x to `(x - centre) / deviation`. Because the model normalises,
    images travel to the device as bytes, and a saved model needs no preprocessing. Models on
    scattering features always take values from 0 to 1 instead.

    Args:
        name: One of the names in `NAMES`.
        image_shape: `(height, width, channels)`.
        num_classes: Number of logits.
        centre: Grey level that becomes 0, or a tuple with one for each channel.
        deviation: Difference of grey levels that becomes 1, or a tuple; `centre` by default.
        variant: "text" or "code": a WRN as De et al. (2022) describe it, or as in their code.
        group_norm: Bool, whether a WRN or the small CNN has group normalization.
        weight_standardization: Bool, whether their convolutions are weight-standardized.
        relu_first: Bool, whether a WRN has ReLU before each normalization.
        skip_init: Float, the initial scale of the branches of an NF-ResNet.

    Returns:
        A `keras.Model` from `[batch, height, width, channels]` uint8 to `[batch, num_classes]`.

    Raises:
        UserError: If there is no model with that name, or it cannot take images of that shape.
    """
    check_name(name)
    options = {
        "variant": variant,
        "group_norm": group_norm,
        "weight_standardization": weight_standardization,
        "relu_first": relu_first,
    }
    usual = {"variant": "text", "group_norm": True, "weight_standardization": True}
    for option, value in options.items():
        is_wide = _WIDE_RESNET.fullmatch(name)
        taken = is_wide or (name == "small_cnn" and option in _OF_SMALL_CNN)
        if not taken and value != usual.get(option, False):
            second_model = " and small_cnn" * (option in _OF_SMALL_CNN)
            raise UserError(
                f"Flag --{option} belongs to wrn_<depth>_<width>{second_model}. Received: "
                f"--model={name} --{option}={value}."
            )
    with checking_flags():
        body = _body(name, tuple(image_shape), num_classes, options, skip_init)
    if name in _ON_FEATURES:
        centre, deviation = 0.0, 255.0
    images = keras.Input(image_shape, dtype="uint8", name="image")
    centre, deviation = np.array(centre), np.array(centre if deviation is None else deviation)
    normalise = keras.layers.Rescaling(
        (1 / deviation).tolist(), offset=(-centre / deviation).tolist(), name="normalise"
    )
    return keras.Model(images, body(normalise(images)), name=name)


def is_name(name):
    """Returns whether there is a model with that name."""
    return name in _BY_NAME or bool(_WIDE_RESNET.fullmatch(name) or _NF_RESNET.fullmatch(name))


def check_name(name):
    """Raises UserError, before any data are read, unless there is a model with that name."""
    if not is_name(name):
        near = did_you_mean(name, [*_BY_NAME, "wrn_16_4", "nf_resnet_50"])
        raise UserError(
            f"There is no model {name!r}.{near} Received: --model={name}. Use one of: {NAMES}."
        )


def _body(name, input_shape, num_classes, options, skip_init):
    common = dict(num_classes=num_classes, input_shape=input_shape)
    norms = options["group_norm"]
    standardized = dict(weight_standardization=options["weight_standardization"])
    if wide_resnet := _WIDE_RESNET.fullmatch(name):
        depth, width = map(int, wide_resnet.groups())
        if options["variant"] == "code":
            standardized |= dict(use_gain=True, use_bias=True, projection_norm=True)
        return WideResNet(
            depth=depth,
            width=width,
            groups=16 if norms else None,
            norm_before_relu=options["variant"] == "text" and not options["relu_first"],
            **standardized,
            **common,
        )
    if name == "small_cnn":
        return SmallCNN(groups=4 if norms else None, **standardized, **common)
    if name in _BY_NAME:
        return _BY_NAME[name](**common)
    return NFResNet(int(_NF_RESNET.fullmatch(name)[1]), skip_init=skip_init, **common)
