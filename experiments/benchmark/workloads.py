"""Times `Scattering2D` against Kymatio, or private steps of KerasHub's text models.

    python -m experiments.benchmark.workloads scattering --repeats=20
    python -m experiments.benchmark.workloads text

Scattering: against Kymatio's TensorFlow transform and the bare FFTs that it needs. All run in turn
in one process, J=2, L=8, order 2, as graphs; with `_xla` compiled by XLA. The bare FFTs are those
of a transform that uses every second pixel after a wavelet of scale 1: of the padded images, of
the first moduli, and back for every wavelet. Prints a table, and last one JSON object: by shape of
an image the images per second, seconds of the first call (filters, tracing, compiling),
`ffts_ratio`, the layer's median seconds over the FFTs', and `kymatio_ratio`, Kymatio's over the
layer's.

Text: each step in a separate process, 16 texts of 128 tokens, random weights; the processor's
time, memory, and their ratios. It needs `tfdpx[text]`.
"""

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import scipy.special
import tensorflow as tf

from experiments.benchmark import steps
from tfdpx.layers import Scattering2D

J, L = 2, 8
TEXTS, TOKENS, WIDTH = 16, 128, 384
SIZES = {"bert": 30_522, "gpt2": 50_257}
# From the shape of an image to the number of images at a time.
BATCHES = {(32, 32, 3): 64, (224, 224, 3): 4}


def kymatio(size):
    """Returns Kymatio's transform of `[batch, channels, height, width]`."""
    # Kymatio imports this for its transform of volumes, but SciPy 1.17 no longer has it.
    with mock.patch.object(scipy.special, "sph_harm", create=True):
        return importlib.import_module("kymatio.tensorflow").Scattering2D(J, size, L)


def bare_ffts(size, rows):
    """Returns the inputs of the FFTs, complex tensors, and a function that transforms them."""
    height, width = ((pixels // 2**J + 2) * 2**J for pixels in size)  # As `Scattering2D` pads.
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
    """Returns `{name: function that makes a function and its argument}`."""
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
    """Returns the graph of a contender as a function, and the seconds of its first call."""
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
    """Returns the figures for images of one shape."""
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


def measure_text(name, what, private):
    """Returns processor seconds per step, the median of six; largest GB; trained weights."""
    import keras
    import keras_hub
    import numpy as np

    import tfdpx

    sizes = SIZES[name], 2, 6, WIDTH, 4 * WIDTH
    if name == "bert":
        backbone = keras_hub.models.BertBackbone(*sizes, max_sequence_length=TOKENS, dropout=0.0)
        model = keras_hub.models.BertTextClassifier(backbone, 2, dropout=0.0)
    else:
        backbone = keras_hub.models.GPT2Backbone(*sizes, max_sequence_length=TOKENS, dropout=0.0)
        model = keras_hub.models.GPT2CausalLM(backbone)
    if what == "lora":
        backbone.enable_lora(8)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, SIZES[name], (TEXTS, TOKENS)).astype("int32")
    x = {key: np.ones_like(tokens) for key in model.input} | {"token_ids": tokens}
    y = rng.integers(0, 2, TEXTS) if name == "bert" else tokens
    optimizer = keras.optimizers.Adam(1e-4)
    if private:
        optimizer = tfdpx.DPAdam(
            1e-4, batch_size=TEXTS, noise_multiplier=1.0, microbatch_size=TEXTS
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    seconds = []
    for _ in range(8):
        start = time.process_time()
        model.train_on_batch(x, y)
        seconds.append(time.process_time() - start)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    trained = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return float(np.median(seconds[2:])), most, trained


def measure_texts():
    """Prints a line per model, and runs each of its two steps in a new process."""
    for name in SIZES:
        for what in ("lora", "all"):
            lines = [
                subprocess.check_output(
                    [sys.executable, "-m", __spec__.name, "text", name, what, *private],
                    text=True,
                    stderr=subprocess.DEVNULL,
                ).split("\n")[-2]
                for private in ([], ["private"])
            ]
            (seconds, most, trained), (private_seconds, private_most, _) = (
                map(float, line.split()) for line in lines
            )
            print(
                f"{name} {what}: {trained:,.0f} weights, {seconds:.3f} s, {private_seconds:.3f} s, "
                f"ratio {private_seconds / seconds:.2f}, memory {private_most / most:.2f}"
            )


def main(arguments=None):
    """Measures the workload of the arguments, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("workload", choices=("scattering", "text"), help="Which one.")
    parser.add_argument("step", nargs="*", help="One step of text alone: model, weights, private.")
    parser.add_argument("--repeats", type=int, default=20, help="Runs; their medians are printed.")
    values = parser.parse_args(arguments)
    if values.step:
        print(*measure_text(*values.step[:2], private=len(values.step) > 2))
    elif values.workload == "text":
        measure_texts()
    else:
        measure_scattering(values.repeats)


def measure_scattering(repeats):
    """Measures all shapes of images and prints the figures."""
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
