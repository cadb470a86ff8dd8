"""Times private steps of KerasHub's text models against ordinary ones.

    python -m experiments.benchmark.text

Each step runs in a separate process, on 16 texts of 128 tokens, with random weights. The program
prints CPU time, memory, and their ratios. It needs the packages of `tfdpx[text]`.
"""

import argparse
import importlib
import resource
import subprocess
import sys
import time

import keras
import numpy as np

import tfdpx

TEXTS, TOKENS, WIDTH = 16, 128, 384
SIZES = {"bert": 30_522, "gpt2": 50_257}


def measure_text(name, what, private):
    """Returns the median CPU seconds of six steps, peak memory in GB, and the number of weights."""
    models = importlib.import_module("keras_hub").models  # Not needed to print the help.
    sizes = SIZES[name], 2, 6, WIDTH, 4 * WIDTH
    if name == "bert":
        backbone = models.BertBackbone(*sizes, max_sequence_length=TOKENS, dropout=0.0)
        model = models.BertTextClassifier(backbone, 2, dropout=0.0)
    else:
        backbone = models.GPT2Backbone(*sizes, max_sequence_length=TOKENS, dropout=0.0)
        model = models.GPT2CausalLM(backbone)
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
    """Measures the two steps of each model, each in a new process, and prints a line per model."""
    for name in SIZES:
        for what in ("lora", "all"):
            lines = [
                subprocess.check_output(
                    [sys.executable, "-m", __spec__.name, name, what, *private],
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
    """Measures the step that `arguments` name, or starts a process to measure each step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("step", nargs="*", help="One step alone: model, weights, private.")
    step = parser.parse_args(arguments).step
    if step:
        print(*measure_text(*step[:2], private=len(step) > 2))
    else:
        measure_texts()


if __name__ == "__main__":
    main()
