r"""Compares constant, automatic and adaptive clips, with several optimizers, at one epsilon.

    python -m experiments.high_accuracy.clips --seeds=5

There are three tasks: a small convolutional network and a small transformer on scikit-learn's
digits, and a small network on scikit-learn's table of breast cancers. Each task is trained by each
optimizer with each clip, at several learning rates. All seeds and rates share one traced training
step; between trainings weights and slots are reset. The noise is from a plan for --epsilon, and
batches are Poisson samples. The last line is one JSON object: the median test accuracy over seeds
for each learning rate.
"""

import argparse
import functools
import itertools
import json
import statistics
import time

import keras
import numpy as np
from sklearn import datasets, model_selection

import tfdpx
from experiments.free_features.drawings import Shapes
from experiments.high_accuracy import fit_choice
from experiments.trainer import Trainer
from tfdpx import synthetic

layers = keras.layers
DELTA = 1e-5
CLIPS = {"0.1": 0.1, "1": 1.0, "10": 10.0, "automatic": "automatic", "adaptive": None}
RATES = {"DPSGD": (0.5, 1.0, 2.0, 4.0), "DPAdam": (0.003, 0.01, 0.03, 0.1)}


def convolutional():
    """Returns a convolutional network with 5,000 weights for digits of 8 x 8 pixels."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def transformer():
    """Returns a transformer of one block. Its eight tokens are the pixel rows of a digit."""
    rows = keras.Input((8, 16))
    x = layers.Dense(16)(rows)
    x = x + layers.MultiHeadAttention(2, 8)(x, x)
    x = layers.LayerNormalization()(x)
    x = x + layers.Dense(16)(layers.Dense(32, "relu")(x))
    x = layers.LayerNormalization()(x)
    return keras.Model(rows, layers.Dense(10)(layers.Flatten()(x)))


def table():
    """Returns a network for 30 measurements of a tumor."""
    return keras.Sequential([keras.Input((30,)), layers.Dense(16, "relu"), layers.Dense(2)])


@functools.cache
def arrays(task):
    """Returns the training data and the test data of a task, each a pair `(x, y)`."""
    if task in GENERATED:
        x, y = fit_choice.problem(GENERATED[task], 1437 + fit_choice.TEST, 8, 1.3)
        x = 2 * x - 1
        return (x[:1437], y[:1437]), (x[1437:], y[1437:])
    bunch = datasets.load_breast_cancer() if task == "table" else datasets.load_digits()
    x = bunch.data.astype("float32")
    # The mean and standard deviation of each column are assumed to be public.
    x = (x - x.mean(0)) / x.std(0) if task == "table" else x / 8 - 1
    x = x if task == "table" else x.reshape(-1, 8, 8, 1)
    if task == "transformer":
        places = np.broadcast_to(np.eye(8, dtype="float32"), (len(x), 8, 8))
        x = np.concatenate([x[..., 0], places], axis=2)
    parts = model_selection.train_test_split(
        x, bunch.target, test_size=0.2, random_state=0, stratify=bunch.target
    )
    return (parts[0], parts[2]), (parts[1], parts[3])


TASKS = {
    "convolutional": (convolutional, 256),
    "transformer": (transformer, 256),
    "table": (table, 64),
    "strokes": (convolutional, 256),
    "shapes": (convolutional, 256),
}
GENERATED = {"strokes": synthetic.Strokes, "shapes": Shapes}


def trainer(task, optimizer, clip, steps, epsilon):
    """Returns the `Trainer` of a task, and the function that builds its network."""
    build, size = TASKS[task]
    train, _ = arrays(task)
    plan = tfdpx.PrivacyPlan(
        len(train[0]), batch_size=size, steps=steps, epsilon=epsilon, delta=DELTA
    )
    private = tfdpx.DPSGD if optimizer == "DPSGD" else tfdpx.DPAdam
    private_optimizer = private(
        1.0, batch_size=plan.batch_size, noise_multiplier=plan.noise_multiplier,
        l2_norm_clip=CLIPS[clip] or tfdpx.AdaptiveClip(),
    )  # fmt: skip
    return Trainer(build(), private_optimizer, plan, train), build


def compare(tasks, seeds, steps, epsilon):
    """Returns nested dicts of median accuracies, by task, optimizer, clip and learning rate."""
    results = {}
    for task, (optimizer, rates), clip in itertools.product(tasks, RATES.items(), CLIPS):
        began = time.perf_counter()
        many, build = trainer(task, optimizer, clip, steps, epsilon)
        reached = {rate: [] for rate in rates}
        for seed in range(seeds):
            keras.utils.set_random_seed(seed)
            weights = build().get_weights()
            for rate in rates:
                many.train(seed, rate, weights)
                reached[rate].append(many.accuracy(*arrays(task)[1]))
        medians = {rate: statistics.median(values) for rate, values in reached.items()}
        best = max(medians, key=medians.get)
        results[f"{task}; {optimizer}; {clip}"] = medians
        print(
            f"{task:14} {optimizer:18} {clip:10} {100 * medians[best]:5.1f}% at {best:<6g}"
            + " ".join(f"{100 * value:5.1f}" for value in medians.values())
            + f"  ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )
    return results


def main():
    """Runs the comparison that the flags describe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--tasks", default="convolutional,transformer,table", help="Some of them, joined by commas."
    )
    add("--seeds", type=int, default=5, help="Trainings of each setting.")
    add("--steps", type=int, default=60, help="Updates of a training.")
    add("--epsilon", type=float, default=3.0, help="Epsilon of a training.")
    values = parser.parse_args()
    tasks = values.tasks.split(",")
    results = compare(tasks, values.seeds, values.steps, values.epsilon)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
