"""Compares two ways to protect 144 writers of ten digits each: drawing digits, or drawing writers.

    python -m experiments.individual.people --runs=5

Both ways train a linear classifier on scattering features, with full batches, at the same epsilon
for a writer. "digits": updates clip the gradient of each digit, and the noise protects ten digits
together. "writers, k": updates clip each writer's mean gradient over up to k digits. The last line
is a JSON object of accuracies.
"""

import json
import pathlib
import warnings

import keras
import numpy as np
from absl import app, flags

import tfdpx
from experiments import pictures
from tfdpx.accounting import group_epsilon
from tfdpx.train.data import images
from tfdpx.train.output import print_table

_RUNS = flags.DEFINE_integer("runs", 5, "Seeds, each with another dealing.", lower_bound=1)
_EPSILONS = flags.DEFINE_list("epsilons", ["8", "3", "1"], "A writer's epsilon.")
_PLOT = flags.DEFINE_string("plot", None, "PNG file for a picture.")
WRITERS, OF_EACH, DELTA, CLIP = 144, 10, 1e-4, 0.02
PER_WRITER = (1, 3, 10)


def features_of(data):
    """Returns two pairs (features, labels): of the training images, and of the test images."""
    model = tfdpx.models.ScatterLinear(data.num_classes, data.image_shape)
    body = keras.Model(model.inputs, model.layers[-1].input)
    pairs = (data.train_x, data.train_y), (data.eval_x, data.eval_y)
    return [(body.predict(x / 240, batch_size=512, verbose=0), y) for x, y in pairs]


def plans(epsilon, steps, num_examples):
    """Returns a dict from the name of a way to its plan and the number of digits per writer.

    The second value is the largest number of digits of a writer in an update, None for "digits".
    """
    of_writers = dict(epsilon=epsilon, delta=DELTA, steps=steps, unit="user")
    writers = tfdpx.PrivacyPlan(WRITERS, WRITERS, **of_writers)
    # With full batches, ten digits change the sum by ten clips, so the noise is ten times as large.
    noise = OF_EACH * writers.noise_multiplier
    digits = tfdpx.PrivacyPlan(
        num_examples, num_examples, steps, noise_multiplier=noise, delta=DELTA
    )
    assert group_epsilon(digits, OF_EACH) <= epsilon * (1 + 1e-3)
    return {"digits": (digits, None), **{f"writers, {k}": (writers, k) for k in PER_WRITER}}


def accuracy(plan, per_writer, owners, steps, move, train, test):
    """Trains once and returns the test accuracy."""
    model = keras.Sequential(
        [keras.Input(train[0].shape[1:]), keras.layers.Dense(10, kernel_initializer="zeros")]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpx.DPSGD(move / steps, plan=plan, l2_norm_clip=CLIP)
    model.compile(optimizer, loss, metrics=["accuracy"])
    people = {}
    if per_writer is not None:
        people = {"user_ids": owners, "examples_per_user": per_writer}
    model.fit(*train, epochs=1, steps_per_epoch=steps, verbose=0, **people)
    return model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]


def main(argv):
    """Trains in each way at each epsilon, and prints the median accuracies."""
    del argv
    warnings.simplefilter("ignore")
    data = images.load("digits")
    train, test = features_of(data)
    count, rows = len(train[1]), []
    for epsilon in map(float, _EPSILONS.value):
        steps, move = 50, max(0.3 * epsilon * WRITERS, 100)
        for way, (plan, per_writer) in plans(epsilon, steps, count).items():
            accuracies = []
            for seed in range(_RUNS.value):
                owners = np.random.default_rng(seed).permutation(np.arange(count) % WRITERS)
                accuracies.append(accuracy(plan, per_writer, owners, steps, move, train, test))
            rows.append({"epsilon": epsilon, "way": way, "accuracies": accuracies})
            rows[-1]["median"] = float(np.median(accuracies))
            print(f"epsilon {epsilon:g}, {way}: {100 * rows[-1]['median']:.1f}%", flush=True)
    record = {f"{r['way']} at {r['epsilon']:g}": f"{100 * r['median']:.1f}%" for r in rows}
    print_table(record, title=f"median accuracy of {_RUNS.value} runs")
    if _PLOT.value:
        lines = {}
        for row in rows:
            lines.setdefault(row["way"], {})[row["epsilon"]] = row["accuracies"]
        pictures.draw({"updates draw": lines}, pathlib.Path(_PLOT.value))
    print(json.dumps({"writers": WRITERS, "delta": DELTA, "rows": rows}))


if __name__ == "__main__":
    app.run(main)
