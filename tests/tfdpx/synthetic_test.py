"""Generated images: sizes, range and seeds, and the distribution of dead leaves."""

import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from tfdpx import synthetic
from tfdpx.synthetic import DeadLeaves, Strokes

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
    assert images.min() >= 0 and images.max() <= 1  # This excludes NaN.


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
    # Nearby distributions are rejected, so the test can fail.
    wrong = (-2, -4) if r_max > 2 * r_min else (2, -8)
    assert all(stats.kstest(sample, law(other)).pvalue < 1e-3 for other in wrong)


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
