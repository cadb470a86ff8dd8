"""Filled polygons and ellipses with textures, one on the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdpx.synthetic.generator import Generator, range_of


@keras.saving.register_keras_serializable(package="tfdpx")
class Shapes(Generator):
    """Ellipses, rectangles and convex polygons with textures, on a textured ground, antialiased.

    Each shape has a random place, size, direction and kind, and so has its texture: plain, a slope
    between two colours, stripes, checks or grain. Later shapes hide earlier ones.

    Args:
        image_size: Positive int, or a pair of them: height and width in pixels.
        channels: Positive int. Colours are uniform in [0, 1] a channel.
        seed: Int >= 0.
        shapes: Int >= 1, or a pair `(low, high)`: the number of shapes of an image.
        radius: Number between 0.01 and 1, or a pair `(low, high)`: half the size of a shape as a
            part of the shorter side, uniform between.

    Raises:
        ValueError: If an argument does not fit; the error names it.

    Example:
    >>> Shapes(image_size=48, channels=3).images(5).shape
    (5, 48, 48, 3)

    References:
        - [Baradad et al., 2021](https://arxiv.org/abs/2106.05963), "Learning to see by looking at
          noise": dead leaves of several shapes, with textures.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 32,
        channels: int = 1,
        seed: int = 0,
        shapes: tuple[int, int] = (2, 6),
        radius: tuple[float, float] = (0.15, 0.4),
    ) -> None:
        super().__init__(image_size, channels, seed)
        self.shapes = range_of("shapes", shapes, (2, 6), 1, whole=True)
        self.radius = range_of("radius", radius, (0.15, 0.4), 0.01, 1)

    def draw(self, rng: np.random.Generator) -> Any:
        """One image `[height, width, channels]`; see `Generator.draw`."""
        height, width = self.image_size
        side = min(self.image_size)
        rows, columns = np.mgrid[:height, :width].astype("float64")
        image = _texture(rng, rows, columns, side, self.channels)
        for _ in range(rng.integers(self.shapes[0], self.shapes[1] + 1)):
            down, right = rows - rng.uniform(-0.5, height), columns - rng.uniform(-0.5, width)
            angle = rng.uniform(0, 2 * np.pi)
            y = np.cos(angle) * down - np.sin(angle) * right
            x = np.sin(angle) * down + np.cos(angle) * right
            radius = rng.uniform(*self.radius) * side
            inside = coverage(_outside(rng, x, y, radius))[..., None]
            image += inside * (_texture(rng, y, x, radius, self.channels) - image)
        return image

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, as a JSON-serialisable dict."""
        return {**super().get_config(), "shapes": list(self.shapes), "radius": list(self.radius)}


def _outside(rng, x, y, radius):
    """How far each pixel lies outside of a shape of a random kind around the origin."""
    kind = rng.integers(3)
    flatness = rng.uniform(0.4, 1.0)
    if kind == 0:
        return outside_ellipse(x, y, radius, flatness * radius)
    if kind == 1:
        reach = radius * np.array([1, flatness, 1, flatness])
        return outside_polygon(x, y, np.arange(4) * np.pi / 2, reach / np.sqrt(2))
    sides = rng.integers(3, 7)
    # Neighbouring sides differ by less than half a turn, so that the polygon is bounded.
    angles = 2 * np.pi / sides * (np.arange(sides) + rng.uniform(-0.2, 0.2, size=sides))
    return outside_polygon(x, y, angles, radius * rng.uniform(0.5, 0.8, size=sides))


def outside_ellipse(x, y, a, b):
    """Distance to the ellipse of half-axes `a` along x and `b` along y, negative inside.

    To first order: it is exact on the outline, and for circles.
    """
    level = np.hypot(x / a, y / b)
    slope = np.hypot(x / a**2, y / b**2) / np.maximum(level, 1e-12)
    return (level - 1) / np.maximum(slope, 1 / max(a, b))


def outside_polygon(x, y, angles, reach):
    """How far points lie beyond the polygon whose sides have outward normals at `angles`.

    Args:
        x: Float array.
        y: Float array of the same shape.
        angles: Float array [k], in radians.
        reach: Float array [k]: the distance of each side from the origin.

    Returns:
        Float array of the shape of `x`: the distance to the farthest-off side, negative inside. It
        is the distance to the polygon but beyond corners.
    """
    normals = zip(np.cos(angles), np.sin(angles), reach, strict=True)
    return np.max([cos * x + sin * y - far for cos, sin, far in normals], axis=0)


def coverage(outside):
    """How much of each pixel a shape covers, from the pixel's distance to it: 1 to 0 in a pixel."""
    return np.clip(0.5 - outside, 0, 1)


def _texture(rng, y, x, size, channels):
    """Float array [..., channels]: two random colours in a random pattern of about `size`."""
    first, second = rng.random([2, channels])
    kind = rng.integers(5)
    # Waves shorter than three pixels would be noise.
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
    """Values in [-1, 1] as 0 and 1, with an edge of about a pixel."""
    return np.clip(0.5 + values * wave, 0, 1)
