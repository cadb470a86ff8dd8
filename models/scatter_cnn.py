"""A small convolutional network on whitened scattering features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfdpx._arguments import check_positive_integer, require
from tfdpx.layers import GroupNorm
from tfdpx.models.scattering_features import scattering_features


def ScatterCNN(
    num_classes: int,
    input_shape: Any,
    filters: Sequence[int] = (64, 64),
    groups: int = 16,
    scales: int | None = None,
    directions: int = 8,
    padding: str = "zeros",
    generator: Any = None,
    name: str = "scatter_cnn",
) -> keras.Model:
    """Builds a small trained network on the fixed features of `tfdpx.models.ScatterLinear`.

    Convolutions of 3x3 with group normalization and tanh, the first after a pooling of 2x2 where
    there are eight positions or more, then a dense layer. It learns more than a linear classifier
    and feels more of the noise: for larger budgets and sets.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, each known.
        filters: Channels of each convolution, positive multiples of `groups`.
        groups: Positive integer, groups of each normalization.
        scales: As of `ScatterLinear`, like the arguments that follow.
        directions: As of `ScatterLinear`.
        padding: As of `ScatterLinear`.
        generator: As of `ScatterLinear`.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` with values from 0
        to 1 to logits `[batch, num_classes]`, without softmax and in float32 under mixed precision.

    Raises:
        ValueError: If an argument does not fit.

    References:
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), for networks on scattering
          features, and for tanh.
    """
    check_positive_integer("num_classes", num_classes)
    check_positive_integer("groups", groups)
    fits = len(filters) and all(n >= 1 and n % groups == 0 for n in filters)
    require(
        fits, "filters", filters, f"hold positive multiples of groups={groups}", " Use (64, 64)."
    )
    inputs, x = scattering_features(input_shape, scales, directions, padding, generator)
    for index, channels in enumerate(filters, start=1):
        x = keras.layers.Conv2D(channels, 3, padding="same", name=f"conv{index}")(x)
        x = GroupNorm(groups, name=f"norm{index}")(x)
        x = keras.layers.Activation("tanh", name=f"tanh{index}")(x)
        if index == 1 and min(x.shape[1:3]) >= 8:
            x = keras.layers.MaxPooling2D(2, name="pool")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    outputs = keras.layers.Dense(
        num_classes, dtype=keras.config.dtype_policy().variable_dtype, name="logits"
    )(x)
    return keras.Model(inputs, outputs, name=name)
