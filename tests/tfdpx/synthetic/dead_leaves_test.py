"""Dead leaves: the law of the radii, what hides what, and the correlation that theory gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from tfdpx.synthetic import DeadLeaves, dead_leaves
from tfdpx.synthetic.dead_leaves import _front_leaf


@pytest.mark.parametrize("r_min, r_max", [(1, 8), (0.5, 100), (3, 4)])
def test_radii_follow_the_power_law(r_min, r_max):
    generator = DeadLeaves(16, r_min=r_min, r_max=r_max)
    _, _, radii = generator.leaves(np.random.default_rng(0), 20_000)

    def law(exponent):
        def density(r):
            return r**exponent

        whole, _ = integrate.quad(density, r_min, r_max)
        return np.vectorize(lambda r: integrate.quad(density, r_min, r)[0] / whole)

    sample = radii[:2000]
    assert stats.kstest(sample, law(-3)).pvalue > 1e-3
    assert r_min <= radii.min() and radii.max() <= r_max
    # Neighbouring laws are told apart, so the test could have failed.
    wrong = (-2, -4) if r_max > 2 * r_min else (2, -8)
    assert all(stats.kstest(sample, law(other)).pvalue < 1e-3 for other in wrong)


def test_the_mean_area_is_that_of_the_law():
    generator = DeadLeaves(16, r_min=1, r_max=8)
    _, _, radii = generator.leaves(np.random.default_rng(0), 200_000)
    assert generator._mean_area() == pytest.approx(np.pi * np.mean(radii**2), rel=0.02)


@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    number=st.integers(1, 12),
    seed=st.integers(0, 100),
)
def test_the_first_leaf_that_covers_a_pixel_is_seen(size, number, seed):
    rng = np.random.default_rng(seed)
    rows, columns = rng.uniform(-4, 12, size=(2, number))
    radii = rng.uniform(0.5, 5, size=number)
    wanted = np.full(size, number)
    for i, j in np.ndindex(*size):
        for leaf in range(number):
            if (i - rows[leaf]) ** 2 + (j - columns[leaf]) ** 2 <= radii[leaf] ** 2:
                wanted[i, j] = leaf
                break
    np.testing.assert_array_equal(_front_leaf(rows, columns, radii, *size), wanted.ravel())


@pytest.mark.parametrize("seed", range(3))
def test_leaves_of_later_rounds_lie_under_those_of_earlier_ones(seed, monkeypatch):
    monkeypatch.setattr(dead_leaves, "_COVERINGS_A_ROUND", 0.3)
    generator = DeadLeaves(9, 2, r_max=4)
    image = generator.draw(np.random.default_rng(seed))
    number = int(np.ceil(0.3 * 17**2 / generator._mean_area()))
    rng = np.random.default_rng(seed)
    rounds = [(generator.leaves(rng, number), rng.random([number, 2])) for _ in range(100)]
    rows, columns, radii = np.concatenate([leaves for leaves, _ in rounds], axis=1)
    front = _front_leaf(rows, columns, radii, 9, 9)
    assert front.max() > number  # One round was not enough.
    colours = np.concatenate([colours for _, colours in rounds])
    np.testing.assert_array_equal(image, colours[front].reshape(9, 9, 2))


def mean_overlap(distance, r_min, r_max):
    """Mean area shared by a leaf and itself moved by `distance`, and mean area of a leaf."""

    def lens(r):
        if distance >= 2 * r:
            return 0.0
        half = distance / 2
        return 2 * r**2 * np.arccos(half / r) - distance * np.sqrt(r**2 - half**2)

    def mean(area):
        breaks = [distance / 2] if r_min < distance / 2 < r_max else None
        whole = integrate.quad(lambda r: r**-3, r_min, r_max)[0]
        return integrate.quad(lambda r: area(r) * r**-3, r_min, r_max, points=breaks)[0] / whole

    return mean(lens), mean(lambda r: np.pi * r**2)


def test_pixels_are_as_correlated_as_the_model_says():
    """Lee, Mumford & Huang 2001: two pixels are alike if the first leaf on either is on both."""
    images = DeadLeaves(8, r_min=1, r_max=5, seed=1).images(6000)[..., 0].astype("float64")
    centred = (images - 0.5) * np.sqrt(12)  # Brightness is uniform in [0, 1].
    for down, right in [(0, 1), (1, 1), (3, 0), (0, 6)]:
        overlap, area = mean_overlap(np.hypot(down, right), 1, 5)
        # At all places at once, and in a corner alone: the border does not show.
        products = centred[:, : 8 - down, : 8 - right] * centred[:, down:, right:]
        for measured in (products.mean(axis=(1, 2)), products[:, 0, 0]):
            error = measured.std() / np.sqrt(len(measured))
            assert measured.mean() == pytest.approx(overlap / (2 * area - overlap), abs=4 * error)
            assert error < 0.02


def test_leaves_of_one_size():
    images = DeadLeaves(32, r_min=6, r_max=6).images(20)
    _, counts = np.unique(images, return_counts=True)
    # No leaf shows more pixels than a disc has.
    assert 60 < counts.max() < np.pi * 6.6**2


def test_half_the_shorter_side_is_the_largest_radius():
    assert DeadLeaves((20, 8)).get_config()["r_max"] == 4
    assert DeadLeaves(1).get_config()["r_max"] == 1
