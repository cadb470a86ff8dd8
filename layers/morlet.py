"""Morlet wavelets and the Gaussian low pass of the scattering transform, as NumPy arrays.

The formulas and constants are those of Kymatio (Andreux et al., 2020), so that features agree with
what it computes. Filters are periodic on the padded image.
"""

import math

import numpy as np

_SIGMA = 0.8
_FREQUENCY = 3 * math.pi / 4
# Kymatio's normalization has these digits; with all of them features would differ by 9e-5.
_PI = 3.1415
# Standard deviations after which a Gaussian is nothing in double precision.
_REACH = 9


class FilterBank:
    """All filters of a scattering transform of images of one size, and how to pad them.

    Args:
        size: `(height, width)` of an image.
        scales: Int, J.
        angles: Int, L.
        max_order: Int, 1 or 2.

    Attributes:
        padded: List, height and width after padding: multiples of `2**J`, with margins.
        paddings: One or two lists of a pair of ints for each axis, to pad with in turn.
        wavelets: Dict from `(j, r)`, a scale and a resolution not above it, to float64
            `[L, height / 2**r, width / 2**r]`: what the spectra of images with every `2**r`-th
            pixel are multiplied with. Summed over the frequencies that are one with every
            `2**j`-th pixel, the products are the spectra of these.
        averages: Dict from r to a pair of matrices, `low_pass` for height and width.
    """

    def __init__(self, size, scales, angles, max_order):
        self.padded = [(pixels // 2**scales + 2) * 2**scales for pixels in size]
        self.paddings = _rounds_of_padding(size, self.padded)
        self.wavelets = {}
        for j in range(scales):
            spectra = wavelets(self.padded, j, angles)
            for r in range(max(j, 1) if max_order == 2 else 1):
                # The inverse transform of fewer pixels divides by their smaller number.
                self.wavelets[j, r] = at_resolution(spectra, r) / 4 ** (j - r)
        self.averages = {
            r: [low_pass(pixels, scales, r) for pixels in self.padded] for r in range(scales)
        }


def _rounds_of_padding(size, padded):
    """See `FilterBank.paddings`.

    Margins are equal, or one wider at the end. A reflection reaches no further than the image: the
    rest of the margin of the smallest images is a reflection of that.
    """
    margins = [((p - n) // 2, (p - n + 1) // 2) for n, p in zip(size, padded, strict=True)]
    first = [[min(m, n - 1) for m in margin] for margin, n in zip(margins, size, strict=True)]
    rest = np.subtract(margins, first).tolist()
    return [amounts for amounts in (first, rest) if np.any(amounts)]


def wavelets(shape, scale, angles):
    """The wavelets of one scale in all directions.

    Args:
        shape: `(height, width)` of the padded image.
        scale: Int, j: the wavelet oscillates with frequency `3 pi / 4 / 2**j`.
        angles: Int, L, the number of directions.

    Returns:
        Float64 array `[angles, height, width]`, the Fourier transforms, which are real. Direction t
        is `(max(L // 2 - 1, 0) - t) * pi / L` from the vertical axis towards the horizontal.
    """
    first = max(angles // 2 - 1, 0)
    turns = [(first - t) * math.pi / angles for t in range(angles)]
    return np.stack([_wavelet(shape, scale, turn, slant=4 / angles) for turn in turns])


def _wavelet(shape, scale, turn, slant):
    """The Fourier transform of one wavelet, whose envelope is `1 / slant` times as long across."""
    sigma = _SIGMA * 2**scale
    radius = math.ceil(_REACH * sigma / min(slant, 1))
    rows, columns = (_positions(size, radius) for size in shape)
    along = rows[:, None] * math.cos(turn) + columns * math.sin(turn)
    across = columns * math.cos(turn) - rows[:, None] * math.sin(turn)
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = np.exp(1j * _FREQUENCY / 2**scale * along)
    # A wavelet has no mean: what is constant in the image does not pass.
    wave -= np.sum(envelope * wave) / np.sum(envelope)
    periodic = np.zeros(shape, complex)
    values = envelope * wave * slant / (2 * _PI * sigma**2)
    np.add.at(periodic, np.ix_(rows % shape[0], columns % shape[1]), values)
    return np.fft.fft2(periodic).real


def _positions(size, radius):
    """Positions from the centre of a filter, as far as Kymatio's five periods reach."""
    return np.arange(max(-2 * size, -radius), min(3 * size, radius + 1))


def at_resolution(spectra, resolution, axes=(-2, -1)):
    """Fourier transforms for images with every `2**resolution`-th pixel along `axes`.

    Keeps the frequencies that such images have. Sizes must be multiples of `2**(resolution + 1)`.
    """
    for axis in axes:
        half = spectra.shape[axis] // 2 ** (resolution + 1)
        spectra = np.take(spectra, np.r_[:half, -half:0], axis)
    return spectra


def low_pass(size, scales, resolution):
    """The Gaussian average along one axis, at the positions of the features, as a matrix.

    Args:
        size: Int, the padded height or width.
        scales: Int, J: the standard deviation is `0.8 * 2**(J - 1)` pixels.
        resolution: Int, r: the axis has every `2**r`-th pixel.

    Returns:
        Float64 array `[size / 2**r, size / 2**J - 2]`: products with it average, keep every
        `2**(J - r)`-th pixel, and drop one of these at each end, which padding made. The Gaussian
        of an image is the product of those of its axes.
    """
    sigma = _SIGMA * 2 ** (scales - 1)
    positions = np.arange(-2 * size, 3 * size)
    values = np.exp(-(positions**2) / (2 * sigma**2)) / math.sqrt(2 * _PI * sigma**2)
    spectrum = np.fft.fft(values.reshape(5, size).sum(axis=0)).real
    kernel = np.fft.ifft(at_resolution(spectrum, resolution, axes=[0])).real
    stride = 2 ** (scales - resolution)
    centres = stride * np.arange(1, size // 2**scales - 1)
    return kernel[(centres - np.arange(len(kernel))[:, None]) % len(kernel)]
