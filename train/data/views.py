"""Random views of images for pre-training: turned, scaled, sheared, shifted, of other contrast."""

import tensorflow as tf


class RandomViews:
    """Random affine maps of the image plane, changes of contrast and brightness, and flips.

    The strengths are those of Dosovitskiy et al. 2014 and Chen et al. 2020 in kind; they are
    constants, chosen for no data set. As with `tfdpx.augment`, `draw` makes the random choices of
    the whole batch and `apply` follows them, so seed and step replay a view.

    Args:
        flip: Bool. Whether half of the views are mirrored. Not where left and right mean something.
        turn: Float, the largest rotation in radians.
        zoom: Float >= 1, the largest factor in size, and its inverse the smallest.
        shear: Float, the largest shift of a row by a pixel's distance from the centre.
        shift: Float, the largest shift along each axis as a part of the image.
        contrast: Float in [0, 1), the largest change of contrast around the middle grey.
        brightness: Float, the largest change of brightness in grey levels of 256.

    References:
        - [Chen et al., 2020](https://arxiv.org/abs/2002.05709), appendix A.
        - [Dosovitskiy et al., 2014](https://arxiv.org/abs/1406.6909), section 3.1.
    """

    _NUM_CHOICES = 9

    def __init__(
        self, flip=False, turn=0.35, zoom=1.3, shear=0.3, shift=0.15, contrast=0.3, brightness=20.0
    ):
        self.flip, self.turn, self.zoom, self.shear = flip, turn, zoom, shear
        self.shift, self.contrast, self.brightness = shift, contrast, brightness

    def draw(self, batch_size, augmult, seed):
        """Random choices for `augmult` views of each of `batch_size` images.

        Args:
            batch_size: Int or int tensor.
            augmult: Int, K.
            seed: int64 tensor of shape [2].

        Returns:
            float32 tensor [batch_size, K, 9], uniform in [-1, 1).
        """
        shape = tf.stack([batch_size, augmult, self._NUM_CHOICES])
        return tf.random.stateless_uniform(shape, seed, -1.0, 1.0, alg="philox")

    def apply(self, images, choices):
        """The views that `choices` describe; what lies outside of an image is its nearest edge.

        Args:
            images: uint8 tensor [B, H, W, C], H and W static.
            choices: float32 tensor [B, K, 9] from `draw`.

        Returns:
            uint8 tensor [B, K, H, W, C].
        """
        turn, high, wide, shear, down, right, contrast, brightness, mirror = (
            choice[..., tf.newaxis, tf.newaxis] for choice in tf.unstack(choices, axis=-1)
        )
        height, width = images.shape[1:3]
        y = tf.range(height, dtype=tf.float32)[:, tf.newaxis] - (height - 1) / 2
        x = tf.range(width, dtype=tf.float32) - (width - 1) / 2
        if self.flip:
            x = x * tf.sign(mirror)
        y, x = y * self.zoom**high, (x + self.shear * shear * y) * self.zoom**wide
        sine, cosine = tf.sin(self.turn * turn), tf.cos(self.turn * turn)
        rows = cosine * y - sine * x + (height - 1) / 2 + self.shift * height * down
        columns = sine * y + cosine * x + (width - 1) / 2 + self.shift * width * right
        views = _interpolated(tf.cast(images, tf.float32), rows, columns)
        contrast, brightness = contrast[..., tf.newaxis], brightness[..., tf.newaxis]
        views = (views - 127.5) * (1 + self.contrast * contrast) + 127.5
        views += self.brightness * brightness
        return tf.cast(tf.clip_by_value(tf.round(views), 0, 255), tf.uint8)


def _interpolated(images, rows, columns):
    """[B, K, h, w, C]: `images` [B, H, W, C] at the places `rows`, `columns` [B, K, h, w]."""
    batch, (height, width, channels) = tf.shape(images)[0], images.shape[1:]
    flat = tf.reshape(images, [batch, height * width, channels])
    total = 0.0
    rows = tf.clip_by_value(rows, 0.0, height - 1.0)
    columns = tf.clip_by_value(columns, 0.0, width - 1.0)
    top, left = tf.floor(rows), tf.floor(columns)
    for row, row_part in ((top, top + 1 - rows), (top + 1, rows - top)):
        for column, column_part in ((left, left + 1 - columns), (left + 1, columns - left)):
            place = tf.minimum(row, height - 1) * width + tf.minimum(column, width - 1)
            pixels = tf.gather(flat, tf.cast(place, tf.int32), axis=1, batch_dims=1)
            total += pixels * (row_part * column_part)[..., tf.newaxis]
    return total
