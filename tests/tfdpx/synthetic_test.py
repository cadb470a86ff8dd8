"""Generated images: sizes, range and seeds; dead leaves by their law; strokes pixel by pixel."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, interpolate, stats

import tfdpx
from tfdpx import synthetic
from tfdpx.synthetic import DeadLeaves, Generator, Strokes

KINDS = [DeadLeaves, Strokes]
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
@given(
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**70),
)
def test_every_size_gives_images_between_0_and_1(kind, height, width, channels, seed):
    images = kind((height, width), channels, seed).images(2)
    assert images.shape == (2, height, width, channels) and images.dtype == np.float32
    assert images.min() >= 0 and images.max() <= 1  # So none is NaN.


@each_kind
def test_images_for_imagenet(kind):
    image = kind(224, 3).images(1)
    assert image.shape == (1, 224, 224, 3) and image.std() > 0.01


@each_kind
@given(start=st.integers(0, 6), number=st.integers(0, 4))
def test_an_image_depends_on_the_seed_and_its_number_alone(kind, start, number):
    np.random.seed(start)
    many = kind(6, seed=5).images(10)
    np.testing.assert_array_equal(kind(6, seed=5).images(number, start), many[start:][:number])


@each_kind
@pytest.mark.parametrize("channels", [1, 3])
def test_seeds_and_numbers_differ(kind, channels):
    images = np.concatenate([kind(8, channels, seed).images(5) for seed in (0, 1, 2**64)])
    assert len(np.unique(images.reshape(15, -1), axis=0)) == 15


@each_kind
def test_config_gives_the_same_images(kind):
    generator = kind((5, 7), 3, seed=2)
    config = generator.get_config()
    assert set(config) == set(inspect.signature(kind).parameters)
    np.testing.assert_array_equal(kind(**config).images(2), generator.images(2))


@each_kind
def test_no_argument_takes_data(kind):
    private = np.random.default_rng(0).uniform(size=(4, 8, 8, 1))
    for name in inspect.signature(kind).parameters:
        with pytest.raises(ValueError, match=f"Argument `{name}` must"):
            kind(**{name: private})


class Ramp(Generator):
    """A kind of one's own."""

    def draw(self, rng):
        height, width, channels = self.image_shape
        return np.linspace(0, rng.random(), height * width * channels).reshape(self.image_shape)


def test_a_kind_of_ones_own_defines_draw():
    images = Ramp((2, 3)).images(4)
    assert images.shape == (4, 2, 3, 1) and len(np.unique(images.max(axis=(1, 2, 3)))) == 4
    with pytest.raises(NotImplementedError, match="Generator does not define `draw`"):
        Generator().images(1)


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (DeadLeaves, {"image_size": 0}, r"`image_size` must .*image_size=0. Use, e.g., 32"),
        (DeadLeaves, {"image_size": (8, 8, 1)}, r"`image_size`.*\(8, 8, 1\)"),
        (DeadLeaves, {"image_size": 8.5}, r"`image_size`.*8.5"),
        (Strokes, {"channels": 0}, r"`channels` must be a positive .*channels=0. Use 1 for gray"),
        (Strokes, {"seed": -1}, r"`seed` must be an int >= 0.*seed=-1"),
        (Strokes, {"seed": None}, r"`seed`.*None"),
        (DeadLeaves, {"r_min": 0.1}, r"`r_min` must .*>= 0.5.*r_min=0.1. Use 1."),
        (DeadLeaves, {"r_min": 3, "r_max": 2}, r"`r_max` must .*>= r_min=3.*r_max=2"),
        (DeadLeaves, {"r_max": np.inf}, r"`r_max` must be a finite .*r_max=inf"),
    ],
)
def test_refuses_by_name(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        kind(**arguments)


@pytest.mark.parametrize("arguments", [{"num_images": -1}, {"num_images": 1, "start": 0.5}])
def test_refuses_numbers_of_images_by_name(arguments):
    name = list(arguments)[-1]
    with pytest.raises(ValueError, match=f"`{name}` must be an int >= 0"):
        DeadLeaves(4).images(**arguments)


def test_is_part_of_the_package():
    assert tfdpx.synthetic.DeadLeaves is DeadLeaves


@pytest.mark.parametrize("r_min, r_max", [(1, 8), (0.5, 100), (3, 4)])
def test_radii_follow_the_power_law(r_min, r_max):
    generator = DeadLeaves(16, r_min=r_min, r_max=r_max)
    _, _, radii = generator._leaves(np.random.default_rng(0), 20_000)

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
    _, _, radii = generator._leaves(np.random.default_rng(0), 200_000)
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
    np.testing.assert_array_equal(
        synthetic._front_leaf(rows, columns, radii, *size), wanted.ravel()
    )


@pytest.mark.parametrize("seed", range(3))
def test_leaves_of_later_rounds_lie_under_those_of_earlier_ones(seed, monkeypatch):
    monkeypatch.setattr(synthetic, "_COVERINGS_A_ROUND", 0.3)
    generator = DeadLeaves(9, 2, r_max=4)
    image = generator.draw(np.random.default_rng(seed))
    number = int(np.ceil(0.3 * 17**2 / generator._mean_area()))
    rng = np.random.default_rng(seed)
    rounds = [(generator._leaves(rng, number), rng.random([number, 2])) for _ in range(100)]
    rows, columns, radii = np.concatenate([leaves for leaves, _ in rounds], axis=1)
    front = synthetic._front_leaf(rows, columns, radii, 9, 9)
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
    np.testing.assert_allclose(synthetic._stamped(points, radii, *size), wanted, atol=1e-12)


@given(number=st.integers(2, 7), spacing=st.floats(0.05, 3), seed=st.integers(0, 100))
def test_a_stroke_is_a_b_spline(number, spacing, seed):
    controls = np.random.default_rng(seed).uniform(0, 10, size=(number, 2))
    points = synthetic._spline(controls, spacing)
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
