"""Times `Scattering2D` against Kymatio's TensorFlow transform and against the bare FFTs it needs.

    python -m experiments.benchmark.scattering_throughput --repeats=20

All run in turn in one process, J=2, L=8, order 2, as graphs; with `_xla` compiled by XLA. The bare
FFTs are those of a transform that works on every second pixel after a wavelet of scale 1: of the
padded images, of the first moduli, and back for every wavelet. Prints a table, and last one JSON
object: by shape of an image the images a second, seconds of the first call (filters, tracing,
compiling), `ffts_ratio`, of the layer's median seconds to the FFTs', and `kymatio_ratio`, of
Kymatio's to the layer's.
"""

import argparse
import importlib
import json
import os
import statistics
import time
from unittest import mock

import numpy as np
import scipy.special
import tensorflow as tf

from experiments.benchmark import steps
from tfdpx.layers import Scattering2D, morlet

J, L = 2, 8
# Shape of an image: images at a time.
BATCHES = {(32, 32, 3): 64, (224, 224, 3): 4}


def kymatio(size):
    """Kymatio's transform of `[batch, channels, height, width]`."""
    # It imports this for its transform of volumes, and SciPy 1.17 has it no more.
    with mock.patch.object(scipy.special, "sph_harm", create=True):
        return importlib.import_module("kymatio.tensorflow").Scattering2D(J, size, L)


def bare_ffts(size, rows):
    """The inputs of the FFTs, complex tensors, and a function that transforms them."""
    height, width = morlet.FilterBank(size, J, L, max_order=2).padded
    maps = {"images": (1, 0), "moduli": (L, 0)}  # Number for a row, and resolution.
    waves = {f"waves_{j}": (L, j) for j in range(J)} | {"second_waves": (L**2, 1)}
    rng = np.random.default_rng(0)
    inputs = {
        name: tf.constant(rng.normal(size=(rows, n, height >> r, width >> r)), "complex64")
        for name, (n, r) in {**maps, **waves}.items()
    }

    def transform(inputs):
        forward = [tf.signal.fft2d(inputs[name]) for name in maps]
        return forward + [tf.signal.ifft2d(inputs[name]) for name in waves]

    return inputs, transform


def contenders(shape, batch):
    """`{name: function of no arguments that makes the function to call, and what with}`."""
    images = np.random.default_rng(0).uniform(size=(batch, *shape)).astype("float32")
    last, first = tf.constant(images), tf.constant(np.moveaxis(images, -1, 1))
    inputs, transform = bare_ffts(shape[:2], batch * shape[-1])
    return {
        "layer": lambda: (Scattering2D(J, L), last),
        "layer_xla": lambda: (Scattering2D(J, L), last),
        "kymatio": lambda: (kymatio(shape[:2]), first),
        "ffts": lambda: (transform, inputs),
        "ffts_xla": lambda: (transform, inputs),
    }


def start(make, jit_compile):
    """The graph of a contender as a function of no arguments, and the seconds of its first call."""
    began = time.perf_counter()
    function, inputs = make()
    traced = tf.function(function, jit_compile=jit_compile, autograph=False)

    def call():
        result = traced(inputs)
        tf.test.experimental.sync_devices()
        return result

    call()
    return call, time.perf_counter() - began


def measure(shape, batch, repeats):
    """The figures for images of one shape."""
    started = {n: start(f, n.endswith("_xla")) for n, f in contenders(shape, batch).items()}
    timed = steps.interleaved({name: call for name, (call, _) in started.items()}, repeats)
    median = {name: statistics.median(seconds) for name, seconds in timed.items()}
    return {
        "batch": batch,
        "images_per_second": {name: batch / seconds for name, seconds in median.items()},
        "first_call_seconds": {name: seconds for name, (_, seconds) in started.items()},
        "ffts_ratio": median["layer"] / median["ffts"],
        "ffts_ratio_xla": median["layer_xla"] / median["ffts_xla"],
        "kymatio_ratio": median["kymatio"] / median["layer"],
        "kymatio_ratio_xla": median["kymatio"] / median["layer_xla"],
    }


def main(arguments=None):
    """Measures all shapes and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=20, help="Runs, of which medians are taken.")
    repeats = parser.parse_args(arguments).repeats
    record = {"tensorflow": tf.__version__, "cpus": os.cpu_count(), "repeats": repeats}
    for shape, batch in BATCHES.items():
        name = "x".join(map(str, shape))
        record[name] = figures = measure(shape, batch, repeats)
        print(f"{name}, {batch} at a time: images a second, seconds of the first call")
        for contender, speed in figures["images_per_second"].items():
            first = figures["first_call_seconds"][contender]
            print(f"  {contender:10} {speed:8.1f} {first:6.2f}", flush=True)
    print(json.dumps(record))


if __name__ == "__main__":
    main()
