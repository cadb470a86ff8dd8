"""Normalizer-free residual networks."""

from __future__ import annotations

import math
from typing import Any

import keras

from tfdpx._arguments import check_choice, check_image_shape, check_positive_integer
from tfdpx.layers import SkipInit, WSConv2D
from tfdpx.models.head import gaussian, pooled_logits

# Bottleneck blocks of the four stages.
BLOCKS = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

# Of Brock et al.: the growth of the standard deviation that a block is allowed.
ALPHA = 0.2

# ReLU of a standard Gaussian has variance (1 - 1/pi) / 2; times this, it has variance one.
RELU_GAIN = math.sqrt(2.0 / (1.0 - 1.0 / math.pi))


def NFResNet(
    depth: int,
    num_classes: int,
    input_shape: Any = (224, 224, 3),
    width: int = 64,
    skip_init: float = 1.0,
    name: str | None = None,
) -> keras.Model:
    """Builds the normalizer-free residual network `NF-ResNet-depth` of Brock et al. (2021a).

    A pre-activation bottleneck ResNet in which scaled weight standardization and bookkeeping of
    variances do what batch normalization would, so that no example sees another. Block `l` adds

    `h + 0.2 * gain * f(h / beta)`

    with `beta` the standard deviation of `h` expected at initialisation, a trainable scalar `gain`
    (SkipInit) and a branch `f` that keeps the variance: ReLU, 1x1, ReLU, 3x3, ReLU and 1x1
    convolution, each with a gain and a bias for every filter, and each ReLU scaled by
    `sqrt(2 / (1 - 1/pi))`. With `skip_init=1`, which `beta` assumes, the variance grows by 0.04 a
    block. The first block of each of the four stages has a 1x1 convolution of `relu(h / beta)` in
    place of the skip path, which sets the variance back to one. A 7x7 convolution and max pooling,
    both with stride 2, come first; ReLU, global average pooling and a dense layer last. The last
    three stages halve the resolution. There is no dropout and no stochastic depth (De et al. 2022,
    C.1).

    Args:
        depth: Integer, number of convolutions and dense layers on the longest path: 50, 101, 152
            or 200; or 26, for small experiments.
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image; height and width may be None.
        width: Integer of at least 2, channels of the first convolution. The bottlenecks of the
            stages have 1, 2, 4 and 8 times as many, their outputs four times those.
        skip_init: Float, initial value of each block's scalar. 1 is what De et al. (2022, C.1)
            found better when training privately from scratch; Brock et al. use 0.
        name: String, name of the model. Defaults to `"nf_resnet_<depth>"`.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` of about zero mean
        and unit variance to logits `[batch, num_classes]`, without softmax and in float32 under
        mixed precision. With 1000 classes it has 25.6 (50), 44.5 (101), 60.2 (152) or 64.7 million
        (200) parameters: those of the ResNet with batch normalization, and a scalar a block.

    Raises:
        ValueError: If `depth` is not one of the above, if `num_classes` is not a positive integer,
            if `width` is not an integer of at least 2, or if `input_shape` is not
            `(height, width, channels)`.

    References:
        - [Brock et al., 2021a](https://arxiv.org/abs/2101.08692), section 3 and appendix A.
        - [De & Smith, 2020](https://arxiv.org/abs/2002.10444), for SkipInit.
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.3 and appendix C.1.
    """
    check_positive_integer("depth", depth)
    check_choice("depth", depth, sorted(BLOCKS))
    check_positive_integer("num_classes", num_classes)
    check_positive_integer("width", width)
    if width < 2:
        raise ValueError(
            "Argument `width` must be at least 2: standardizing the one weight of a 1x1 "
            f"convolution of one channel gives zero. Received: width={width}."
        )
    check_image_shape(input_shape)

    inputs = keras.Input(input_shape)
    x = _conv(width, 7, strides=2, name="stem")(inputs)
    x = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    variance = 1.0
    for stage, blocks in enumerate(BLOCKS[depth], start=1):
        bottleneck = width * 2 ** (stage - 1)
        for block in range(1, blocks + 1):
            x = _block(
                x,
                bottleneck,
                beta=math.sqrt(variance),
                strides=2 if stage > 1 and block == 1 else 1,
                project=block == 1,
                skip_init=skip_init,
                name=f"stage{stage}_block{block}",
            )
            # A projection sees h / beta and puts out variance one.
            variance = (1.0 if block == 1 else variance) + ALPHA**2
    x = _scaled_relu(x, name="head")
    outputs = pooled_logits(x, num_classes)
    return keras.Model(inputs, outputs, name=name or f"nf_resnet_{depth}")


def _block(x, bottleneck, beta, strides, project, skip_init, name):
    """Adds a bottleneck block to `x`, whose expected standard deviation is `beta`."""
    skip = x
    # ReLU commutes with the division by beta.
    x = _scaled_relu(x, name=f"{name}_1", beta=beta)
    if project:
        skip = _conv(4 * bottleneck, 1, strides=strides, name=f"{name}_skip")(x)
    x = _conv(bottleneck, 1, name=f"{name}_conv1")(x)
    x = _scaled_relu(x, name=f"{name}_2")
    x = _conv(bottleneck, 3, strides=strides, name=f"{name}_conv2")(x)
    x = _scaled_relu(x, name=f"{name}_3")
    x = _conv(4 * bottleneck, 1, name=f"{name}_conv3")(x)
    x = SkipInit(ALPHA, keras.initializers.Constant(skip_init), name=f"{name}_skip_init")(x)
    return keras.layers.Add(name=f"{name}_add")([skip, x])


def _scaled_relu(x, name, beta=1.0):
    """ReLU that keeps the variance of a Gaussian, divided by `beta`."""
    x = keras.layers.ReLU(name=f"{name}_relu")(x)
    return keras.layers.Rescaling(RELU_GAIN / beta, name=f"{name}_scale")(x)


def _conv(filters, kernel_size, strides=1, *, name):
    return WSConv2D(
        filters,
        kernel_size,
        strides=strides,
        padding="same",
        use_gain=True,
        kernel_initializer=gaussian(),
        name=name,
    )
