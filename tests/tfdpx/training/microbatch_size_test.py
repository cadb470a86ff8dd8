"""How many examples a microbatch takes where no number is given, and which numbers are."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdpx
from tfdpx.training import microbatches


def test_bad_sizes():
    for value in ("auto", "", 0, -1, 2.0, True, [4]):
        with pytest.raises(ValueError, match="`microbatch_size` must be an int >= 1 or None"):
            tfdpx.DPSGD(batch_size=4, noise_multiplier=1.0, microbatch_size=value)


def test_auto_of_former_files_is_none():
    config = tfdpx.DPSGD(batch_size=4, noise_multiplier=1.0).get_config()
    again = tfdpx.DPSGD.from_config({**config, "microbatch_size": "auto"})
    assert again.microbatch_size is None


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 1000))
def test_rows_of_all_passes(examples, multiple, count):
    size = microbatches.MicrobatchSize(examples, min(multiple, examples))
    computed, left = 0, count
    while left > 0:
        computed += min(examples, math.ceil(left / size.multiple) * size.multiple)
        left -= examples
    assert size.rows(count) == computed
    assert not microbatches.of_examples(examples, varies=False).varies
    most = microbatches.of_examples(examples, varies=True).rows(count) - count
    assert 0 <= most <= examples / 16


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 600),
    st.floats(0.05, 1.0),
    st.floats(1e-4, 1e-2),
    st.floats(1e-4, 1e-1),
    st.booleans(),
)
def test_passes_of_least_expected_time(batch_size, probability, each, every, varies):
    number = max(round(batch_size / probability), batch_size)
    drawn = np.arange(number + 1)
    weights = scipy.stats.binom.pmf(drawn, number, probability)

    def seconds(size):
        rows = microbatches.of_examples(size, varies).rows(drawn)
        return weights @ (-(-drawn // size) * every + rows * each)

    mean, deviation = number * probability, math.sqrt(number * probability * (1 - probability))
    size = microbatches.least_time(each, every, mean, deviation, number, number, varies)
    assert seconds(size) <= 1.03 * min(seconds(other) for other in range(1, number + 1, 7))


def test_without_padding_a_batch_is_cut_evenly():
    assert microbatches.least_time(1.0, 30.0, 100, 0.0, 60, 100) == 50
    assert microbatches.least_time(1.0, 30.0, 100, 0.0, 100, 100) == 100
