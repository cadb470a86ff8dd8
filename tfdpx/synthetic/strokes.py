"""Smooth strokes of a pen, like handwriting in no script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdpx.synthetic.generator import Generator, range_of

# Distance of neighbouring points, in pixels and in widths: at either the outline looks smooth.
_SPACING, _SPACING_IN_WIDTHS = 0.5, 0.1
_FEWEST_CONTROLS, _MOST_CONTROLS = 4, 7
# Of the control points, as a part of the image.
_MARGIN = 0.1


@keras.saving.register_keras_serializable(package="tfdpx")
class Strokes(Generator):
    """Strokes of a pen along smooth random curves, antialiased.

    A stroke is a cubic B-spline whose control points are a random walk that keeps turning one way:
    hooks, arcs, loops. The width of the pen changes a little along it, as with pressure. All
    strokes of an image have one ink. Of one channel the ink is 1 and the paper 0, as in MNIST; of
    several both have random colours.

    Args:
        image_size: Positive int, or a pair of them: height and width in pixels.
        channels: Positive int.
        seed: Int >= 0.
        strokes: Int >= 1, or a pair `(low, high)`: the number of strokes of an image.
        width: Number between 0.01 and 1, or a pair `(low, high)`: width of the pen as a part of the
            shorter side, uniform between for each image.

    Raises:
        ValueError: If an argument does not fit; the error names it.

    Example:
    >>> images = Strokes(image_size=28, strokes=2).images(5)
    >>> images.shape, float(images.min()), float(images.max())
    ((5, 28, 28, 1), 0.0, 1.0)

    References:
        - [Lake, Salakhutdinov & Tenenbaum, 2015](https://doi.org/10.1126/science.aab3050), whose
          model of handwriting draws strokes as B-splines too.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 32,
        channels: int = 1,
        seed: int = 0,
        strokes: tuple[int, int] = (1, 3),
        width: tuple[float, float] = (0.06, 0.13),
    ) -> None:
        super().__init__(image_size, channels, seed)
        self.strokes = range_of("strokes", strokes, (1, 3), 1, whole=True)
        self.width = range_of("width", width, (0.06, 0.13), 0.01, 1)

    def draw(self, rng: np.random.Generator) -> Any:
        """One image `[height, width, channels]`; see `Generator.draw`."""
        width = rng.uniform(*self.width) * min(self.image_size)
        number = rng.integers(self.strokes[0], self.strokes[1] + 1)
        strokes = [self._stroke(rng, width) for _ in range(number)]
        points, radii = map(np.concatenate, zip(*strokes, strict=True))
        ink = stamped(points, radii, *self.image_size)[..., None]
        if self.channels == 1:
            return ink
        dark, bright = rng.random([2, self.channels])
        return dark + ink * (bright - dark)

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, as a JSON-serialisable dict."""
        return {**super().get_config(), "strokes": list(self.strokes), "width": list(self.width)}

    def _stroke(self, rng, width):
        """Points [n, 2] (row, column) of a stroke, and the radius of the pen [n] at each."""
        controls = _controls(rng) * (np.array(self.image_size) - 1)
        points = spline(controls, max(_SPACING, _SPACING_IN_WIDTHS * width))
        # Pressure rises and falls once or twice along the stroke.
        phase = rng.uniform(0, 2 * np.pi) + rng.uniform(3, 9) * np.linspace(0, 1, len(points))
        return points, width / 2 * (1 + 0.2 * np.sin(phase))


def _controls(rng):
    """Points [n, 2] in the unit square, with some margin: a walk that keeps turning one way."""
    number = rng.integers(_FEWEST_CONTROLS, _MOST_CONTROLS + 1)
    heading, turn = rng.uniform(0, 2 * np.pi), rng.normal(0, 0.9)
    steps = rng.uniform(0.15, 0.5, size=number - 1)
    headings = heading + turn * np.arange(number - 1) + rng.normal(0, 0.6, size=number - 1)
    walk = np.cumsum(steps[:, None] * np.stack([np.sin(headings), np.cos(headings)], -1), axis=0)
    walk = np.concatenate([np.zeros([1, 2]), walk])
    walk -= walk.min(axis=0)
    # It is put anywhere between the margins, shrunk if it is too large.
    walk /= max(walk.max() / (1 - 2 * _MARGIN), 1)
    return walk + _MARGIN + rng.random(2) * (1 - 2 * _MARGIN - walk.max(axis=0))


def spline(controls, spacing):
    """Points of the uniform cubic B-spline with the given control points.

    Args:
        controls: Float array [k, 2], k >= 2.
        spacing: Float, the largest distance between neighbouring points.

    Returns:
        float64 array [n, 2], from the first control point to the last. No turn is sharp: even the
        second derivative of a B-spline has no jumps.
    """
    # With the ends continued in a straight line, the curve starts and ends at control points.
    outer = [2 * controls[0] - controls[1], *controls, 2 * controls[-1] - controls[-2]]
    legs = np.linalg.norm(np.diff(outer, axis=0), axis=1)
    pieces = []
    for i, (a, b, c, d) in enumerate(zip(outer, outer[1:], outer[2:], outer[3:], strict=False)):
        # The speed is a mean of the legs, so it does not exceed the longest.
        number = max(int(np.ceil(legs[i : i + 3].max() / spacing)), 1)
        t = np.arange(number)[:, None] / number
        left, right = b * (4 - 6 * t**2 + 3 * t**3), c * (1 + 3 * t + 3 * t**2 - 3 * t**3)
        pieces.append((a * (1 - t) ** 3 + left + right + d * t**3) / 6)
    return np.concatenate([*pieces, controls[-1:]])


def stamped(points, radii, height, width):
    """How far each pixel is covered by discs around `points`.

    Args:
        points: Float array [n, 2]: row and column in pixels.
        radii: Float array [n], in pixels.
        height: Int.
        width: Int.

    Returns:
        float64 array [height, width] in [0, 1]: 1 where a pixel's centre lies half a pixel or more
        inside of a disc, falling to 0 half a pixel outside.
    """
    reach = int(np.ceil(radii.max() + 1))
    offset = np.arange(-reach, reach + 1)
    nearest = np.rint(points).astype("int64")
    rows, columns = (nearest[:, axis, None] + offset for axis in range(2))
    across = (rows - points[:, :1]) ** 2
    along = (columns - points[:, 1:]) ** 2
    distance = np.sqrt(across[:, :, None] + along[:, None, :])
    covered = np.clip(radii[:, None, None] + 0.5 - distance, 0, 1)
    # What lies outside of the image goes into a border that is cut off.
    rows = np.clip(rows, -1, height) + 1
    columns = np.clip(columns, -1, width) + 1
    canvas = np.zeros((height + 2) * (width + 2))
    flat = rows[:, :, None] * (width + 2) + columns[:, None, :]
    np.maximum.at(canvas, flat.ravel(), covered.ravel())
    return canvas.reshape(height + 2, width + 2)[1:-1, 1:-1]
