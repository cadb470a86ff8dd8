"""Shapes: areas and distances against geometry, textures, what hides what."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import spatial

from tfdpx.synthetic import Shapes
from tfdpx.synthetic.shapes import coverage, outside_ellipse, outside_polygon

# Positions that no pixel of the grid coincides with.
Y, X = np.mgrid[-60:61, -60:61] + np.array([0.3, -0.2])[:, None, None]


@given(a=st.floats(3, 50), flatness=st.floats(0.4, 1))
def test_area_of_an_ellipse(a, flatness):
    inside = coverage(outside_ellipse(X, Y, a, flatness * a))
    assert inside.sum() == pytest.approx(np.pi * a**2 * flatness, rel=0.02, abs=2)


def test_distance_to_a_circle_is_exact():
    np.testing.assert_allclose(outside_ellipse(X, Y, 7, 7), np.hypot(X, Y) - 7, atol=1e-9)


@given(sides=st.integers(3, 7), radius=st.floats(8, 30), seed=st.integers(0, 100))
def test_area_of_a_polygon(sides, radius, seed):
    rng = np.random.default_rng(seed)
    angles = 2 * np.pi / sides * (np.arange(sides) + rng.uniform(-0.2, 0.2, size=sides))
    reach = radius * rng.uniform(0.5, 0.8, size=sides)
    planes = np.stack([np.cos(angles), np.sin(angles), -reach], axis=1)
    corners = spatial.HalfspaceIntersection(planes, np.zeros(2)).intersections
    shown = corners[np.abs(corners).max(axis=1) < 60]
    if len(shown) == len(corners):
        inside = coverage(outside_polygon(X, Y, angles, reach))
        area = spatial.ConvexHull(corners).volume
        assert inside.sum() == pytest.approx(area, rel=0.01, abs=3)


def test_a_rectangle_is_the_polygon_of_four_right_angles():
    outside = outside_polygon(X, Y, np.arange(4) * np.pi / 2, np.array([9, 4, 9, 4]))
    np.testing.assert_allclose(outside, np.maximum(np.abs(X) - 9, np.abs(Y) - 4), atol=1e-9)


def test_more_and_larger_shapes_make_more_edges():
    def edges(**arguments):
        images = Shapes(32, **arguments).images(100)
        return np.abs(np.diff(images, axis=1)).mean()

    assert edges(shapes=1, radius=0.05) < edges(shapes=8, radius=0.2)


def test_images_have_plain_parts_textures_and_edges():
    images = Shapes(32, seed=1).images(300)
    step = np.abs(np.diff(images[..., 0], axis=2))
    assert np.mean(step == 0) > 0.2  # Plain colours, and slopes across.
    assert np.mean((step > 0) & (step < 0.05)) > 0.1  # Slopes.
    assert np.mean(step > 0.1) > 0.05  # Edges, stripes, grain.


@pytest.mark.slow
def test_brightness_is_even_over_the_image():
    mean = Shapes(8).images(4000).mean(axis=0)
    np.testing.assert_allclose(mean, 0.5, atol=0.03)
