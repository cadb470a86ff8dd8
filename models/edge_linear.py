"""A linear classifier on fixed features, for budgets too small to learn features."""

import keras
import numpy as np

from tfdpx._arguments import check_image_shape, check_positive_integer


def EdgeLinear(num_classes, input_shape, directions=8, name="edge_linear"):
    """Builds a linear classifier on the strengths of oriented edges, which need no training.

    A frozen 3x3 convolution takes the derivative of each channel along `directions` directions
    (steered Sobel filters); ReLU, then normalisation of the whole image, then a dense layer that
    starts at zero. The noise of private training has as many dimensions as there are trained
    weights, so that at a small epsilon handcrafted features beat learned ones (Tramer & Boneh 2021,
    "Differentially Private Learning Needs Better Features"). The features depend on no data.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, each known.
        directions: Positive integer, directions per channel.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax and in float32 under mixed precision. Only the dense
        layer is trainable.

    Raises:
        ValueError: If `num_classes` or `directions` is not a positive integer, or `input_shape` is
            not `(height, width, channels)` with known sizes.
    """
    check_positive_integer("num_classes", num_classes)
    check_positive_integer("directions", directions)
    check_image_shape(input_shape, known=True)
    inputs = keras.Input(input_shape)
    edges = keras.layers.DepthwiseConv2D(
        3,
        padding="same",
        depth_multiplier=directions,
        use_bias=False,
        depthwise_initializer=keras.initializers.Constant(
            steered_sobel(input_shape[-1], directions)
        ),
        trainable=False,
        name="edges",
    )
    x = keras.layers.ReLU(name="relu")(edges(inputs))
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.LayerNormalization(scale=False, center=False, name="norm")(x)
    outputs = keras.layers.Dense(
        num_classes,
        kernel_initializer="zeros",
        dtype=keras.config.dtype_policy().variable_dtype,
        name="logits",
    )(x)
    return keras.Model(inputs, outputs, name=name)


def steered_sobel(channels, directions):
    """Derivatives along evenly spread directions, the same for each channel.

    Args:
        channels: Int.
        directions: Int, n.

    Returns:
        float32 array [3, 3, channels, n]: filter k is the derivative along the angle 2 pi k / n.
    """
    smooth, slope = np.array([1.0, 2.0, 1.0]) / 4, np.array([-1.0, 0.0, 1.0]) / 2
    across = np.outer(smooth, slope)
    angles = 2 * np.pi * np.arange(directions) / directions
    filters = np.cos(angles) * across[..., None] + np.sin(angles) * across.T[..., None]
    return np.repeat(filters[:, :, None, :], channels, axis=2).astype("float32")
