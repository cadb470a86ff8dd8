"""Fits the rule for the learning rate to the study's rows, and to published settings.

    python -m experiments.settings.fit

Prints a row per setting: the noise that all updates together add to a weight, `learning_rate *
noise_multiplier / batch_size * sqrt(steps)` for DP-SGD and `learning_rate * sqrt(steps)` for
DP-Adam, at the best rate, at the rates within two points of it, and where training breaks. Then
the accuracy lost by rules.
"""

import argparse
import collections
import csv
import json
import math
import pathlib
import statistics

ROWS = pathlib.Path(__file__).with_name("rows.csv")
PUBLISHED = pathlib.Path(__file__).with_name("published.csv")
# The constant was chosen on these networks, on strokes and small digits.
FITTED = ("linear784", "dense7k", "dense100k", "cnn5k", "small_tanh")
# The rule: the noise that all updates together add to each weight.
NOISE = {"sgd": 0.1, "adam": 0.15}
# And the largest learning rate, because with few updates the updates themselves are too large.
LARGEST = {"sgd": 4.0, "adam": 0.02}
KEY = ("net", "weights", "data", "epsilon", "B", "T", "sigma", "opt", "clip", "warm")


def settings(path=ROWS):
    """Returns a dict from settings, tuples of `KEY`, to sorted pairs of noise and accuracy."""
    runs = collections.defaultdict(lambda: collections.defaultdict(list))
    with open(path) as file:
        for row in csv.DictReader(file):
            noise = float(row["rate"]) * float(row["T"]) ** 0.5
            if row["opt"] == "sgd":
                noise *= float(row["sigma"]) / float(row["B"])
            runs[tuple(row[name] for name in KEY)][noise].append(float(row["ema"]))
    return {
        key: sorted((noise, statistics.mean(values)) for noise, values in by_noise.items())
        for key, by_noise in runs.items()
    }


def accuracy_at(curve, noise):
    """Returns the accuracy at a noise, interpolated between the logarithms of the tested ones."""
    for (low, left), (high, right) in zip(curve, curve[1:], strict=False):
        if low <= noise <= high:
            part = math.log(noise / low) / math.log(high / low)
            return left + part * (right - left)
    return curve[0][1] if noise < curve[0][0] else curve[-1][1]


def figures(key, curve):
    """Returns the best noise, its accuracy, the least and most noise within 2 points, the break."""
    chance = 0.25 if key[2] == "tokens" else 0.1
    noise, best = max(curve, key=lambda pair: pair[1])
    near = [n for n, value in curve if value >= best - 0.02]
    broken = [n for n, v in curve if n > noise and v < chance + 0.7 * (best - chance)]
    return noise, best, min(near), max(near), min(broken, default=math.inf)


def part(key):
    """Returns the part that a setting plays: "fitted", "held out", or "uncentred" gray images."""
    if key[2] == "shapes":
        return "uncentred"
    is_fitted = key[2] in ("strokes", "digits8") and key[0] in FITTED
    return "fitted" if is_fitted else "held out"


def bounded(key, noise):
    """Returns the noise, or the one at the largest learning rate if that is less."""
    unit = float(key[5]) ** 0.5
    if key[7] == "sgd":
        unit *= float(key[6]) / float(key[4])
    return min(noise, LARGEST[key[7]] * unit)


def losses(items, noise):
    """Returns the sorted accuracies that a noise loses against the best of the tested rates."""
    return sorted(
        max(value for _, value in curve) - accuracy_at(curve, bounded(key, noise))
        for key, curve in items
    )


def rate(plan, optimizer):
    """Returns the learning rate of the rule."""
    value = NOISE[optimizer] / plan.steps**0.5
    if optimizer == "sgd":
        value *= plan.batch_size / plan.noise_multiplier
    return min(value, LARGEST[optimizer])


def simulated(net, optimizer, learning_rate, epsilon="3", steps="50"):
    """Returns the accuracy that the study has for scikit-learn's digits at a learning rate."""
    for key, curve in settings().items():
        if (key[0], key[2], key[3], key[5], key[7]) == (net, "digits8", epsilon, steps, optimizer):
            noise = learning_rate * float(key[5]) ** 0.5
            if optimizer == "sgd":
                noise *= float(key[6]) / float(key[4])
            return accuracy_at(curve, noise)
    raise ValueError(f"The study has no {net} by {optimizer} with {steps} updates.")


def main():
    """Prints the rows and the losses of rules."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    curves, results = settings(), {}
    for key, curve in sorted(curves.items()):
        noise, best, low, high, broken = figures(key, curve)
        print(
            f"{key[0]:12} {key[1]:>8} {key[2]:9} {'warm' if key[9] == '1' else '':4} eps {key[3]} "
            f"B {key[4]:>4} T {key[5]:>3} {key[7]:4} {key[8]:4}  {100 * best:5.1f}% at {noise:.3f} "
            f"({low:.3f} to {high:.3f}), breaks at {broken:.2f}"
        )
    for optimizer in NOISE:
        groups = collections.defaultdict(list)
        for key, curve in curves.items():
            if key[7] == optimizer and key[9] == "0" and key[8] == "0.1":
                groups[part(key)].append((key, curve))
        for name, items in sorted(groups.items()):
            for noise in (0.045, 0.06, 0.09, 0.1, 0.12, 0.15, 0.18, 0.25):
                lost = losses(items, noise)
                safe = sum(bounded(key, noise) <= figures(key, c)[4] / 2 for key, c in items)
                near = sum(value <= 0.02 for value in lost)
                results[f"{optimizer}, {name}, {noise}"] = lost
                print(
                    f"{optimizer:4} {name:9} {noise:5}: {near} of {len(lost)} within 2 points, "
                    f"median {100 * statistics.median(lost):.1f}, worst {100 * lost[-1]:.1f}; "
                    f"{safe} at most half of the breaking rate"
                )
    noises_of = collections.defaultdict(list)
    with open(PUBLISHED) as file:
        for row in csv.DictReader(file):
            start = "random" if row["start"] == "random" else "trained"
            noise = float(row["rate"]) * float(row["T"]) ** 0.5
            if row["optimizer"] == "sgd":
                noise *= float(row["sigma"]) / float(row["B"])
            noises_of[row["optimizer"], start, row["trained"]].append(noise)
    for about, noises in noises_of.items():
        middle = statistics.geometric_mean(noises)
        results[" ".join(about)] = noises
        print(
            *about, f"{len(noises)} settings, {min(noises):.3f} to {max(noises):.3f}, {middle:.3f}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
