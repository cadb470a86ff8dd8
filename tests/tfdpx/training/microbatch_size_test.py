"""`microbatch_size="auto"`: what it chooses, that it says so, and that no result depends on it."""

import math
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import scipy.stats
import seeds
import small
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdpx
from tfdpx.training import _free_memory, microbatch_size

MIB = 2**20


@pytest.fixture
def free(monkeypatch):
    """A function that sets the free memory."""
    return lambda count: monkeypatch.setattr(_free_memory, "free_bytes", lambda device: count)


def chosen(capsys):
    """What was printed: pairs (examples a pass, examples a batch)."""
    found = re.findall(
        r"microbatches of (\d+) examples for batches of (\d+)", capsys.readouterr().out
    )
    return [tuple(map(int, pair)) for pair in found]


def image_model(**arguments):
    seeds.fix(3)
    model = keras.Sequential(
        [
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3),
        ]
    )
    arguments = {"batch_size": 48, "noise_multiplier": 1.0, "seed": 1, **arguments}
    model.compile(
        tfdpx.DPSGD(0.1, **arguments),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    return model


def images(count=48):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 16, 16, 3), "uint8"), rng.integers(0, 3, count)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_batch_is_cut_evenly(batch_size, largest):
    size = microbatch_size.divide(batch_size, largest)
    assert 1 <= size <= largest
    passes = -(-batch_size // size)
    assert passes == -(-batch_size // largest)  # No more passes than need be,
    assert passes * size - batch_size < passes  # each less than one row of padding.


@pytest.mark.slow
def test_a_larger_memory_takes_larger_passes(free, capsys):
    sizes = []
    for count in (2 * MIB, 2**40):
        free(count)
        small.step(image_model(microbatch_size="auto"), *images())
        [(size, batch_size)] = chosen(capsys)
        assert batch_size == 48
        sizes.append(size)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 48


@pytest.mark.slow
def test_the_update_does_not_depend_on_it(free, capsys):
    free(4 * MIB)
    augmented = {"augment": tfdpx.augment.RandomCropFlip(2), "augmult": 2}
    changes = [
        small.step(image_model(microbatch_size=size, **augmented), *images())
        for size in ("auto", None)
    ]
    assert 1 <= chosen(capsys)[0][0] < 48
    np.testing.assert_allclose(*changes, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_fit_says_it_once(free, capsys):
    free(2**30)
    x, y = small.data(40)  # The last of three batches is smaller.
    weights = []
    for size in ("auto", 4):
        model = small.model(microbatch_size=size, compile_arguments={"steps_per_execution": 2})
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        weights.append(small.weights(model))
    assert chosen(capsys) == [(16, 16)]
    np.testing.assert_allclose(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_it_warns_where_nothing_fits(free):
    free(1000)
    with pytest.warns(UserWarning, match="microbatches of 1 examples.*may run out of memory"):
        small.step(image_model(microbatch_size="auto"), *images(4))


def test_without_interactive_logging_it_goes_to_the_log(free, capsys, monkeypatch):
    free(2**30)
    said = []
    monkeypatch.setattr(microbatch_size.logging, "info", said.append)
    keras.config.disable_interactive_logging()
    try:
        small.step(small.model(microbatch_size="auto"), *small.data())
    finally:
        keras.config.enable_interactive_logging()
    assert "microbatches of 16 examples" in said[0]
    assert not chosen(capsys)


def test_unknown_lengths_are_refused():
    model = keras.Sequential([keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)])
    optimizer = tfdpx.DPSGD(batch_size=4, noise_multiplier=1.0, microbatch_size="auto")
    model.compile(optimizer, "mse")
    signature = (tf.TensorSpec([4, None, 2]), tf.TensorSpec([4, 3]))
    data = tf.data.Dataset.from_generator(
        lambda: [(tf.ones([4, 5, 2]), tf.ones([4, 3]))], output_signature=signature
    )
    with pytest.raises(ValueError, match="Pad to one length, or give an int"):
        model.fit(data, verbose=0)


def test_bad_sizes():
    for value in ("Auto", "", 0, -1, 2.0, True, [4]):
        with pytest.raises(ValueError, match="`microbatch_size` must be an int >= 1, None or"):
            tfdpx.DPSGD(batch_size=4, noise_multiplier=1.0, microbatch_size=value)


def test_config():
    optimizer = tfdpx.DPSGD(batch_size=4, noise_multiplier=1.0, microbatch_size="auto")
    again = tfdpx.DPSGD.from_config(optimizer.get_config())
    assert again.microbatch_size == "auto"


@given(st.integers(1, 100), st.integers(1, 100), st.integers(0, 1000))
def test_rows_of_all_passes(examples, multiple, count):
    size = microbatch_size.MicrobatchSize(examples, min(multiple, examples))
    computed, left = 0, count
    while left > 0:
        computed += min(examples, math.ceil(left / size.multiple) * size.multiple)
        left -= examples
    assert size.rows(count) == computed
    assert not microbatch_size.of_examples(examples, varies=False).varies
    most = microbatch_size.of_examples(examples, varies=True).rows(count) - count
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
        rows = microbatch_size.of_examples(size, varies).rows(drawn)
        return weights @ (-(-drawn // size) * every + rows * each)

    mean, deviation = number * probability, math.sqrt(number * probability * (1 - probability))
    size = microbatch_size.least_time(each, every, mean, deviation, number, number, varies)
    assert seconds(size) <= 1.03 * min(seconds(other) for other in range(1, number + 1, 7))


def test_without_padding_a_batch_is_cut_evenly():
    assert microbatch_size.least_time(1.0, 30.0, 100, 0.0, 60, 100) == 50
    assert microbatch_size.least_time(1.0, 30.0, 100, 0.0, 100, 100) == 100


PROGRAM = """
import pathlib
import re
import sys

sys.path[:0] = sys.argv[1:]
import microbatch_size_test as given
from tfdpx.training import _free_memory, _graph_peak

def resident(name):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(name + r":\\s+(\\d+)", status).group(1)) * 1024

peaks = []
count = _graph_peak.peak_bytes
_graph_peak.peak_bytes = lambda function: peaks.append(count(function)) or peaks[-1]
_free_memory.free_bytes = lambda device: 2**45

x, y = given.images(1024)
model = given.image_model(batch_size=1024, microbatch_size="auto")
model.train_on_batch(x[:8], y[:8])
before = resident("VmRSS")
model.train_on_batch(x, y)
predicted = peaks[0] + (peaks[1] - peaks[0]) / 4 * 1020
print((resident("VmHWM") - before) / predicted)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_prediction_is_near_the_measured_peak():
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-c", PROGRAM, str(here), str(here.parents[1] / "support")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The share of memory that `auto` fills with the prediction leaves room for twice as much.
    assert 0.5 < float(done.stdout.splitlines()[-1]) < 2.0
