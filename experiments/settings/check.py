"""Trains points of the study with tfdpx itself, and prints both accuracies.

    python -m experiments.settings.check --seeds=3

The study simulates the mechanism in JAX. Here are the same networks on scikit-learn's digits with
`tfdpx.DPSGD` and `tfdpx.DPAdam`: test accuracy of the averaged weights.
"""

import argparse
import json
import statistics

import keras
import numpy as np
from sklearn import datasets

import tfdpx
from experiments.settings import fit

layers = keras.layers
NETWORKS = {
    "dense7k": [layers.Flatten, lambda: layers.Dense(100, "relu")],
    "cnn5k": [
        lambda: layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D,
        lambda: layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.Flatten,
    ],
}
# A network, an optimizer, and the learning rate as a multiple of the rule's.
POINTS = [("dense7k", "sgd", 1), ("dense7k", "adam", 1), ("cnn5k", "sgd", 1), ("cnn5k", "sgd", 4)]


def accuracy(name, optimizer, rate, plan, seed):
    """Returns the test accuracy of the averaged weights after one training."""
    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = (digits.data[order] / 8 - 1).reshape(-1, 8, 8, 1).astype("float32")
    y, num = digits.target[order], plan.num_examples
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((8, 8, 1)), *(f() for f in NETWORKS[name])])
    model.add(layers.Dense(10))
    private = {"sgd": tfdpx.DPSGD, "adam": tfdpx.DPAdam}[optimizer]
    model.compile(
        private(rate, plan=plan, l2_norm_clip=0.1, use_ema=True, ema_momentum=0.9999),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(plan.batches(x[:num], y[:num]), verbose=0)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return float(np.mean(model.predict(x[num:], verbose=0).argmax(1) == y[num:]))


def main():
    """Prints a row per point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="Trainings of each point.")
    seeds = range(parser.parse_args().seeds)
    plan = tfdpx.PrivacyPlan(1437, batch_size=500, steps=50, epsilon=3.0, delta=1e-5)
    results = {}
    for name, optimizer, factor in POINTS:
        rate = factor * fit.rate(plan, optimizer)
        values = [accuracy(name, optimizer, rate, plan, seed) for seed in seeds]
        simulated = fit.simulated(name, optimizer, rate)
        results[f"{name}, {optimizer}, {factor}x"] = statistics.mean(values), simulated
        print(
            f"{name:8} {optimizer:5} rate {rate:.3g}: {100 * statistics.mean(values):.1f}%, "
            f"simulated {100 * simulated:.1f}%",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
