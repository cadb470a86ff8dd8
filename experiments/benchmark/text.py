"""The processor's time and the memory of private steps of KerasHub's text models.

python -m experiments.benchmark.text

Each step in a process of its own, 16 texts of 128 tokens, random weights; needs `tfdpx[text]`.
"""

import resource
import subprocess
import sys
import time

TEXTS, TOKENS, WIDTH = 16, 128, 384
SIZES = {"bert": 30_522, "gpt2": 50_257}


def measure(name, what, private):
    """Seconds of the processor a step, the median of six; GB at most; trained weights."""
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


def main():
    """Prints a line a model, and runs each of its two steps in a new process."""
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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*measure(sys.argv[1], sys.argv[2], len(sys.argv) > 3))
    else:
        main()
