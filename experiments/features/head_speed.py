"""Times DP-FC against the plain matrix products that it needs."""

import statistics
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf

from experiments.benchmark import memory
from experiments.features.mixture import mixture
from tfdpx.heads import FeatureCovariance

STEPS, DIMENSION, CLASSES = 10, 768, 100


def measure(count, repeats=5):
    """Medians of seconds, in turn: a fit, and one X^T X and ten X W and X^T R in float32.

    Args:
        count: Int, examples.
        repeats: Int.

    Returns:
        Dict. `added_peak_mib` is of a process of its own.
    """
    x, y = mixture(count, DIMENSION, CLASSES)
    residuals = np.ones([count, CLASSES], "float32")
    weights = np.zeros([DIMENSION, CLASSES], "float32")

    def fit():
        _fit(x, y)

    def products():
        rows = tf.constant(x)
        tf.matmul(rows, rows, transpose_a=True).numpy()
        for _ in range(STEPS):
            tf.matmul(rows, weights).numpy()
            tf.matmul(rows, residuals, transpose_a=True).numpy()

    def of_numpy():
        x.T @ x
        for _ in range(STEPS):
            x @ weights
            x.T @ residuals

    kinds = {"fit": fit, "tensorflow_products": products, "numpy_products": of_numpy}
    wall, processor = ({name: [] for name in kinds} for _ in range(2))
    for _ in range(repeats + 1):  # The first is a warm-up.
        for name, run in kinds.items():
            began = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - began[0])
            processor[name].append(time.process_time() - began[1])
    seconds, processor_seconds = (
        {name: statistics.median(times[1:]) for name, times in kind.items()}
        for kind in (wall, processor)
    )
    record = {f"{name}_seconds": value for name, value in seconds.items()}
    for name in ("tensorflow_products", "numpy_products"):
        record[f"ratio_to_{name}"] = seconds["fit"] / seconds[name]
        record[f"processor_ratio_to_{name}"] = processor_seconds["fit"] / processor_seconds[name]
    return {"num_examples": count, **record, "features_mib": x.nbytes / 2**20,
            "added_peak_mib": _added_peak(count)}  # fmt: skip


def _fit(x, y):
    FeatureCovariance(CLASSES, 1.0, 1e-5, STEPS).fit(x, y)


def _added_peak(count):
    """MiB that the first fit of a new process adds to its resident memory, at most.

    A process that has fitted before would use the memory again that it has kept.
    """
    command = [sys.executable, "-m", __name__, str(count)]
    done = subprocess.run(command, cwd=memory.ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _main(count):
    x, y = mixture(count, DIMENSION, CLASSES)
    before = memory.resident_mib("VmRSS")
    _fit(x, y)
    print(memory.resident_mib("VmHWM") - before)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
