"""The residual network of He et al. for small images, with group normalization."""

from __future__ import annotations

from typing import Any

import keras

from tfdpx._arguments import check_image_shape, check_positive_integer, require
from tfdpx.layers import GroupNorm
from tfdpx.models.networks import logits

_FIRST_FILTERS = 16


def ResNet20(
    num_classes: int, input_shape: Any = (32, 32, 3), groups: int = 16, name: str = "resnet_20"
) -> keras.Model:
    """Builds the ResNet-20 of He et al. (2016) with group normalization.

    After a 3x3 convolution to 16 channels come three stages of three blocks. The stages have 16, 32
    and 64 channels, and the second and third stage halve the resolution. A block computes
    `relu(x + norm(conv(relu(norm(conv(x))))))`. The skip path has no weights: if the number of
    channels doubles, it keeps every second pixel of `x` and appends channels of zeros. Yu et al.
    (2022) train this network on CIFAR-10 and MNIST.

    Args:
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image; height and width may be None.
        groups: Positive integer, the number of groups of each normalization, a divisor of 16.
        name: String, the name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. There is no softmax, and logits are float32 under mixed precision.
        With 10 classes and 3 channels it has 269,722 parameters.

    Raises:
        ValueError: If an argument is invalid.

    References:
        - [He et al., 2016](https://arxiv.org/abs/1512.03385), section 4.2.
        - [Yu et al., 2022](https://arxiv.org/abs/2206.02617), appendix B.
    """
    check_positive_integer("num_classes", num_classes)
    check_positive_integer("groups", groups)
    check_image_shape(input_shape)
    require(_FIRST_FILTERS % groups == 0, "groups", groups, "divide 16", " Use 16, 8 or 4.")

    def conv(x, filters, strides=1):
        x = keras.layers.Conv2D(
            filters,
            3,
            strides=strides,
            padding="same",
            use_bias=False,
            kernel_initializer="he_normal",
        )(x)
        return GroupNorm(groups)(x)

    inputs = keras.Input(input_shape)
    x = keras.layers.ReLU()(conv(inputs, _FIRST_FILTERS))
    for stage in range(3):
        for block in range(3):
            halved = stage > 0 and block == 0
            filters, strides = _FIRST_FILTERS * 2**stage, 2 if halved else 1
            skip = x
            if halved:
                skip = keras.layers.MaxPooling2D(1, strides=2, padding="same")(x)
                zeros = keras.layers.Rescaling(0.0)(skip)
                skip = keras.layers.Concatenate()([skip, zeros])
            x = conv(keras.layers.ReLU()(conv(x, filters, strides)), filters)
            x = keras.layers.ReLU()(keras.layers.Add()([x, skip]))
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, logits(x, num_classes), name=name)
