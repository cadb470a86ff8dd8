"""The normals are normal, the same in and outside XLA, and independent across seeds."""

import math

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from tfdpx import noise
from tfdpx.accounting import gaussian


def draw(shape, seed, jit_compile=False):
    function = tf.function(noise.normal, jit_compile=jit_compile)
    return function(shape, tf.constant(seed, "int64")).numpy()


def test_the_sample_is_standard_normal():
    sample = draw([200_001], [1, 2])
    assert stats.kstest(sample, stats.norm.cdf).pvalue > 1e-3
    # The fourth moment of a normal is 3, which covers the tails too.
    assert np.mean(sample**4.0) == pytest.approx(3.0, abs=0.1)
    assert not stats.kstest(sample, stats.norm(0, 1.02).cdf).pvalue > 1e-3


def test_halves_of_the_box_muller_pairs_are_independent():
    first, second = np.split(draw([100_000], [3, 4]), 2)
    assert abs(stats.spearmanr(first, second).statistic) < 0.02
    assert abs(stats.spearmanr(np.abs(first), np.abs(second)).statistic) < 0.02


def test_xla_draws_the_same():
    np.testing.assert_allclose(
        draw([7, 3], [5, 6], jit_compile=True), draw([7, 3], [5, 6]), atol=1e-5
    )


def exact_log(word):
    """Returns log(u) of a word's u in (0, 1), from integers, which are exact."""
    odd = 2 * (int(word) % 2**64) + 1
    if odd < 2**64:
        return math.log(odd) - 65 * math.log(2)
    return math.log1p(-math.ldexp(2**65 - odd, -65))


ENDS = [sign * (2**bits + more) for bits in range(0, 63, 3) for sign in (-1, 1) for more in (0, 1)]
WORDS = [0, -1, 2**63 - 1, -(2**63), *ENDS, *np.random.default_rng(0).integers(-(2**63), 2**63, 99)]


def check_log_uniform(function):
    logs = function(tf.constant(WORDS, tf.int64)).numpy()
    expected = [exact_log(word) for word in WORDS]
    assert np.all(logs < 0) and np.all(np.isfinite(logs))
    np.testing.assert_allclose(logs, expected, rtol=5e-7)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_radii_keep_their_precision_to_both_ends(jit_compile):
    check_log_uniform(tf.function(noise._log_uniform, jit_compile=jit_compile))


def of_the_upper_32_bits(word):
    upper = tf.bitwise.right_shift(tf.bitcast(word, tf.uint64), tf.constant(32, tf.uint64))
    return tf.math.log((tf.cast(upper, "float32") + 0.5) * 2.0**-32)


def without_log1p(word):
    return tf.math.log((tf.cast(tf.bitcast(word, tf.uint64), "float32") + 0.5) * 2.0**-64)


@pytest.mark.planted("radii of a short tail, or zero")
@pytest.mark.parametrize("planted", [of_the_upper_32_bits, without_log1p])
def test_a_short_tail_and_zero_radii_are_rejected(planted):
    with pytest.raises(AssertionError):
        check_log_uniform(planted)


def test_the_largest_radius_is_that_of_the_least_word(monkeypatch):
    monkeypatch.setattr(noise, "words", lambda shape, seed, dtype: tf.zeros(shape, dtype))
    largest = noise.normal([2], tf.constant([1, 2], "int64"), 3.0).numpy()
    np.testing.assert_allclose(largest, [3.0 * noise.LARGEST_RADIUS, 0.0], rtol=1e-6)
    assert noise.LARGEST_RADIUS == gaussian.LARGEST_RADIUS == pytest.approx(9.49, abs=0.01)


def test_radii_and_angles_of_all_chunks_come_from_seeds_of_their_own():
    seed = tf.constant([1, 2], "int64")
    seeds = [seed, *tf.reshape(noise._seeds(seed, 3), [6, 2])]
    assert len(np.unique(seeds)) == 14
    # `fold_in(seed, 0)` gives the words of `seed` itself, so no other draw may contain them.
    words = [noise.words([2], pair, tf.int64).numpy().tolist() for pair in seeds]
    assert words[0] == noise.fold_in(seed, 0).numpy().tolist() not in words[1:]


def test_chunks_differ_and_each_agrees_with_its_own_draw(monkeypatch):
    monkeypatch.setattr(noise, "_CHUNK", 1000)
    sample = draw([2501], [7, 8])
    assert len(np.unique(sample)) > 2490  # A chunk drawn twice would leave 1667.
    seeds = noise._seeds(tf.constant([7, 8], "int64"), 3)
    alone = [half for pair in seeds for half in noise._box_muller(417, *tf.unstack(pair), 1.0)]
    np.testing.assert_allclose(sample, tf.concat(alone, axis=0)[:2501], atol=1e-5)


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
