"""Builds convolutional networks without batch normalization."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras

from tfdpx._arguments import check_choice, check_image_shape, check_positive_integer, require
from tfdpx.layers import GroupNorm, SkipInit, WSConv2D


def gaussian():
    """Returns a new Gaussian initializer with the variance 1/fan_in."""
    return keras.initializers.VarianceScaling(1.0, "fan_in", "untruncated_normal")


def pooled_logits(x, num_classes):
    """Averages a feature map globally and applies a dense layer.

    Returns logits [batch, num_classes].

    Args:
        x: Symbolic tensor [batch, height, width, channels].
        num_classes: Int.
    """
    return logits(keras.layers.GlobalAveragePooling2D(name="pool")(x), num_classes)


def logits(x, num_classes):
    """Applies a dense layer to `x` [batch, features]. Returns logits [batch, num_classes]."""
    return logits_layer(num_classes, kernel_initializer=gaussian())(x)


def check_filters(filters, groups):
    """Raises ValueError unless all of `filters` are positive multiples of `groups`."""
    is_valid = len(filters) and all(count >= 1 and count % groups == 0 for count in filters)
    must = f"hold positive multiples of groups={groups}"
    require(is_valid, "filters", filters, must, " Use, e.g., filters=(64, 64).")


def logits_layer(num_classes, **arguments):
    """Returns a `Dense` layer named "logits".

    Under mixed precision the layer computes in float32, because the loss would be too inexact with
    16-bit logits.

    Args:
        num_classes: Int, the number of outputs.
        **arguments: More arguments of `keras.layers.Dense`.
    """
    dtype = keras.config.dtype_policy().variable_dtype
    return keras.layers.Dense(num_classes, dtype=dtype, name="logits", **arguments)


STEM_CHANNELS = 16


def WideResNet(
    depth: int,
    width: int,
    num_classes: int,
    input_shape: Any = (32, 32, 3),
    groups: int | None = 16,
    weight_standardization: bool = True,
    use_gain: bool = False,
    use_bias: bool = False,
    norm_before_relu: bool = True,
    projection_norm: bool = False,
    name: str | None = None,
) -> keras.Model:
    """Builds the wide residual network `WRN-depth-width` of De et al. (2022).

    This is the network of Zagoruyko & Komodakis (2016) with four changes: group normalization
    replaces batch normalization, all convolutions have weight standardization, there is no dropout,
    and the initial weights are Gaussian with the variance `1/fan_in`.

    The network begins with a 3x3 convolution to 16 channels. Three stages follow, and each stage
    has `n = (depth - 4) / 6` pre-activation blocks. The stages have `16 * width`, `32 * width` and
    `64 * width` channels, and the second and third stage halve the resolution. The network ends
    with normalization, ReLU, global average pooling and a dense layer.

    A block computes `x + conv(relu(norm(conv(relu(norm(x))))))` with 3x3 convolutions. The skip
    path has no normalization (De et al. 2022, section 3.1). It is `x` itself, or a 1x1 convolution
    of `x` if the block changes the number of channels or the resolution.

    The defaults follow the text of both papers. The published code of De et al., with which they
    measured accuracies, differs from their text. These arguments build the network of the code:
    >>> code = dict(use_gain=True, use_bias=True, norm_before_relu=False, projection_norm=True)
    >>> tfdpx.models.WideResNet(16, 4, 10, **code).count_params()
    2753818

    For the network of Sander et al. (2023), use the same arguments, but with `use_gain=False` and
    `weight_standardization=False`.

    Args:
        depth: Integer `6n + 4` with `n >= 1`: 10, 16, 22, 28, 34, 40, ...
        width: Positive integer. The stages have `width` times 16, 32 and 64 channels.
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image; height and width may be None.
        groups: Integer, the number of groups of each normalization, a divisor of 16; or None for
            no normalization.
        weight_standardization: Boolean, whether the convolutions are `tfdpx.layers.WSConv2D`
            instead of `keras.layers.Conv2D`.
        use_gain: Boolean, whether each filter has a trainable scale. Requires
            `weight_standardization`.
        use_bias: Boolean, whether the convolutions have a bias.
        norm_before_relu: Boolean. True for the order normalization, ReLU, convolution; False for
            ReLU, normalization, convolution.
        projection_norm: Boolean, whether the skip path of the first block in each of the three
            stages has a normalization, a ReLU and a 1x1 convolution.
        name: String, the name of the model. Defaults to `"wide_resnet_<depth>_<width>"`.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. There is no softmax, and logits are float32 under mixed precision.
        `WRN-16-4` has 2.75 million parameters, `WRN-40-4` has 8.9 million, and `WRN-28-10` has 36.5
        million.

    Raises:
        ValueError: If `depth` is not `6n + 4`, if `groups` does not divide 16, if `use_gain` is
            True without `weight_standardization`, if `norm_before_relu` or `projection_norm` is
            changed while `groups` is None, if `width` or `num_classes` is not a positive integer,
            or if `input_shape` is not `(height, width, channels)`.

    References:
        - [Zagoruyko & Komodakis, 2016](https://arxiv.org/abs/1605.07146).
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.1 and appendix C.1.
        - [Sander et al., 2023](https://arxiv.org/abs/2210.03403), with ReLU before normalization.
    """
    _check_depth(depth)
    check_positive_integer("width", width)
    check_positive_integer("num_classes", num_classes)
    check_image_shape(input_shape)
    if groups is not None:
        check_positive_integer("groups", groups)
        must = f"divide {STEM_CHANNELS}, the channels of the first normalization"
        hint = " Use 1, 2, 4, 8 or 16, or None."
        require(STEM_CHANNELS % groups == 0, "groups", groups, must, hint)
    must = "be False with weight_standardization=False"
    require(weight_standardization or not use_gain, "use_gain", use_gain, must)
    must = "keep its default with groups=None"
    require(groups or norm_before_relu, "norm_before_relu", norm_before_relu, must)
    require(groups or not projection_norm, "projection_norm", projection_norm, must)
    arguments: Any = dict(padding="same", use_bias=use_bias, kernel_initializer=gaussian())
    if weight_standardization:
        conv = functools.partial(WSConv2D, use_gain=use_gain, **arguments)
    else:
        conv = functools.partial(keras.layers.Conv2D, **arguments)
    norm_relu = functools.partial(_norm_relu, groups=groups, norm_before_relu=norm_before_relu)
    inputs = keras.Input(input_shape)
    x = conv(STEM_CHANNELS, 3, name="stem")(inputs)
    for stage, channels in enumerate((16 * width, 32 * width, 64 * width), start=1):
        for block in range(1, (depth - 4) // 6 + 1):
            place = f"stage{stage}_block{block}"
            strides = 2 if stage > 1 and block == 1 else 1
            is_normed = projection_norm and block == 1
            skip = norm_relu(x, name=f"{place}_skip") if is_normed else x
            if is_normed or x.shape[-1] != channels:
                skip = conv(channels, 1, strides=strides, name=f"{place}_skip")(skip)
            x = norm_relu(x, name=f"{place}_1")
            x = conv(channels, 3, strides=strides, name=f"{place}_conv1")(x)
            x = norm_relu(x, name=f"{place}_2")
            x = conv(channels, 3, name=f"{place}_conv2")(x)
            x = keras.layers.Add(name=f"{place}_add")([skip, x])
    x = norm_relu(x, name="head")
    outputs = pooled_logits(x, num_classes)
    return keras.Model(inputs, outputs, name=name or f"wide_resnet_{depth}_{width}")


def _norm_relu(x, groups, norm_before_relu, name):
    layers = [keras.layers.ReLU(name=f"{name}_relu")]
    if groups is not None:
        layers.insert(0 if norm_before_relu else 1, GroupNorm(groups, name=f"{name}_norm"))
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
            "Argument `depth` must be 6n + 4 with n >= 1, for n blocks per stage. "
            f"Received: depth={depth}. The nearest: {nearest}."
        )


# The number of bottleneck blocks in each of the four stages, by depth.
BLOCKS = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}

# The factor of the residual branch in Brock et al. Each block adds ALPHA^2 to the variance.
ALPHA = 0.2

# The ReLU of a standard Gaussian has the variance (1 - 1/pi) / 2. Scaled by this factor, it has
# variance one.
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

    This is a pre-activation bottleneck ResNet without batch normalization. Instead, it has scaled
    weight standardization, and the inputs of each block are divided by their expected standard
    deviation. So no example affects another. A block computes

    `h + 0.2 * gain * f(h / beta)`

    Here `beta` is the expected standard deviation of `h` before training, and `gain` is a trainable
    scalar (SkipInit). The branch `f` preserves the variance. It consists of ReLU, 1x1 convolution,
    ReLU, 3x3 convolution, ReLU and 1x1 convolution. Each convolution has a gain and a bias for
    every filter, and each ReLU is scaled by `sqrt(2 / (1 - 1/pi))`. With `skip_init=1`, the
    variance grows by 0.04 per block; `beta` is computed for this growth. In the first block of each
    of the four stages, a 1x1 convolution of `relu(h / beta)` replaces the skip path and resets the
    variance to one.

    The network begins with a 7x7 convolution and max pooling, both with stride 2. It ends with
    ReLU, global average pooling and a dense layer. The last three stages halve the resolution.
    There is no dropout and no stochastic depth (De et al. 2022, C.1).

    Args:
        depth: Integer, the number of convolutions and dense layers on the longest path: 50, 101,
            152 or 200; or 26, for small experiments.
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image; height and width may be None.
        width: Integer of at least 2, the number of channels of the first convolution. The
            bottlenecks of the four stages have 1, 2, 4 and 8 times as many channels, and the
            outputs of blocks have four times as many as their bottlenecks.
        skip_init: Float, the initial value of each block's scalar. De et al. (2022, C.1) found that
            1 is better for private training from scratch; Brock et al. use 0.
        name: String, the name of the model. Defaults to `"nf_resnet_<depth>"`.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. The pixels should have a mean of about zero and a variance of about
        one. There is no softmax, and logits are float32 under mixed precision. With 1000 classes
        the model has 25.6 million parameters at depth 50, 44.5 million at 101, 60.2 million at 152
        and 64.7 million at 200. These are as many as in the ResNet with batch normalization, plus
        one scalar per block.

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
    must = "be at least 2: standardizing the one weight of a 1x1 convolution of one channel is zero"
    require(width >= 2, "width", width, must)
    check_image_shape(input_shape)

    inputs = keras.Input(input_shape)
    x = _conv(width, 7, strides=2, name="stem")(inputs)
    x = keras.layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)
    variance = 1.0
    for stage, blocks in enumerate(BLOCKS[depth], start=1):
        bottleneck = width * 2 ** (stage - 1)
        for block in range(1, blocks + 1):
            x = _bottleneck_block(
                x,
                bottleneck,
                beta=math.sqrt(variance),
                strides=2 if stage > 1 and block == 1 else 1,
                project=block == 1,
                skip_init=skip_init,
                name=f"stage{stage}_block{block}",
            )
            # The projection of h / beta in the first block of a stage has variance one.
            variance = (1.0 if block == 1 else variance) + ALPHA**2
    x = _scaled_relu(x, name="head")
    outputs = pooled_logits(x, num_classes)
    return keras.Model(inputs, outputs, name=name or f"nf_resnet_{depth}")


def _bottleneck_block(x, bottleneck, beta, strides, project, skip_init, name):
    """Returns the output of a bottleneck block with input `x`; see `NFResNet`.

    Args:
        x: Symbolic tensor [batch, height, width, channels].
        bottleneck: Int, the number of channels of the bottleneck.
        beta: Float, the standard deviation of `x` that is expected before training.
        strides: Int, the factor by which the block reduces height and width.
        project: Bool, whether a 1x1 convolution replaces the skip path.
        skip_init: Float, the initial value of the scalar.
        name: String, the beginning of the names of layers.
    """
    skip = x
    # The division by beta may follow the ReLU, because beta is positive.
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
    """Returns the ReLU of `x / beta`, multiplied by `RELU_GAIN`.

    The result has variance one if `x` is Gaussian with standard deviation `beta`.
    """
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


def SmallCNN(
    num_classes: int,
    input_shape: Any,
    filters: Sequence[int] = (32, 32, 64),
    groups: int | None = 4,
    weight_standardization: bool = True,
    name: str = "small_cnn",
) -> keras.Model:
    """Builds a small convolutional network with methods that helped De et al. (2022).

    The network is a stack of 3x3 convolutions with weight standardization, each followed by group
    normalization and GELU. Each convolution after the first halves the resolution. At the end, the
    feature map is flattened, and a dense layer follows. The network is small, because noise is
    added to each weight.

    Args:
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image, all fixed.
        filters: Sequence of integers, the number of channels of each convolution. They must be
            positive multiples of `groups`.
        groups: Positive integer, the number of groups of each normalization; or None for no
            normalization.
        weight_standardization: Boolean, whether the convolutions are `tfdpx.layers.WSConv2D`
            instead of `keras.layers.Conv2D`.
        name: String, the name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`. There is no softmax, and logits are float32 under mixed precision.

    Raises:
        ValueError: If `filters` is empty or has a value that is not a positive multiple of
            `groups`, if `num_classes` or `groups` is not a positive integer, or if `input_shape` is
            not `(height, width, channels)` with fixed sizes.

    References:
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.1.
    """
    check_positive_integer("num_classes", num_classes)
    if groups is not None:
        check_positive_integer("groups", groups)
    check_image_shape(input_shape, with_size=True)
    check_filters(filters, groups or 1)
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
    outputs = logits_layer(num_classes)(x)
    return keras.Model(inputs, outputs, name=name)


def LeNet(
    num_classes: int = 10, input_shape: Any = (28, 28, 1), name: str = "lenet"
) -> keras.Model:
    """Builds LeNet-5 (LeCun et al., 1998), the network of the privacy audit of De et al. (2022).

    The network has two 5x5 convolutions (6 channels with padding, then 16 channels without), each
    followed by tanh and 2x2 average pooling. Dense layers with 120, 84 and `num_classes` outputs
    follow. Like most later versions, it leaves out three parts of the original: the trainable
    subsampling, the sparse connections of channels, and the radial basis outputs. Tanh bounds the
    activations, so large values in an example do not lead to large gradients.

    Args:
        num_classes: Positive integer, the number of outputs.
        input_shape: `(height, width, channels)` of one image, all fixed. Height and width must be
            at least 12.
        name: String, the name of the model.

    Returns:
        A `keras.Sequential` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax. It has 61,706 parameters with the default
        arguments.

    Raises:
        ValueError: If `num_classes` is not a positive integer, or if `input_shape` is not
            `(height, width, channels)` with height and width of at least 12.

    References:
        - [LeCun et al., 1998](https://doi.org/10.1109/5.726791).
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), appendix A.2.
    """
    check_positive_integer("num_classes", num_classes)
    check_image_shape(input_shape)
    is_large = all(size is not None and size >= 12 for size in input_shape[:2])
    must = "give a height and width of at least 12"
    hint = " Resize the images, e.g. with keras.layers.Resizing(28, 28)."
    require(is_large, "input_shape", input_shape, must, hint)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Conv2D(6, 5, padding="same", activation="tanh", name="conv1"),
            layers.AveragePooling2D(2, name="pool1"),
            layers.Conv2D(16, 5, activation="tanh", name="conv2"),
            layers.AveragePooling2D(2, name="pool2"),
            layers.Flatten(name="flatten"),
            layers.Dense(120, activation="tanh", name="dense1"),
            layers.Dense(84, activation="tanh", name="dense2"),
            logits_layer(num_classes),
        ],
        name=name,
    )
