"""Trains networks that a Keras user might write, with the settings of `tfdpx.suggest`.

    python -m experiments.settings.own_networks --epsilons=3 --seeds=1

Prints the test accuracy of each network in percent, on 4,000 generated images of distorted strokes
in ten classes. Each network is trained as it is; with the changes of `make_private_model`; with a
warm start on other generated strokes, after which only the last layer is trained; and, for
comparison, a linear classifier is trained on the fixed features of `ScatterLinear`.
`--data=FILE.npz` uses other images; the file holds the arrays x, y, xt and yt (test images and
labels).
"""

import argparse
import json
import math
import statistics
import time

import keras
import numpy as np

import tfdpx
from experiments.high_accuracy import fit_choice
from tfdpx import suggestion
from tfdpx.layers.private_model import CHANGES

layers = keras.layers
SHAPE, CLASSES, TRAIN, DELTA = (28, 28, 1), 10, 4000, 1e-5
STARTS = ("as it stands", "changed", "warm", "warm and changed", "fixed features", "not private")
# With ", all" added, as in "warm, all", all weights are trained after the warm start.


def residual(strides=1, norm=layers.BatchNormalization, conv=layers.Conv2D, flat=False):
    """Returns a residual CNN with 78,000 weights.

    The last feature map is averaged globally or, if `flat`, in 2 x 2 windows and flattened.
    """
    inputs = keras.Input(SHAPE)
    x = conv(16, 3, strides=strides, padding="same")(inputs)
    for index, width in enumerate((16, 32, 64)):
        strides = 2 if index else 1
        y = layers.Activation("relu")(norm()(x))
        is_same = x.shape[-1] == width
        skip = x if is_same else conv(width, 1, strides=strides, padding="same")(x)
        y = conv(width, 3, strides=strides, padding="same")(y)
        y = layers.Activation("relu")(norm()(y))
        x = layers.Add()([skip, conv(width, 3, padding="same")(y)])
    x = layers.Activation("relu")(norm()(x))
    if flat:
        x = layers.Flatten()(layers.AveragePooling2D(2, 1)(x))
    else:
        x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def plain(activation="tanh"):
    """Returns the CNN of Papernot et al. (2020), which has 26,000 weights."""
    parts = [
        layers.Conv2D(16, 8, strides=2, padding="same", activation=activation),
        layers.MaxPooling2D(2, 1),
        layers.Conv2D(32, 4, strides=2, activation=activation),
        layers.MaxPooling2D(2, 1),
        layers.Flatten(),
        layers.Dense(32, activation=activation),
        layers.Dense(CLASSES),
    ]
    return keras.Sequential([keras.Input(SHAPE), *parts])


def stack():
    """Returns a CNN of three convolutions with ReLU and two dense layers."""
    parts = [keras.Input(SHAPE)]
    for width in (16, 32, 64):
        parts += [layers.Conv2D(width, 3, padding="same", activation="relu")]
        parts += [layers.MaxPooling2D(2)]
    dense = layers.Dense(64, activation="relu")
    return keras.Sequential([*parts, layers.Flatten(), dense, layers.Dense(CLASSES)])


NETWORKS = {
    "residual": residual,
    "small_residual": lambda: residual(2),
    "plain": plain,
    "plain_relu": lambda: plain("relu"),
    "stack": stack,
    "wrn": lambda: tfdpx.models.WideResNet(16, 4, CLASSES, SHAPE),
}


def images(file):
    """Returns training images and labels, and test images and labels."""
    if file:
        return [np.load(file)[name] for name in ("x", "y", "xt", "yt")]
    x, y = fit_choice.problem(tfdpx.synthetic.Strokes, TRAIN + 2000, 24, 1.6, seed=5)
    x = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))  # A margin like in MNIST.
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


def accuracy(name, start, epsilon, seed, optimizer, data, without, factor):
    """Trains privately; returns the test accuracy and the `Suggestion` of the settings."""
    x, y, x_test, y_test = data
    keras.utils.set_random_seed(seed)
    ordinary = {"sgd": keras.optimizers.SGD(0.05, 0.9), "adam": keras.optimizers.Adam()}[optimizer]
    if start == "fixed features":
        network = tfdpx.models.ScatterLinear(CLASSES, SHAPE)
    else:
        network = NETWORKS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(ordinary, loss, metrics=["accuracy"])
    if start == "not private":
        network.fit(x, y, epochs=30, batch_size=64, verbose=0)
        return network.evaluate(x_test, y_test, verbose=0)[1], None
    arguments = {"epsilon": epsilon, "delta": DELTA, "num_examples": len(x)}
    if start == "fixed features":
        values = fit_choice.automatic(epsilon, len(x))
        plan = tfdpx.PrivacyPlan(batch_size=len(x), steps=values.steps, **arguments)
        rate, clip, momentum = values.learning_rate, values.l2_norm_clip, values.ema_momentum
    else:
        if "changed" not in start:
            without = [change for change in CHANGES if change != "group_norm"]
        network, plan = tfdpx.make_private_model(network, without=without, **arguments)
        clip, momentum = suggestion.CLIP, suggestion.EMA_MOMENTUM
    if start.startswith("warm"):
        tfdpx.synthetic.warm_start(network)
        if not start.endswith("all"):
            tfdpx.layers.trainable(network, "last")
    if start != "fixed features":
        rate = factor * tfdpx.suggest(plan, network, optimizer).learning_rate
    kind = {"sgd": tfdpx.DPSGD, "adam": tfdpx.DPAdam}[optimizer]
    if start == "fixed features":
        kind = tfdpx.DPSGD
    network.compile(
        kind(rate, plan=plan, l2_norm_clip=clip, use_ema=True, ema_momentum=momentum),
        loss,
        metrics=["accuracy"],
    )
    network.fit(x, y, epochs=math.ceil(plan.epochs), verbose=0)
    return network.evaluate(x_test, y_test, verbose=0)[1], rate


def main():
    """Prints a row for each network, start, epsilon and seed. The last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default="residual,plain", help=f"Of {', '.join(NETWORKS)}.")
    parser.add_argument("--starts", default=";".join(STARTS), help="Joined by semicolons.")
    parser.add_argument("--epsilons", default="1,3,8", help="Joined by commas.")
    parser.add_argument("--optimizer", default="sgd", choices=["sgd", "adam"])
    parser.add_argument("--seeds", type=int, default=5, help="Trainings of each.")
    parser.add_argument("--without", default="", help="Changes to leave out.")
    parser.add_argument("--factor", type=float, default=1.0, help="Times the suggested rate.")
    parser.add_argument("--data", help="File of other images.")
    values = parser.parse_args()
    data, results = images(values.data), {}
    without = [name for name in values.without.split(",") if name]
    for name in values.networks.split(","):
        for start in values.starts.split(";"):
            for epsilon in map(float, values.epsilons.split(",")):
                reached, began = [], time.perf_counter()
                for seed in range(values.seeds):
                    arguments = (epsilon, seed, values.optimizer, data, without, values.factor)
                    value, rate = accuracy(name, start, *arguments)
                    reached.append(100 * value)
                middle, spread = statistics.median(reached), max(reached) - min(reached)
                results[f"{name}, {start}, {epsilon:g}"] = reached
                seconds = (time.perf_counter() - began) / values.seeds
                print(
                    f"{name}, {start}, epsilon {epsilon:g}: {middle:.1f}% (within {spread:.1f}), "
                    f"rate {rate}, {seconds:.0f} s",
                    flush=True,
                )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
