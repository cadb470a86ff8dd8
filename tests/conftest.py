"""Settings that every test shares: quiet logs, fixed seeds, reproducible hypothesis runs."""

import contextlib
import os
import pathlib

import hypothesis
import pytest

# Both are read when TensorFlow is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")


@contextlib.contextmanager
def _without_stderr():
    """Discards what is written to file descriptor 2, by whichever language."""
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


# Some notices of TensorFlow's start know no level, and pytest would print them after its summary.
with _without_stderr():
    import keras
    import tensorflow as tf

tf.get_logger().setLevel("ERROR")

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; a pool of threads in each would only make them compete.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)

hypothesis.settings.register_profile(
    "tfdpx",
    deadline=None,  # The first example of a test traces and compiles.
    max_examples=25,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tfdpx")


# Cases that `make test-slow` runs, while `make test` runs others of the same kind.
SLOW_CASES = pathlib.Path(__file__).with_name("slow_cases.txt")


def pytest_collection_modifyitems(items):
    """Marks the cases of `slow_cases.txt` as slow."""
    slow = set(SLOW_CASES.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _fixed_seeds():
    keras.utils.set_random_seed(20_220_428)
