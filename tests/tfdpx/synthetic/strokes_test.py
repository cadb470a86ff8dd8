"""Strokes: coverage against a loop over pixels, the spline against SciPy's, paper and ink."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import interpolate

from tfdpx.synthetic import Strokes
from tfdpx.synthetic.strokes import spline, stamped


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    number=st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_coverage_by_a_loop_over_pixels(size, number, seed):
    rng = np.random.default_rng(seed)
    points, radii = rng.uniform(-5, 14, size=(number, 2)), rng.uniform(0.1, 4, size=number)
    wanted = np.zeros(size)
    for pixel in np.ndindex(*size):
        for point, radius in zip(points, radii, strict=True):
            outside = np.linalg.norm(np.array(pixel) - point) - radius
            wanted[pixel] = max(wanted[pixel], min(max(0.5 - outside, 0), 1))
    np.testing.assert_allclose(stamped(points, radii, *size), wanted, atol=1e-12)


@given(number=st.integers(2, 7), spacing=st.floats(0.05, 3), seed=st.integers(0, 100))
def test_a_stroke_is_a_b_spline(number, spacing, seed):
    controls = np.random.default_rng(seed).uniform(0, 10, size=(number, 2))
    points = spline(controls, spacing)
    np.testing.assert_allclose(points[[0, -1]], controls[[0, -1]], atol=1e-12)
    assert np.linalg.norm(np.diff(points, axis=0), axis=1).max() <= spacing * (1 + 1e-9)
    outer = [2 * controls[0] - controls[1], *controls, 2 * controls[-1] - controls[-2]]
    curve = interpolate.BSpline(np.arange(-3, number + 3), np.array(outer), 3)
    dense = curve(np.linspace(0, number - 1, 20_001))
    for point in points[:: max(len(points) // 10, 1)]:
        assert np.linalg.norm(dense - point, axis=1).min() < 0.01


def test_gray_is_white_ink_on_black_paper_with_soft_edges():
    images = Strokes(28).images(200)
    ink = images.mean(axis=(1, 2, 3))
    assert 0.03 < ink.min() and ink.max() < 0.6
    assert np.mean(images == 0) > 0.5 and np.mean(images == 1) > 0.05
    assert 0.02 < np.mean((images > 0) & (images < 1)) < 0.25


def test_a_colour_image_mixes_two_colours():
    for image in Strokes(16, 3).images(20).reshape(20, -1, 3).astype("float64"):
        spread = np.linalg.svd(image - image[0], compute_uv=False)
        assert spread[0] > 0.1 and spread[1] < 1e-5


@pytest.mark.parametrize("width", [0.05, 0.2])
def test_width_is_a_part_of_the_shorter_side(width):
    def ink(**arguments):
        return Strokes((64, 80), strokes=1, **arguments).images(30).mean()

    # Strokes are long against their width, so ink grows with it almost in proportion.
    assert ink(width=width) / ink(width=width / 2) == pytest.approx(2, rel=0.2)


def test_a_wide_pen_on_a_large_image_needs_little_memory():
    assert Strokes(224, width=1.0, strokes=3).images(1).mean() > 0.5
