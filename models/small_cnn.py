"""A small convolutional network for small images and small data sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdpx._arguments import check_image_shape, check_positive_integer
from tfdpx.layers import GroupNorm, WSConv2D


def SmallCNN(
    num_classes: int,
    input_shape: Any,
    filters: Sequence[int] = (32, 32, 64),
    groups: int = 4,
    weight_standardization: bool = True,
    name: str = "small_cnn",
) -> keras.Model:
    """Builds a plain stack of 3x3 convolutions with what De et al. (2022) found to help DP-SGD.

    Each convolution is weight-standardized and followed by group normalization and GELU; every
    convolution after the first halves the resolution. A dense layer reads the flattened rest. Few
    weights suffer little noise: the added noise has as many dimensions as the model has weights.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, each known.
        filters: Channels of each convolution, positive multiples of `groups`.
        groups: Positive integer, groups of each normalization; or None to leave the normalizations
            out.
        weight_standardization: Boolean, whether the convolutions are `tfdpx.layers.WSConv2D` or
            `keras.layers.Conv2D`.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax and in float32 under mixed precision.

    Raises:
        ValueError: If `filters` is empty or holds anything but positive multiples of `groups`, if
            `num_classes` or `groups` is not a positive integer, or if `input_shape` is not
            `(height, width, channels)` with known sizes.

    References:
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.1.
    """
    check_positive_integer("num_classes", num_classes)
    if groups is not None:
        check_positive_integer("groups", groups)
    check_image_shape(input_shape, known=True)
    if not filters or any(channels < 1 or channels % (groups or 1) for channels in filters):
        raise ValueError(
            "Argument `filters` must hold a positive multiple of `groups` for each convolution. "
            f"Received: filters={filters}, groups={groups}. Use, e.g., filters=(32, 32, 64)."
        )
    conv_class = WSConv2D if weight_standardization else keras.layers.Conv2D
    inputs = x = keras.Input(input_shape)
    for index, channels in enumerate(filters, start=1):
        x = conv_class(
            channels, 3, strides=1 if index == 1 else 2, padding="same", name=f"conv{index}"
        )(x)
        if groups is not None:
            x = GroupNorm(groups, name=f"norm{index}")(x)
        x = keras.layers.Activation("gelu", name=f"gelu{index}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    outputs = keras.layers.Dense(
        num_classes, dtype=keras.config.dtype_policy().variable_dtype, name="logits"
    )(x)
    return keras.Model(inputs, outputs, name=name)
