"""Builds classifiers on fixed features: scattering features, or the outputs of other models."""

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

    Each model in `extractors` computes features of the image. The features of each model are scaled
    to norm one, which gives all models the same weight, and then concatenated. The extractors must
    not have been trained on the private data; otherwise their features would reveal these data.
    Train the classifier like `ScatterLinear`, which has only one kind of features.

    Args:
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image, all fixed.
        extractors: List of `keras.Model`s. Each computes features `[batch, ...]` from images
            `[batch, height, width, channels]`. All sizes of the features except the batch size must
            be fixed. The function freezes these models: it sets `trainable` to False.
        name: String, the name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. There is no softmax, and logits are float32 under mixed precision.
        Only the dense layer is trainable. Its weights start at zero.

    Raises:
        ValueError: If an argument is invalid.

    Example:
    >>> import keras
    >>> from tfdpx import models
    >>> scatter = models.ScatterLinear(10, (8, 8, 1))
    >>> scatter = keras.Model(scatter.input, scatter.get_layer("whitening").output)
    >>> pixels = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    >>> model = models.LinearOnFeatures(10, (8, 8, 1), [scatter, pixels])
    >>> model.layers[-1].count_params()  # 10 outputs of 1296 + 64 features and a constant.
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
    """Scales features to norm one and applies a dense layer. Returns the logits.

    Args:
        features: Symbolic tensor `[batch, ...]`.
        num_classes: Int.

    Returns:
        Symbolic tensor `[batch, num_classes]`.
    """
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

    The features are the square root of the Morlet scattering transform of the image. They are
    whitened with statistics of *generated* images (`tfdpx.synthetic`) and scaled to norm one. Only
    the last layer is trained. The features of an image do not depend on other private data, so they
    cost no privacy.

    With a small privacy budget or few examples, these features are better than features that are
    learned privately. A private training adds noise to each trained weight. If features have norm
    one, the effect of this noise on a logit does not depend on the number of features.

    Train the model by `tfdpx.DPSGD` without momentum, with full batches
    (`batch_size=num_examples`), a small clip (for example 0.02) and a large learning rate.
    `tfdpx.train.classify --model=auto` chooses these settings.

    Args:
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image, all fixed.
        scales: Positive integer, J of the transform. The features have `2**J` times fewer positions
            per axis than the image. Defaults to 2 for images of up to 45 pixels, and to one more
            for each doubling of the size.
        directions: Positive integer, L of the transform.
        padding: "zeros" or "reflect", as for `tfdpx.layers.Scattering2D`.
        generator: The generator of `tfdpx.synthetic` that makes the images for whitening. Defaults
            to `DeadLeaves` with the size and channels of `input_shape`.
        name: String, the name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. Images must have values from 0 to 1. There is no softmax, and logits
        are float32 under mixed precision. Only the dense layer is trainable. Its weights start at
        zero.

    Raises:
        ValueError: If an argument is invalid, or height or width is less than `2**scales`.

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
    """Builds a small convolutional network on the fixed features of `ScatterLinear`.

    The network has 3x3 convolutions, each followed by group normalization and tanh, and a dense
    layer. After the first convolution, 2x2 max pooling halves the resolution if height and width
    are at least eight. The network can learn more than a linear classifier, but the noise affects
    it more, so it needs a larger privacy budget or more examples.

    Args:
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image, all fixed.
        filters: Sequence of integers, the number of channels of each convolution. They must be
            positive multiples of `groups`.
        groups: Positive integer, the number of groups of each normalization.
        scales: As for `ScatterLinear`.
        directions: As for `ScatterLinear`.
        padding: As for `ScatterLinear`.
        generator: As for `ScatterLinear`.
        name: String, the name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. Images must have values from 0 to 1. There is no softmax, and logits
        are float32 under mixed precision.

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


# Images with a side shorter than this number of pixels are enlarged before the transform.
_LEAST_SIDE = 16
# The number of images for whitening if they have up to 32x32 pixels; the least number, for large
# images; and the batch size. The batch size divides 1,500, because TensorFlow would trace again for
# a shorter last batch.
_MOST_IMAGES, _FEWEST_IMAGES, _BATCH = 1500, 100, 75


def scattering_features(input_shape, scales=None, directions=8, padding="zeros", generator=None):
    """Returns the inputs and the outputs of a functional model of whitened scattering features.

    The arguments are as for `ScatterLinear`.

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
    # Averages are never negative, except because of rounding errors.
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
    """Returns the default J of the transform. It leaves four to eleven positions per axis.

    Args:
        shorter_side: Int, the smaller of height and width in pixels.

    Returns:
        Int, at least 2.
    """
    scales = 2
    while shorter_side / 2**scales >= 11.5:
        scales += 1
    return scales
