"""Crops and flips of images.

Reference: De et al. 2022 (arXiv:2204.13650), section 3.1 and appendix C.2.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdpx._arguments import is_integer, is_number, require
from tfdpx.augment._draws import draw_below


@keras.saving.register_keras_serializable(package="tfdpx")
class RandomCropFlip:
    """Makes views by random crops of the mirror-padded image, and random horizontal flips.

    A view is the image, shifted by up to `padding` pixels along each axis. Pixels from outside of
    the image are filled by reflection. With probability one half the view is flipped left to right.
    This is the CIFAR-10 augmentation of De et al. 2022, appendix C.2.

    Args:
        padding: Int, the number of pixels of mirror padding on each edge. It must be smaller than
            the image.
        flip: Bool, whether to flip. Pass False if left and right have a meaning, as in digits.

    Raises:
        ValueError: If `padding` is not an int >= 0.

    Example:
    >>> augment = RandomCropFlip(padding=4)
    >>> choices = augment.draw(batch_size=2, augmult=16, seed=tf.constant([1, 2], tf.int64))
    >>> augment.apply(tf.zeros([2, 32, 32, 3], tf.uint8), choices).shape
    TensorShape([2, 16, 32, 32, 3])
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        require(is_integer(padding, 0), "padding", padding, "be an int >= 0 (pixels)")
        self.padding = padding
        self.flip = bool(flip)

    def draw(self, batch_size: int, augmult: int, seed: tf.Tensor) -> Any:
        """Draws random choices for `augmult` views of each of `batch_size` examples.

        Args:
            batch_size: Int or int tensor, the number of examples.
            augmult: Int, the number K of views of each example.
            seed: int64 tensor of shape [2].

        Returns:
            int32 tensor [batch_size, K, 3]: the offsets of rows and columns, and 1 for a flip.
        """
        return draw_below(
            [2 * self.padding + 1, 2 * self.padding + 1, 2], batch_size, augmult, seed
        )

    def apply(self, images: tf.Tensor, choices: Any) -> tf.Tensor:
        """Returns the views of `images` that `choices` describe.

        Args:
            images: Tensor [B, H, W, C] of any dtype.
            choices: int32 tensor [B, K, 3] from `draw`.

        Returns:
            Tensor [B, K, H, W, C] of the dtype of `images`.
        """
        _check_images(self, images)
        height, width = images.shape[1:3]
        if self.padding >= min(height, width):
            raise ValueError(
                f"Argument `padding` of RandomCropFlip must be smaller than the image. Received: "
                f"padding={self.padding} for images of {height} x {width} pixels."
            )
        rows = _reflect(choices[..., 0:1] - self.padding + tf.range(height), height)
        columns = _reflect(choices[..., 1:2] - self.padding + tf.range(width), width)
        return _take(images, rows, columns, choices[..., 2:3] if self.flip else 0)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        return {"padding": self.padding, "flip": self.flip}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RandomCropFlip:
        """Builds the augmentation from `get_config()`."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfdpx")
class ResizeCropFlip:
    """Makes views of photographs by a resize, random crops, and random horizontal flips.

    An image is first resized to `scale` times the height and width of a view. A view is a random
    crop of this resized image, flipped left to right with probability one half. This is the
    ImageNet and Places-365 augmentation of De et al. 2022, appendix C.2. The model must take images
    of `height` x `width`. For evaluation, resize images to this size.

    The results of the resize equal those of the bilinear `tf.image.resize(antialias=True)`, but XLA
    can compile it. If images already have the larger size, they are not resized. So you can save
    time by storing images in this size.

    Args:
        height: Int, the height of a view in pixels, for example 224.
        width: Optional int, the width of a view in pixels. Defaults to `height`.
        scale: Float >= 1, the size of the resized image divided by the size of a view. The resized
            image has a whole number of pixels.
        flip: Bool, whether to flip.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self, height: int, width: int | None = None, scale: float = 1.2, flip: bool = True
    ) -> None:
        width = height if width is None else width
        for name, value in (("height", height), ("width", width)):
            require(is_integer(value, 1), name, value, "be an int >= 1 (pixels)")
        is_valid = is_number(scale) and 1 <= scale < math.inf
        must = "be a finite float >= 1, because views are cut from the resized image"
        require(is_valid, "scale", scale, must)
        self.height, self.width = height, width
        self.scale = float(scale)
        self.flip = bool(flip)

    def draw(self, batch_size: int, augmult: int, seed: tf.Tensor) -> Any:
        """Draws random choices for `augmult` views of each of `batch_size` examples.

        Args:
            batch_size: Int or int tensor, the number of examples.
            augmult: Int, the number K of views of each example.
            seed: int64 tensor of shape [2].

        Returns:
            int32 tensor [batch_size, K, 3]: the offsets of rows and columns, and 1 for a flip.
        """
        height, width = self._resized()
        counts = [height - self.height + 1, width - self.width + 1, 2]
        return draw_below(counts, batch_size, augmult, seed)

    def apply(self, images: tf.Tensor, choices: Any) -> tf.Tensor:
        """Returns the views of `images` that `choices` describe.

        Args:
            images: Tensor [B, H, W, C] of any dtype, with fixed H and W. Integer images are rounded
                after the resize and keep their dtype.
            choices: int32 tensor [B, K, 3] from `draw`.

        Returns:
            Tensor [B, K, height, width, C] of the dtype of `images`.
        """
        _check_images(self, images)
        rows = choices[..., 0:1] + tf.range(self.height)
        columns = choices[..., 1:2] + tf.range(self.width)
        images = _resize(images, *self._resized())
        return _take(images, rows, columns, choices[..., 2:3] if self.flip else 0)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        return {
            "height": self.height,
            "width": self.width,
            "scale": self.scale,
            "flip": self.flip,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ResizeCropFlip:
        """Builds the augmentation from `get_config()`."""
        return cls(**config)

    def _resized(self):
        return round(self.scale * self.height), round(self.scale * self.width)


def _check_images(augment, images):
    if images.shape.rank != 4 or not images.shape[1:3].is_fully_defined():
        raise ValueError(
            f"{type(augment).__name__} needs images of shape [batch, height, width, channels] and "
            f"of one size. Received: shape={tuple(images.shape)}"
        )


def _take(images, rows, columns, flipped):
    """Returns views that consist of some rows and columns of each image.

    Args:
        images: Tensor [B, H, W, C].
        rows: int32 tensor [B, K, h], the rows of the image for each view.
        columns: int32 tensor [B, K, w], the columns of the image for each view.
        flipped: int32 tensor [B, K, 1], or an int. 1 flips a view left to right.

    Returns:
        Tensor [B, K, h, w, C].
    """
    columns = tf.where(tf.equal(flipped, 1), tf.reverse(columns, [-1]), columns)
    views = tf.gather(images, rows, axis=1, batch_dims=1)
    return tf.gather(views, columns, axis=3, batch_dims=2)


def _resize(images, height, width):
    """Returns images [B, H, W, C] resized to [B, height, width, C], with the same dtype."""
    if images.shape[1:3] == [height, width]:
        return images

    # XLA cannot compile the antialiased resize. The resize is linear and separable, so it equals a
    # product with two matrices. The columns of a matrix are resized unit vectors.
    def matrix(old, new):
        units = tf.eye(old)[:, :, tf.newaxis]
        return tf.image.resize(units, [new, old], antialias=True)[..., 0].numpy()

    with tf.init_scope():
        down, across = matrix(images.shape[1], height), matrix(images.shape[2], width)
    resized = tf.einsum("ih,bhwc->biwc", down, tf.cast(images, "float32"))
    resized = tf.einsum("jw,biwc->bijc", across, resized)
    return tf.cast(tf.round(resized) if images.dtype.is_integer else resized, images.dtype)


def _reflect(index, size):
    """Mirrors indices in (-size, 2*size-1) into [0, size), without repeating the edge."""
    index = tf.abs(index)
    return tf.minimum(index, 2 * (size - 1) - index)
