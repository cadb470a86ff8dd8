"""Trains networks privately at eight learning rates each, and adds a row per training to a file.

    python -m experiments.settings.study --out=new_rows.csv

An interrupted study continues after the last setting with all its rows in the file. To evaluate the
rows, give the file to `experiments.settings.fit` by `--rows`.
"""

import argparse
import csv
import functools
import pathlib

import keras
import numpy as np
from sklearn import datasets

import tfdpx
from experiments.free_features.drawings import Shapes
from experiments.high_accuracy import clips, fit_choice
from experiments.settings import own_networks
from experiments.settings.own_networks import residual
from experiments.trainer import Trainer

layers = keras.layers
TEST, LENGTH, WORDS = 2000, 16, 1000
# Budgets: epsilon, batch size and the number of updates.
BASE, TIGHT, SHORT, LONG, SMALL = (
    (3, 500, 50), (1, 500, 50), (3, 500, 15), (3, 500, 200), (3, 250, 50),
)  # fmt: skip
# The tested learning rates are these factors times a rate that moves a weight by about 0.18.
FACTORS = [2.0**k for k in range(-6, 2)]
CELLS = [
    *[("dense7k", "digits8", BASE), ("cnn5k", "digits8", BASE), ("cnn5k", "digits8", TIGHT)],
    *[(net, "strokes", BASE) for net in ("linear784", "dense100k", "dense5", "small_tanh")],
    *[("dense100k", "strokes", plan) for plan in (TIGHT, SHORT, LONG)],
    *[(net, "strokes", SMALL) for net in ("resnet_flat", "resnet_gap", "resnet_flat_ws")],
    *[
        (net, data, BASE)
        for net in ("dense100k", "dense5", "small_tanh")
        for data in ("shapes", "shapes_c")
    ],
    *[("dense100k", "strokes_c", BASE), ("dense5", "strokes_c", BASE)],
    *[("dense1m", "strokes", BASE), ("dense1m", "strokes", SHORT), ("dense10m", "strokes", SHORT)],
    *[("text", "tokens", SMALL), ("lora", "tokens", SMALL)],
]


def dense(*units, shape=own_networks.SHAPE):
    """Returns a network of dense layers with ReLU; `units` are the widths of the hidden layers."""
    hidden = [layers.Dense(count, "relu") for count in units]
    return keras.Sequential([keras.Input(shape), layers.Flatten(), *hidden, layers.Dense(10)])


def transformer(classes=4, width=64):
    """Returns a transformer of two blocks on sequences of words, with an embedding of positions."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.EinsumDense("btd,de->bte", (LENGTH, width), bias_axes="te")(
        layers.Embedding(WORDS, width)(words)
    )
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(2, width // 2)(y, y)])
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    return keras.Model(words, layers.Dense(classes)(x))


@functools.cache
def trained_text(steps=400):
    """Trains a transformer on public classes without privacy, and returns its weights."""
    keras.utils.set_random_seed(77)
    model = transformer()
    x, y = tokens(14, 128 * steps, 5, 3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-3), loss)
    model.fit(x, y, batch_size=128, verbose=0)
    return model.get_weights()


def warm(what=None):
    """Returns a transformer with the weights of `trained_text` and a new last layer."""
    model = transformer()
    new = model.layers[-1].get_weights()
    model.set_weights([*trained_text()[: -len(new)], *new])
    if what:
        tfdpx.layers.trainable(model, what, 4)
    return model


_GROUPS = functools.partial(layers.GroupNormalization, 8)
NETWORKS = {
    "linear784": dense,
    "cnn5k": clips.convolutional,
    "dense7k": functools.partial(dense, 100, shape=(8, 8, 1)),
    "dense100k": functools.partial(dense, 128),
    "dense5": functools.partial(dense, 100, 100, 100, 100),
    "dense1m": functools.partial(dense, 800, 400, 100),
    "dense10m": functools.partial(dense, 4000, 1500, 400),
    "small_tanh": own_networks.plain,
    "resnet_gap": lambda: residual(2, _GROUPS),
    "resnet_flat": lambda: residual(2, _GROUPS, flat=True),
    "resnet_flat_ws": lambda: residual(2, _GROUPS, tfdpx.layers.WSConv2D, flat=True),
    "text": warm,
    "lora": functools.partial(warm, "lora"),
}


def tokens(seed, count, factor, offset):
    """Returns sequences of words, int32 `[count, LENGTH]`, and their classes, int32 `[count]`.

    There are 16 clusters of 40 words each. A fifth of the words of a sequence are from one cluster.
    A class consists of four clusters; `factor` and `offset` assign clusters to classes.
    """
    rng = np.random.default_rng(seed)
    clusters = rng.integers(0, 16, count)
    words = np.minimum(rng.zipf(1.3, (count, LENGTH)) - 1, WORDS - 1)
    typical = 300 + 40 * clusters[:, None] + rng.integers(0, 40, (count, LENGTH))
    other = 300 + rng.integers(0, 640, (count, LENGTH))
    part = rng.random((count, LENGTH))
    words = np.where(part < 0.2, typical, np.where(part < 0.35, other, words))
    return words.astype("int32"), ((clusters * factor + offset) % 16 % 4).astype("int32")


@functools.cache
def load(name, count):
    """Returns the training data and the test data of a data set, each a pair `(x, y)`.

    If `name` ends in "_c", pixels in [0, 1] are scaled to [-1, 1].
    """
    if name.endswith("_c"):
        return [(2 * x - 1, y) for x, y in load(name[:-2], count)]
    if name == "digits8":
        bunch = datasets.load_digits()
        rows = np.random.default_rng(0).permutation(len(bunch.target))
        x, y = (bunch.images[rows, ..., None] / 8 - 1).astype("float32"), bunch.target[rows]
    elif name == "tokens":
        x, y = tokens(13, count + TEST, 7, 0)
    else:
        kind, strength = (Shapes, 1.3) if name == "shapes" else (tfdpx.synthetic.Strokes, 1.6)
        x, y = fit_choice.problem(kind, count + TEST, 28, strength)
    return (x[:count], y[:count]), (x[count:], y[count:])


def rows_of(net, data, setting, optimizer, seeds, count):
    """Trains a setting with each rate and seed; yields a row (a dict) for each training."""
    epsilon, batch, steps = setting
    train, test = load(data, 1437 if data == "digits8" else count)
    plan = tfdpx.PrivacyPlan(
        len(train[1]), batch_size=min(batch, len(train[1])), steps=steps, epsilon=epsilon,
        delta=1e-5,
    )  # fmt: skip
    private_optimizer = {"sgd": tfdpx.DPSGD, "adam": tfdpx.DPAdam}[optimizer](
        1.0, batch_size=plan.batch_size, noise_multiplier=plan.noise_multiplier, l2_norm_clip=0.1,
        use_ema=True, ema_momentum=0.9999,
    )  # fmt: skip
    model = NETWORKS[net]()
    trainer = Trainer(model, private_optimizer, plan, train)
    about = {
        "net": net, "data": data, "n": plan.num_examples, "epsilon": epsilon,
        "weights": sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        "B": plan.batch_size, "T": steps, "sigma": round(plan.noise_multiplier, 4),
        "opt": optimizer, "clip": 0.1, "warm": int(data == "tokens"),
    }  # fmt: skip
    unit = plan.batch_size / plan.noise_multiplier if optimizer == "sgd" else 1
    for seed in range(seeds):
        keras.utils.set_random_seed(seed)
        weights = NETWORKS[net]().get_weights()
        for rate in (factor * 0.18 * unit / steps**0.5 for factor in FACTORS):
            trainer.train(seed, rate, weights)
            yield {**about, "seed": seed, "rate": rate, "ema": round(trainer.accuracy(*test), 4)}


def main(arguments=None):
    """Trains all settings that have no rows in the file yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, default="new_rows.csv", help="File of the rows.")
    add("--networks", default=",".join(NETWORKS), help="Joined by commas.")
    add("--seeds", type=int, default=1, help="Trainings at each rate.")
    add("--num_examples", type=int, default=4000, help="To train on, of generated data.")
    values = parser.parse_args(arguments)
    done = set()
    if values.out.exists():
        with open(values.out) as file:
            done = {tuple(r[k] for k in ("net", "data", "epsilon", "T", "opt"))
                    for r in csv.DictReader(file)}  # fmt: skip
    for net, data, setting in CELLS:
        for optimizer in ("sgd", "adam"):
            key = (net, data, str(setting[0]), str(setting[2]), optimizer)
            if net not in values.networks.split(",") or key in done:
                continue
            rows = [*rows_of(net, data, setting, optimizer, values.seeds, values.num_examples)]
            with open(values.out, "a", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                if not file.tell():
                    writer.writeheader()
                writer.writerows(rows)
            print(*key, " ".join(f"{100 * row['ema']:.0f}" for row in rows), flush=True)


if __name__ == "__main__":
    main()
