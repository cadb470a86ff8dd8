"""Builds image classifiers by name, which take uint8 images."""

import functools
import re
import typing

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
from tfdpx.train.defaults import AUTO, LINEAR_ON_FEATURES, OF_FILE
from tfdpx.train.objects import Objects


def _wide_resnet(
    depth,
    width,
    num_classes,
    input_shape,
    *,
    variant: typing.Literal["text", "code"] = "text",
    group_norm: bool = True,
    weight_standardization: bool = True,
    relu_first: bool = False,
):
    """Returns a `tfdpx.models.WideResNet`.

    Args:
        depth: Int, like `width` as in `wrn_<depth>_<width>`.
        width: Int.
        num_classes: Int.
        input_shape: `(height, width, channels)`.
        variant: "text", as De et al. (2022) describe it, or "code", as in their code, which has the
            accuracies that they quote.
        group_norm: Bool, whether it has group normalization.
        weight_standardization: Bool, whether its convolutions are weight-standardized.
        relu_first: Bool, whether ReLU comes before each normalization.
    """
    is_code = variant == "code"
    if is_code and (relu_first or not weight_standardization):
        raise ValueError(
            "Argument `variant` code says how the network is built: leave out `relu_first` and "
            "`weight_standardization`."
        )
    return WideResNet(
        depth=depth,
        width=width,
        num_classes=num_classes,
        input_shape=input_shape,
        groups=16 if group_norm else None,
        weight_standardization=weight_standardization,
        norm_before_relu=not (is_code or relu_first),
        use_gain=is_code,
        use_bias=is_code,
        projection_norm=is_code,
    )


def _small_cnn(
    num_classes, input_shape, *, group_norm: bool = True, weight_standardization: bool = True
):
    """Returns a `tfdpx.models.SmallCNN`.

    Args:
        num_classes: Int.
        input_shape: `(height, width, channels)`.
        group_norm: Bool, whether it has group normalization.
        weight_standardization: Bool, whether its convolutions are weight-standardized.
    """
    groups = 4 if group_norm else None
    return SmallCNN(
        num_classes, input_shape, groups=groups, weight_standardization=weight_standardization
    )


_ON_FEATURES = {"scatter_linear": ScatterLinear, "scatter_cnn": ScatterCNN}
_BY_NAME = {"small_cnn": _small_cnn, **_ON_FEATURES, "lenet": LeNet, "resnet_20": ResNet20}
_BY_NUMBERS = {r"wrn_(\d+)_(\d+)": _wide_resnet, r"nf_resnet_(\d+)": NFResNet}


def _find(name):
    """Returns the constructor of a model, or None."""
    for pattern, constructor in _BY_NUMBERS.items():
        if match := re.fullmatch(pattern, name):
            return functools.partial(constructor, *map(int, match.groups()))
    if name in (AUTO, LINEAR_ON_FEATURES, OF_FILE):  # `start_from` builds them.
        return object
    return _BY_NAME.get(name)


MODELS = Objects(
    "model",
    _find,
    (*_BY_NAME, "wrn_<depth>_<width> such as wrn_16_4", "nf_resnet_<depth> such as nf_resnet_50"),
    ("num_classes", "input_shape", "name"),
)


def build(text, image_shape, num_classes, centre, deviation=None):
    """Returns a model from uint8 images to logits.

    Its first layer maps a grey level x to `(x - centre) / deviation`. Because the model normalises,
    images travel to the device as bytes, and a saved model needs no preprocessing. Models on
    scattering features always take values from 0 to 1 instead.

    Args:
        text: String, a model of `MODELS` with its arguments.
        image_shape: `(height, width, channels)`.
        num_classes: Number of logits.
        centre: Grey level that becomes 0, or a tuple with one for each channel.
        deviation: Difference of grey levels that becomes 1, or a tuple; `centre` by default.

    Returns:
        A `keras.Model` from `[batch, height, width, channels]` uint8 to `[batch, num_classes]`.

    Raises:
        UserError: If there is no such model, or it cannot take images of that shape.
    """
    name = text.partition(":")[0]
    body = MODELS.make(text, num_classes=num_classes, input_shape=tuple(image_shape))
    if name in _ON_FEATURES:
        centre, deviation = 0.0, 255.0
    images = keras.Input(image_shape, dtype="uint8", name="image")
    centre, deviation = np.array(centre), np.array(centre if deviation is None else deviation)
    normalise = keras.layers.Rescaling(
        (1 / deviation).tolist(), offset=(-centre / deviation).tolist(), name="normalise"
    )
    return keras.Model(images, body(normalise(images)), name=name)
