"""Random spectra: the power that falls with frequency, random phases, colours."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.synthetic import Spectrum


def log_frequency_and_power(images):
    """[frequencies] and [images, frequencies] of `images` [n, h, w], without zero frequency."""
    power = np.abs(np.fft.fft2(images.astype("float64"))) ** 2
    rows, columns = map(np.fft.fftfreq, images.shape[1:])
    frequency = np.sqrt(rows[:, None] ** 2 + columns**2).ravel()[1:]
    return np.log(frequency), np.log(power.reshape(len(images), -1)[:, 1:])


@given(
    alpha=st.floats(0, 4),
    size=st.tuples(st.integers(2, 12), st.integers(3, 12)),
    seed=st.integers(0),
)
def test_the_power_of_a_gray_image_is_the_law_at_every_frequency(alpha, size, seed):
    frequency, power = log_frequency_and_power(Spectrum(size, 1, seed, alpha).images(1)[..., 0])
    wanted = power[0].mean() - alpha * (frequency - frequency.mean())
    np.testing.assert_allclose(power[0], wanted, atol=0.02)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.5])
def test_the_mean_power_of_colours_is_the_law(alpha):
    images = Spectrum(16, 3, alpha=alpha).images(200).transpose(0, 3, 1, 2).reshape(-1, 16, 16)
    frequency, power = log_frequency_and_power(images)
    slope, _ = np.polyfit(frequency, np.log(np.exp(power).mean(axis=0)), 1)
    assert slope == pytest.approx(-alpha, abs=0.1)


def test_each_image_has_an_exponent_of_its_own():
    frequency, power = log_frequency_and_power(Spectrum(16, alpha=(1, 3)).images(300)[..., 0])
    slopes = -np.polyfit(frequency, power.T, 1)[0]
    assert 1 <= slopes.min() < 1.1 and 2.9 < slopes.max() <= 3.001
    assert slopes.mean() == pytest.approx(2, abs=0.1)


def test_phases_are_uniform_and_independent():
    fields = np.fft.fft2(Spectrum(8, alpha=1).images(2000)[..., 0].astype("float64"))
    phases = np.exp(1j * np.angle(fields[:, 1:4, 1:4].reshape(2000, -1)))
    assert np.abs(phases.mean(axis=0)).max() < 0.1
    assert np.abs((phases**2).mean(axis=0)).max() < 0.1
    products = phases.conj().T @ phases / 2000
    assert np.abs(products - np.eye(9)).max() < 0.1


def test_channels_are_correlated_and_images_fill_the_range():
    images = Spectrum(16, 3).images(100)
    red, green = images[..., 0].reshape(100, -1), images[..., 1].reshape(100, -1)
    correlations = [np.corrcoef(pair)[0, 1] for pair in zip(red, green, strict=True)]
    assert np.mean(np.abs(correlations)) > 0.3
    np.testing.assert_array_equal(images.min(axis=(1, 2, 3)), 0)
    np.testing.assert_array_equal(images.max(axis=(1, 2, 3)), 1)


def test_one_pixel_is_gray():
    np.testing.assert_array_equal(Spectrum(1).images(3), 0.5)
