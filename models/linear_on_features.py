"""A linear classifier on the fixed features of several models, side by side."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdpx._arguments import check_image_shape, check_positive_integer, require
from tfdpx.layers import UnitNormWithConstant


def LinearOnFeatures(
    num_classes: int, input_shape: Any, extractors: Any, name: str = "linear_on_features"
) -> keras.Model:
    """Builds a linear classifier on features of which none is trained.

    Each model of `extractors` gives its features of the image. They are scaled to norm one, each
    kind by itself, so that all kinds have the same weight, and put side by side. What the
    extractors learned they must have learned without the private data: then the features spend no
    privacy. Train it as `ScatterLinear`, which is the same with one kind of features.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, each known.
        extractors: List of `keras.Model`, each from images `[batch, height, width, channels]` to
            features `[batch, ...]`, whose sizes are known but for the batch. They are frozen here:
            `trainable` becomes False.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax and in float32 under mixed precision. Only its dense
        layer, which starts at zero, is trainable.

    Raises:
        ValueError: If an argument does not fit.

    Example:
    >>> import keras
    >>> from tfdpx import models
    >>> scatter = models.ScatterLinear(10, (8, 8, 1))
    >>> scatter = keras.Model(scatter.input, scatter.get_layer("whitening").output)
    >>> pixels = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    >>> models.LinearOnFeatures(10, (8, 8, 1), [scatter, pixels]).count_params() - 6561 - 1296
    13610

    References:
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), for private linear models on
          fixed features.
    """
    check_positive_integer("num_classes", num_classes)
    check_image_shape(input_shape, known=True)
    fits = isinstance(extractors, (list, tuple)) and len(extractors) > 0
    fits = fits and all(isinstance(extractor, keras.Model) for extractor in extractors)
    require(fits, "extractors", extractors, "be a list of one keras.Model or more")
    inputs = keras.Input(input_shape)
    kinds = []
    for extractor in extractors:
        extractor.trainable = False
        features = extractor(inputs)
        if None in features.shape[1:]:
            raise ValueError(
                f"The features of {extractor.name!r} must have known sizes. Received: features of "
                f"shape {features.shape}. Give keras.Input all sizes but the batch."
            )
        rows = keras.layers.Reshape((math.prod(features.shape[1:]),))(features)
        kinds.append(keras.layers.UnitNormalization()(rows))
    outputs = linear(keras.layers.Concatenate()(kinds) if kinds[1:] else kinds[0], num_classes)
    return keras.Model(inputs, outputs, name=name)


def linear(features, num_classes):
    """Logits `[batch, num_classes]` of symbolic `features` `[batch, ...]`, scaled to norm one."""
    rows = UnitNormWithConstant(name="unit_norm")(features)
    return keras.layers.Dense(
        num_classes,
        use_bias=False,
        kernel_initializer="zeros",
        dtype=keras.config.dtype_policy().variable_dtype,
        name="logits",
    )(rows)
