"""More generated images than in `tfdpx.synthetic`, and random views of images."""

import numpy as np
import tensorflow as tf

from tfdpx.synthetic import Generator


class Shapes(Generator):
    """Two to six ellipses, rectangles and convex polygons with textures, on a textured ground.

    Each shape has a random place, size, direction and kind, and a random texture: plain, a slope
    between two colours, stripes, checks or grain (after Baradad et al. 2021, arXiv:2106.05963).
    """

    def draw(self, rng):
        """Draws one image `[height, width, channels]`; see `Generator.draw`."""
        height, width = self.image_size
        side = min(self.image_size)
        rows, columns = np.mgrid[:height, :width].astype("float64")
        image = _texture(rng, rows, columns, side, self.channels)
        for _ in range(rng.integers(2, 7)):
            down, right = rows - rng.uniform(-0.5, height), columns - rng.uniform(-0.5, width)
            angle = rng.uniform(0, 2 * np.pi)
            y = np.cos(angle) * down - np.sin(angle) * right
            x = np.sin(angle) * down + np.cos(angle) * right
            radius = rng.uniform(0.15, 0.4) * side
            inside = np.clip(0.5 - _outside(rng, x, y, radius), 0, 1)[..., None]
            image += inside * (_texture(rng, y, x, radius, self.channels) - image)
        return image


def _outside(rng, x, y, radius):
    """Draws a shape around the origin. Returns each pixel's distance from it, negative inside."""
    kind = rng.integers(3)
    flatness = rng.uniform(0.4, 1.0)
    if kind == 0:
        return _outside_ellipse(x, y, radius, flatness * radius)
    if kind == 1:
        reach = radius * np.array([1, flatness, 1, flatness])
        return _outside_polygon(x, y, np.arange(4) * np.pi / 2, reach / np.sqrt(2))
    sides = rng.integers(3, 7)
    # The angles of neighbouring sides differ by less than half a turn, so the polygon is bounded.
    angles = 2 * np.pi / sides * (np.arange(sides) + rng.uniform(-0.2, 0.2, size=sides))
    return _outside_polygon(x, y, angles, radius * rng.uniform(0.5, 0.8, size=sides))


def _outside_ellipse(x, y, a, b):
    """Returns the distance to an ellipse with half-axes `a` along x and `b` along y.

    The distance is negative inside. It is correct to first order, and exact on the outline and for
    circles.
    """
    level = np.hypot(x / a, y / b)
    slope = np.hypot(x / a**2, y / b**2) / np.maximum(level, 1e-12)
    return (level - 1) / np.maximum(slope, 1 / max(a, b))


def _outside_polygon(x, y, angles, reach):
    """Returns the distance of points from a polygon, negative inside.

    Args:
        x: Float array.
        y: Float array of the same shape.
        angles: Float array [k], the directions of the sides' outward normals in radians.
        reach: Float array [k], the distance of each side from the origin.

    Returns:
        Float array of the shape of `x`: the largest signed distance to the line of a side. Beyond a
        corner it is smaller than the distance to the polygon.
    """
    normals = zip(np.cos(angles), np.sin(angles), reach, strict=True)
    return np.max([cos * x + sin * y - far for cos, sin, far in normals], axis=0)


def _texture(rng, y, x, size, channels):
    """Returns a pattern of two colours, [..., channels]. Its details are about `size` wide."""
    first, second = rng.random([2, channels])
    kind = rng.integers(5)
    # Waves shorter than three pixels would look like noise.
    wave = max(rng.uniform(0.3, 1.2) * size, 3) / (2 * np.pi)
    phase = rng.uniform(0, 2 * np.pi)
    if kind == 0:
        mixture = np.zeros_like(x)
    elif kind == 1:
        mixture = np.clip(0.5 + x / (2 * size), 0, 1)
    elif kind == 2:
        mixture = _soft_step(np.sin(x / wave + phase), wave)
    elif kind == 3:
        mixture = _soft_step(np.sin(x / wave + phase) * np.sin(y / wave), wave)
    else:
        mixture = rng.random(x.shape)
    return first + mixture[..., None] * (second - first)


def _soft_step(values, wave):
    """Maps negative values to 0 and positive ones to 1, with a smooth edge about a pixel wide."""
    return np.clip(0.5 + values * wave, 0, 1)


class RandomViews:
    """Random affine maps of the image plane, changes of contrast and brightness, and flips.

    The kinds of changes follow Dosovitskiy et al. 2014 (arXiv:1406.6909) and Chen et al. 2020
    (arXiv:2002.05709). The default strengths were not tuned on any data set. `draw` makes the
    random choices for the whole batch, and `apply` computes the views. The same seed gives the same
    views again.

    Args:
        flip: Bool, whether half of the views are mirrored. Use False if left and right matter.
        turn: Float, the largest rotation in radians.
        zoom: Float >= 1. An object's size changes by a factor between `1 / zoom` and `zoom`.
        shear: Float, the largest horizontal shift of a pixel row, divided by the row's distance
            from the centre.
        shift: Float, the largest shift along each axis, as a fraction of the image's size.
        contrast: Float in [0, 1), the largest change of contrast around the middle grey.
        brightness: Float, the largest change of brightness, in grey levels from 0 to 255.
    """

    def __init__(
        self, flip=False, turn=0.35, zoom=1.3, shear=0.3, shift=0.15, contrast=0.3, brightness=20.0
    ):
        self.flip, self.turn, self.zoom, self.shear = flip, turn, zoom, shear
        self.shift, self.contrast, self.brightness = shift, contrast, brightness

    def draw(self, batch_size, augmult, seed):
        """Draws the random choices for `augmult` views of each image in a batch.

        Args:
            batch_size: Int or int tensor.
            augmult: Int, the number K of views of each image.
            seed: int64 tensor of shape [2].

        Returns:
            float32 tensor [batch_size, K, 9], uniform in [-1, 1).
        """
        shape = tf.stack([batch_size, augmult, 9])
        return tf.random.stateless_uniform(shape, seed, -1.0, 1.0, alg="philox")

    def apply(self, images, choices):
        """Returns the views that `choices` describe.

        A view may show places outside of the image. They have the colour of the nearest pixel.

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
    """Returns the images' colours at the positions `rows` and `columns`, interpolated.

    The positions are [B, K, h, w], the images [B, H, W, C], and the result is [B, K, h, w, C].
    """
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
