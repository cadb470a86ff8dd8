"""Wide residual networks without batch normalization."""

from __future__ import annotations

import functools
from typing import Any

import keras

from tfdpx._arguments import check_image_shape, check_positive_integer
from tfdpx.layers import GroupNorm, WSConv2D
from tfdpx.models.head import gaussian, pooled_logits

STEM_CHANNELS = 16


def WideResNet(
    depth: int,
    width: int,
    num_classes: int,
    input_shape: Any = (32, 32, 3),
    groups: int = 16,
    weight_standardization: bool = True,
    use_gain: bool = False,
    use_bias: bool = False,
    relu_first: bool = False,
    name: str | None = None,
) -> keras.Model:
    """Builds the wide residual network `WRN-depth-width` of De et al. (2022).

    The network of Zagoruyko & Komodakis (2016) with every batch normalization replaced by group
    normalization, every convolution weight-standardized, no dropout, and every weight drawn from a
    Gaussian of variance `1/fan_in`. A 3x3 convolution to 16 channels is followed by three stages of
    `n = (depth - 4) / 6` pre-activation blocks with `16 * width`, `32 * width` and `64 * width`
    channels; the second and third stage halve the resolution. Then normalization, ReLU, global
    average pooling and a dense layer.

    A block computes `x + conv(relu(norm(conv(relu(norm(x))))))` with 3x3 convolutions.
    Normalization stands on the residual branch only, on which De et al. (2022, section 3.1)
    insist: the skip path carries `x` as it is, through a 1x1 convolution where the number of
    channels or the resolution changes.

    The authors' published code departs from the two papers' text, which is followed here, in these
    ways: it puts ReLU before the normalization (`relu_first=True` here), it has a ReLU and a
    normalization of its own before each 1x1 projection (and a projection in every first block), and
    its convolutions have a gain and a bias (`use_gain=True`, `use_bias=True` here). So does the
    network of Sander et al. (2023), without gain and weight standardization.

    Args:
        depth: Integer `6n + 4` with `n >= 1`: 10, 16, 22, 28, 34, 40, ...
        width: Positive integer, the factor by which the stages are wider than 16, 32 and 64.
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image; height and width may be None.
        groups: Integer, groups of each normalization, a divisor of 16; or None to leave the
            normalizations out.
        weight_standardization: Boolean, whether the convolutions are `tfdpx.layers.WSConv2D` or
            `keras.layers.Conv2D`.
        use_gain: Boolean, whether each filter has a learnable scale. Needs
            `weight_standardization`.
        use_bias: Boolean, whether the convolutions have a bias.
        relu_first: Boolean, whether ReLU stands before each normalization, the order of layers
            being convolution, ReLU, normalization; else convolution, normalization, ReLU.
        name: String, name of the model. Defaults to `"wide_resnet_<depth>_<width>"`.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax and in float32 under mixed precision.
        `WRN-16-4` has 2.75 million parameters, `WRN-40-4` 8.9 and `WRN-28-10` 36.5.

    Raises:
        ValueError: If `depth` is not `6n + 4`, if `groups` does not divide 16, if `use_gain` is
            asked for without `weight_standardization` or `relu_first` without `groups`, if `width`
            or `num_classes` is not a positive integer, or if `input_shape` is not `(height, width,
            channels)`.

    References:
        - [Zagoruyko & Komodakis, 2016](https://arxiv.org/abs/1605.07146).
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.1 and appendix C.1.
        - [Sander et al., 2023](https://arxiv.org/abs/2210.03403), with the order of `relu_first`.
    """
    _check_depth(depth)
    check_positive_integer("width", width)
    check_positive_integer("num_classes", num_classes)
    check_image_shape(input_shape)
    if groups is not None:
        check_positive_integer("groups", groups)
    if groups is not None and STEM_CHANNELS % groups:
        raise ValueError(
            f"Argument `groups` must divide {STEM_CHANNELS}, the channels of the first "
            f"normalization. Received: groups={groups}. Use 1, 2, 4, 8 or 16, or None."
        )
    if use_gain and not weight_standardization:
        raise ValueError(
            "Argument `use_gain` belongs to weight-standardized convolutions. Received: "
            "use_gain=True, weight_standardization=False. Leave one of them at its default."
        )
    if relu_first and groups is None:
        raise ValueError(
            "Argument `relu_first` is about the order of ReLU and normalization. Received: "
            "relu_first=True, groups=None. Leave one of them at its default."
        )
    conv_class = (
        functools.partial(WSConv2D, use_gain=use_gain)
        if weight_standardization
        else keras.layers.Conv2D
    )
    conv = functools.partial(
        conv_class, padding="same", use_bias=use_bias, kernel_initializer=gaussian()
    )

    norm_relu = functools.partial(_norm_relu, groups=groups, relu_first=relu_first)
    inputs = keras.Input(input_shape)
    x = conv(STEM_CHANNELS, 3, name="stem")(inputs)
    for stage, channels in enumerate((16 * width, 32 * width, 64 * width), start=1):
        for block in range(1, (depth - 4) // 6 + 1):
            strides = 2 if stage > 1 and block == 1 else 1
            x = _block(x, conv, norm_relu, channels, strides, name=f"stage{stage}_block{block}")
    x = norm_relu(x, name="head")
    outputs = pooled_logits(x, num_classes)
    return keras.Model(inputs, outputs, name=name or f"wide_resnet_{depth}_{width}")


def _block(x, conv, norm_relu, channels, strides, name):
    """Adds a pre-activation residual block of two 3x3 convolutions."""
    skip = x
    if strides != 1 or x.shape[-1] != channels:
        skip = conv(channels, 1, strides=strides, name=f"{name}_skip")(x)
    x = norm_relu(x, name=f"{name}_1")
    x = conv(channels, 3, strides=strides, name=f"{name}_conv1")(x)
    x = norm_relu(x, name=f"{name}_2")
    x = conv(channels, 3, name=f"{name}_conv2")(x)
    return keras.layers.Add(name=f"{name}_add")([skip, x])


def _norm_relu(x, groups, relu_first, name):
    layers = [keras.layers.ReLU(name=f"{name}_relu")]
    if groups is not None:
        layers.insert(1 if relu_first else 0, GroupNorm(groups, name=f"{name}_norm"))
    for layer in layers:
        x = layer(x)
    return x


def _check_depth(depth):
    """Raises ValueError unless `depth` is 6n + 4 with a positive integer n."""
    check_positive_integer("depth", depth)
    if depth < 10 or (depth - 4) % 6:
        below = max(10, depth - (depth - 4) % 6)
        nearest = f"{below}" if depth < 10 else f"{below} or {below + 6}"
        raise ValueError(
            "Argument `depth` must be 6n + 4 with n >= 1, for n blocks a stage. "
            f"Received: depth={depth}. The nearest: {nearest}."
        )
