"""The small convolutional network of the MNIST experiments."""

from __future__ import annotations

from typing import Any

import keras

from tfdpx._arguments import check_image_shape, check_positive_integer


def LeNet(
    num_classes: int = 10, input_shape: Any = (28, 28, 1), name: str = "lenet"
) -> keras.Model:
    """Builds LeNet-5 (LeCun et al., 1998), the model of the privacy audit of De et al. (2022).

    Two 5x5 convolutions (6 channels with padding, 16 without), each followed by tanh and 2x2
    average pooling, then dense layers of 120, 84 and `num_classes`. As in most later renderings,
    the trainable subsampling, the sparse channel connections and the radial basis outputs of 1998
    are left out. Tanh also bounds the activations, which keeps gradients from being dominated by
    a few large examples before clipping.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, each known; height and width at
            least 12.
        name: String, name of the model.

    Returns:
        A `keras.Sequential` from images `[batch, height, width, channels]` to logits
        `[batch, num_classes]`, without softmax; 61,706 parameters with the default arguments.

    Raises:
        ValueError: If `num_classes` is not a positive integer, or if `input_shape` is not
            `(height, width, channels)` with height and width of at least 12.

    References:
        - [LeCun et al., 1998](https://doi.org/10.1109/5.726791).
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), appendix A.2.
    """
    check_positive_integer("num_classes", num_classes)
    check_image_shape(input_shape)
    if any(size is None or size < 12 for size in input_shape[:2]):
        raise ValueError(
            "Argument `input_shape` must give a height and width of at least 12, so that something "
            f"is left after the second convolution. Received: input_shape={input_shape}. Resize "
            "the images, e.g. with keras.layers.Resizing(28, 28)."
        )
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
            layers.Dense(
                num_classes, dtype=keras.config.dtype_policy().variable_dtype, name="logits"
            ),
        ],
        name=name,
    )
