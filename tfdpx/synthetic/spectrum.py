"""Noise whose power falls with frequency, as in photographs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfdpx.synthetic.generator import Generator, range_of


@keras.saving.register_keras_serializable(package="tfdpx")
class Spectrum(Generator):
    """Random fields with a power spectrum of `1 / f^alpha`, and nothing else in them.

    `f` is the distance from zero frequency, in cycles a pixel. Photographs have an `alpha` of about
    2 (Field 1987). With 0 the images are white noise, with 4 soft clouds. Every image is shifted
    and scaled to fill [0, 1], which leaves the shape of its spectrum as it is.

    Of one channel the power at each frequency is exactly proportional to `1 / f^alpha`, and phases
    are random. Of several, each is a random mixture of as many such fields: the channels of an
    image are correlated, so that it has colours of its own, and the power is that on average.

    Args:
        image_size: Positive int, or a pair of them: height and width in pixels.
        channels: Positive int.
        seed: Int >= 0.
        alpha: Number >= 0, or a pair `(low, high)`: each image has one that is uniform between.

    Raises:
        ValueError: If an argument does not fit; the error names it.

    Example:
    >>> images = Spectrum(image_size=(24, 32), alpha=2.0).images(5)
    >>> images.shape, float(images.min()), float(images.max())
    ((5, 24, 32, 1), 0.0, 1.0)

    References:
        - [Field, 1987](https://doi.org/10.1364/JOSAA.4.002379).
        - [Baradad et al., 2021](https://arxiv.org/abs/2106.05963), "Learning to see by looking at
          noise".
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 32,
        channels: int = 1,
        seed: int = 0,
        alpha: tuple[float, float] = (1.0, 3.0),
    ) -> None:
        super().__init__(image_size, channels, seed)
        self.alpha = range_of("alpha", alpha, (1.0, 3.0), 0)

    def draw(self, rng: np.random.Generator) -> Any:
        """One image `[height, width, channels]`; see `Generator.draw`."""
        height, width = self.image_size
        alpha = rng.uniform(*self.alpha)
        # The phases of a real field have the symmetry that keeps the result real.
        noise = np.fft.rfft2(rng.normal(size=[height, width, self.channels]), axes=(0, 1))
        phases = noise / np.maximum(np.abs(noise), 1e-30)
        frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
        frequency[0, 0] = 1  # The mean, which is set below anyway.
        amplitude = frequency ** (-alpha / 2)
        field = np.fft.irfft2(phases * amplitude[..., None], (height, width), axes=(0, 1))
        if self.channels > 1:
            field = field @ rng.normal(size=[self.channels, self.channels])
        return _fill(field)

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, as a JSON-serialisable dict."""
        return {**super().get_config(), "alpha": list(self.alpha)}


def _fill(field):
    """`field` shifted and scaled to [0, 1]; an even one to 0.5."""
    low, high = field.min(), field.max()
    return (field - low) / (high - low) if high > low else np.full_like(field, 0.5)
