"""Scattering features of images, whitened by generated ones."""

import keras

from tfdpx._arguments import check_image_shape
from tfdpx.layers import ChannelWhitening, Scattering2D
from tfdpx.synthetic import DeadLeaves

# The least side that is transformed; smaller images are enlarged to it.
_LEAST_SIDE = 16
# Whitening sees so many images of 32x32, fewer of larger ones, and so many at least.
_MOST_IMAGES, _FEWEST_IMAGES = 1500, 100


def scattering_features(input_shape, scales=None, directions=8, padding="zeros", generator=None):
    """Inputs and whitened features of a functional model; see `ScatterLinear`.

    Returns:
        `keras.Input` of `input_shape`, and a symbolic tensor `[batch, height', width', channels']`.
    """
    check_image_shape(input_shape, known=True)
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
    # Averages of values from 0 to 1 are not negative, but by rounding.
    x = keras.ops.sqrt(keras.ops.relu(x))
    whitening = ChannelWhitening(name="whitening")
    pixels = input_shape[0] * input_shape[1]
    if generator is None:
        generator = DeadLeaves(tuple(input_shape[:2]), channels=channels)
    whitening.adapt(
        generator,
        num_images=max(min(_MOST_IMAGES, _MOST_IMAGES * 32**2 // pixels), _FEWEST_IMAGES),
        features=keras.Model(inputs, x),
    )
    return inputs, whitening(x)


def default_scales(shorter_side):
    """Int: the J that leaves four to eleven positions along an axis of so many pixels, 2 at least.

    Args:
        shorter_side: Int, pixels.
    """
    scales = 2
    while shorter_side / 2**scales >= 11.5:
        scales += 1
    return scales
