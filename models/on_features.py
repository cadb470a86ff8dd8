"""Classifiers on fixed features: of scattering with whitening by generated images, or of models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfdpx._arguments import check_image_shape, check_positive_integer, require
from tfdpx.layers import ChannelWhitening, GroupNorm, Scattering2D, UnitNormWithConstant
from tfdpx.models.networks import check_filters, logits_layer
from tfdpx.synthetic import DeadLeaves


def LinearOnFeatures(
    num_classes: int, input_shape: Any, extractors: Any, name: str = "linear_on_features"
) -> keras.Model:
    """Builds a linear classifier on fixed features.

    Each model of `extractors` computes features of the image. Each kind is scaled to norm one
    separately, which gives all kinds the same weight, and they are concatenated. The extractors
    must not have been trained on the private data, because only then do the features spend no
    privacy. Train it like `ScatterLinear`, which is the same with one kind of features.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, all known.
        extractors: List of `keras.Model`, each from images `[batch, height, width, channels]` to
            features `[batch, ...]` with known sizes except the batch. They are frozen here:
            `trainable` becomes False.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax and in float32 under mixed precision. Only its dense
        layer, which starts at zero, is trainable.

    Raises:
        ValueError: If an argument is invalid.

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
    check_image_shape(input_shape, with_size=True)
    is_valid = isinstance(extractors, (list, tuple)) and len(extractors) > 0
    is_valid = is_valid and all(isinstance(extractor, keras.Model) for extractor in extractors)
    require(is_valid, "extractors", extractors, "be a list of one keras.Model or more")
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
    """Returns logits `[batch, num_classes]` of symbolic `features` `[batch, ...]` at norm one."""
    rows = UnitNormWithConstant(name="unit_norm")(features)
    return logits_layer(num_classes, use_bias=False, kernel_initializer="zeros")(rows)


def ScatterLinear(
    num_classes: int,
    input_shape: Any,
    scales: int | None = None,
    directions: int = 8,
    padding: str = "zeros",
    generator: Any = None,
    name: str = "scatter_linear",
) -> keras.Model:
    """Builds a linear classifier on fixed scattering features.

    The features are a Morlet scattering transform of the image, its square root, whitened with the
    statistics of *generated* images (`tfdpx.synthetic`), and scaled to norm one. Only the last
    layer is trained. The features are made without data, so they spend no privacy. At small budgets
    and on small sets they beat features that a private training learns, because its noise has as
    many dimensions as there are trained weights, while with features of norm one its effect on a
    logit does not depend on their number.

    Train it with full batches (`batch_size=num_examples`), plain `tfdpx.DPSGD` without momentum, a
    small clip, for example 0.02, and a large learning rate; `tfdpx.train.classify --model=auto`
    chooses them.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, all known.
        scales: Positive integer, J of the transform, which keeps `2**J` times fewer positions per
            axis. Defaults to 2 for images of up to 45 pixels, and one more for each doubling.
        directions: Positive integer, L of the transform.
        padding: "zeros" or "reflect", as for `tfdpx.layers.Scattering2D`.
        generator: The `tfdpx.synthetic` generator of the images for whitening. Defaults to
            `DeadLeaves` with the size and channels of `input_shape`.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` with values from 0
        to 1 to logits `[batch, num_classes]`, without softmax and in float32 under mixed precision.
        Only its dense layer, which starts at zero, is trainable.

    Raises:
        ValueError: If an argument is invalid, or the image is smaller than `2**scales`.

    References:
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), for linear models on scattering
          features.
        - [Bruna & Mallat, 2013](https://arxiv.org/abs/1203.1513), for the transform.
    """
    check_positive_integer("num_classes", num_classes)
    inputs, features = scattering_features(input_shape, scales, directions, padding, generator)
    outputs = linear(features, num_classes)
    return keras.Model(inputs, outputs, name=name)


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

    Convolutions of 3x3 with group normalization and tanh, the first after a pooling of 2x2 if
    there are eight positions or more, then a dense layer. It is for larger budgets and sets,
    because it learns more than a linear classifier but suffers more from the noise.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, all known.
        filters: Channels of each convolution, positive multiples of `groups`.
        groups: Positive integer, groups of each normalization.
        scales: As for `ScatterLinear`, like the following arguments.
        directions: As for `ScatterLinear`.
        padding: As for `ScatterLinear`.
        generator: As for `ScatterLinear`.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` with values from 0
        to 1 to logits `[batch, num_classes]`, without softmax and in float32 under mixed precision.

    Raises:
        ValueError: If an argument is invalid.

    References:
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), for networks on scattering
          features, and for tanh.
    """
    check_positive_integer("num_classes", num_classes)
    check_positive_integer("groups", groups)
    check_filters(filters, groups)
    inputs, x = scattering_features(input_shape, scales, directions, padding, generator)
    for index, channels in enumerate(filters, start=1):
        x = keras.layers.Conv2D(channels, 3, padding="same", name=f"conv{index}")(x)
        x = GroupNorm(groups, name=f"norm{index}")(x)
        x = keras.layers.Activation("tanh", name=f"tanh{index}")(x)
        if index == 1 and min(x.shape[1:3]) >= 8:
            x = keras.layers.MaxPooling2D(2, name="pool")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    outputs = logits_layer(num_classes)(x)
    return keras.Model(inputs, outputs, name=name)


# The smallest side that is transformed; smaller images are enlarged to it.
_LEAST_SIDE = 16
# Number of 32x32 images for whitening, fewer if they are larger, and the least number; in batches
# that divide 1,500: a shorter one at the end is traced again.
_MOST_IMAGES, _FEWEST_IMAGES, _BATCH = 1500, 100, 75


def scattering_features(input_shape, scales=None, directions=8, padding="zeros", generator=None):
    """Returns inputs and whitened features of a functional model; see `ScatterLinear`.

    Returns:
        `keras.Input` of `input_shape`, and a symbolic tensor `[batch, height', width', channels']`.
    """
    check_image_shape(input_shape, with_size=True)
    height, width, channels = input_shape
    inputs = keras.Input(input_shape)
    x, shorter = inputs, min(height, width)
    if shorter < _LEAST_SIDE:
        factor = _LEAST_SIDE / shorter
        height, width = round(factor * height), round(factor * width)
        x = keras.layers.Resizing(height, width, interpolation="bilinear", name="enlarge")(x)
    if scales is None:
        scales = default_scales(min(height, width))
    x = Scattering2D(scales, directions, padding=padding, name="scattering")(x)
    # Averages of values from 0 to 1 are negative only by rounding.
    x = keras.ops.sqrt(keras.ops.relu(x))
    whitening = ChannelWhitening(name="whitening")
    pixels = input_shape[0] * input_shape[1]
    if generator is None:
        generator = DeadLeaves(tuple(input_shape[:2]), channels=channels)
    whitening.adapt(
        generator,
        num_images=max(min(_MOST_IMAGES, _MOST_IMAGES * 32**2 // pixels), _FEWEST_IMAGES),
        features=keras.Model(inputs, x),
        batch_size=_BATCH,
    )
    return inputs, whitening(x)


def default_scales(shorter_side):
    """Returns the J, at least 2, that leaves four to eleven positions along an axis.

    Args:
        shorter_side: Int, pixels.
    """
    scales = 2
    while shorter_side / 2**scales >= 11.5:
        scales += 1
    return scales
