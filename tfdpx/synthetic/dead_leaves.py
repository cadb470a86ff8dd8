"""Discs of all sizes that hide one another, like the objects of a scene."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdpx._arguments import is_number, require
from tfdpx.synthetic.generator import Generator

# Leaves of a round cover each pixel so many times on average: most images need one or two rounds.
_COVERINGS_A_ROUND = 6


@keras.saving.register_keras_serializable(package="tfdpx")
class DeadLeaves(Generator):
    """Discs of one colour that fall on each other until all is covered.

    Centres are uniform, and radii have a density proportional to `r^-3` between `r_min` and
    `r_max`: the law under which a scene looks alike at every scale, as photographs do (Lee, Mumford
    & Huang 2001). Features learned from such images alone serve for photographs (Baradad et al.
    2021).

    The samples are exact: leaves are laid from the front, under those that lie there, until no
    pixel is left open. Neither the border nor a number of leaves shows in them.

    Args:
        image_size: Positive int, or a pair of them: height and width in pixels.
        channels: Positive int. Each leaf has a brightness uniform in [0, 1] a channel.
        seed: Int >= 0.
        r_min: Number >= 0.5, the smallest radius in pixels.
        r_max: Finite number >= `r_min`, the largest radius in pixels. By default half the shorter
            side, or `r_min` where that is larger.

    Raises:
        ValueError: If an argument does not fit; the error names it.

    Example:
    >>> leaves = DeadLeaves(image_size=16, channels=3)
    >>> leaves.images(5).shape
    (5, 16, 16, 3)
    >>> bool((leaves.images(5)[:2] == leaves.images(2)).all())
    True

    References:
        - [Lee, Mumford & Huang, 2001](https://doi.org/10.1023/A:1011109015675), "Occlusion models
          for natural images".
        - [Baradad et al., 2021](https://arxiv.org/abs/2106.05963), "Learning to see by looking at
          noise".
        - Kendall & Thönnes, 1999, "Perfect simulation in stochastic geometry", for leaves laid from
          the front.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 32,
        channels: int = 1,
        seed: int = 0,
        r_min: float = 1.0,
        r_max: float | None = None,
    ) -> None:
        super().__init__(image_size, channels, seed)
        fits = is_number(r_min) and 0.5 <= r_min < math.inf
        must = "be a finite number >= 0.5 (pixels): smaller leaves cover none"
        require(fits, "r_min", r_min, must, " Use 1.")
        if r_max is None:
            r_max = max(r_min, min(self.image_size) / 2)
        fits = is_number(r_max) and r_min <= r_max < math.inf
        require(fits, "r_max", r_max, f"be a finite number >= r_min={r_min} (pixels)")
        self.r_min, self.r_max = float(r_min), float(r_max)

    def draw(self, rng: np.random.Generator) -> Any:
        """One image `[height, width, channels]`; see `Generator.draw`."""
        height, width = self.image_size
        image = np.empty([height * width, self.channels])
        is_open = np.ones(height * width, bool)
        window = (height + 2 * self.r_max) * (width + 2 * self.r_max)
        num_leaves = math.ceil(_COVERINGS_A_ROUND * window / self._mean_area())
        while is_open.any():
            rows, columns, radii = self.leaves(rng, num_leaves)
            colours = rng.random([num_leaves, self.channels])
            front = _front_leaf(rows, columns, radii, height, width)
            is_new = is_open & (front < num_leaves)
            image[is_new] = colours[front[is_new]]
            is_open &= ~is_new
        return image.reshape(self.image_shape)

    def leaves(self, rng: np.random.Generator, num_leaves: int) -> Any:
        """Leaves from front to back, of which some miss the image.

        Args:
            rng: `np.random.Generator`.
            num_leaves: Int.

        Returns:
            float64 arrays `[num_leaves]`: row and column of the centres, and radii, in pixels. The
            centre of the first pixel is at (0, 0).
        """
        height, width = self.image_size
        u = rng.random([3, num_leaves])
        # A leaf of any size that reaches the image is as likely as it is on the endless plane.
        rows = u[0] * (height + 2 * self.r_max) - self.r_max - 0.5
        columns = u[1] * (width + 2 * self.r_max) - self.r_max - 0.5
        radii = (self.r_min**-2 - u[2] * (self.r_min**-2 - self.r_max**-2)) ** -0.5
        return rows, columns, radii

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, as a JSON-serialisable dict."""
        return {**super().get_config(), "r_min": self.r_min, "r_max": self.r_max}

    def _mean_area(self):
        if self.r_min == self.r_max:
            return math.pi * self.r_min**2
        mass = (self.r_min**-2 - self.r_max**-2) / 2
        return math.pi * math.log(self.r_max / self.r_min) / mass


def _front_leaf(rows, columns, radii, height, width):
    """int64 [height * width]: the first of n leaves that covers each pixel, n where none does."""
    first = np.maximum(np.ceil(rows - radii), 0)
    last = np.minimum(np.floor(rows + radii), height - 1)
    leaf, row = _each_between(first, last)
    # Rounding could make the first or last row lie just outside of its leaf.
    half = np.sqrt(np.maximum(radii[leaf] ** 2 - (row - rows[leaf]) ** 2, 0))
    first = np.maximum(np.ceil(columns[leaf] - half), 0)
    last = np.minimum(np.floor(columns[leaf] + half), width - 1)
    span, column = _each_between(first, last)
    front = np.full(height * width, len(radii))
    np.minimum.at(front, row[span] * width + column, leaf[span])
    return front


def _each_between(first, last):
    """Each integer of n intervals: the number of the interval, and the integer, as int64 arrays."""
    counts = np.maximum(last - first + 1, 0).astype("int64")
    owner = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return owner, first.astype("int64")[owner] + np.arange(len(owner)) - before[owner]
