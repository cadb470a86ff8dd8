"""The normals are normal, the same in and outside XLA, and independent across seeds."""

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdpx import noise


def draw(shape, seed, jit_compile=False):
    function = tf.function(noise.normal, jit_compile=jit_compile)
    return function(shape, tf.constant(seed, "int64")).numpy()


def test_the_sample_is_standard_normal():
    sample = draw([200_001], [1, 2])
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    # Tails too: the fourth moment of a normal is 3.
    assert np.mean(sample**4.0) == pytest.approx(3.0, abs=0.1)
    assert not stats.kstest(sample, "norm", (0, 1.02)).pvalue > 1e-3


def test_halves_of_the_box_muller_pairs_are_independent():
    first, second = np.split(draw([100_000], [3, 4]), 2)
    assert abs(stats.spearmanr(first, second).statistic) < 0.02
    assert abs(stats.spearmanr(np.abs(first), np.abs(second)).statistic) < 0.02


def test_xla_draws_the_same():
    np.testing.assert_allclose(
        draw([7, 3], [5, 6], jit_compile=True), draw([7, 3], [5, 6]), atol=1e-5
    )


@pytest.mark.parametrize("shape", [[], [1], [3, 5]])
def test_shapes(shape):
    assert draw(shape, [1, 1]).shape == tuple(shape)


def test_fold_in_depends_on_every_number():
    seed = tf.constant([1, 2], "int64")
    seeds = [tuple(noise.fold_in(seed, *n).numpy()) for n in [(0,), (1,), (0, 1), (1, 0), (2**40,)]]
    assert len(set(seeds)) == len(seeds)


def test_fold_in_agrees_under_xla_and_keeps_both_halves_secret():
    seed = tf.constant([1, 2], "int64")
    compiled = tf.function(lambda: noise.fold_in(seed, 5, 6), jit_compile=True)()
    np.testing.assert_array_equal(compiled, noise.fold_in(seed, 5, 6))
    assert not set(noise.fold_in(seed, 5).numpy()) & {1, 2, 5}


def test_seeds():
    assert noise.make_seed(3) == noise.make_seed(3) != noise.make_seed(4)
    assert noise.make_seed(None) != noise.make_seed(None)
    assert all(-(2**63) <= part < 2**63 for part in noise.make_seed(None))
    with pytest.raises(ValueError, match="seed"):
        noise.make_seed("0")
