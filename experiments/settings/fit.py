"""Compares the learning rates of `tfdpx.suggest` with the best rates that `study` measured.

    python -m experiments.settings.fit

Prints a row per setting: the learning rate with the best accuracy, the rates within two percentage
points of it, the rate of `tfdpx.suggest` with the accuracy that it loses, and the rate at which
training breaks. Then the losses are summed up by group. The last line is JSON.

The constants of the rule were chosen on `rows_gpu.csv` without its gray images. The networks,
images and batch sizes in `rows.csv` were not used for this choice.
"""

import argparse
import collections
import csv
import json
import math
import pathlib
import statistics

from tfdpx import suggestion

FOLDER = pathlib.Path(__file__).parent
FILES = ("rows_gpu.csv", "rows.csv")
KEY = ("net", "weights", "data", "n", "epsilon", "B", "T", "sigma", "opt", "clip", "warm")
# Data sets of bright images with values in [0, 1]. All their images have a large mean in common.
GRAY = ("shapes", "textures")
# Settings are left out if even the best rate gains less than this accuracy over guessing.
_LEARNED = 0.15


def settings(path):
    """Returns a dict from a setting to its sorted pairs of learning rate and accuracy.

    A setting is a tuple of the values of `KEY`.
    """
    runs = collections.defaultdict(lambda: collections.defaultdict(list))
    with open(path) as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in KEY)
            runs[key][float(row["rate"])].append(float(row["ema"]))
    curves = {
        key: sorted((rate, statistics.mean(values)) for rate, values in by_rate.items())
        for key, by_rate in runs.items()
    }
    return {k: c for k, c in curves.items() if max(v for _, v in c) > chance(k) + _LEARNED}


def chance(key):
    """Returns the accuracy of random guessing in a setting."""
    return 0.25 if key[2] == "tokens" else 0.1


def kind(key):
    """Returns the kind of a setting's network, as `suggestion.learning_rate` expects it."""
    if key[10] == "1":
        return suggestion.TRAINED
    if key[0].startswith("text"):
        return suggestion.ATTENTION
    return suggestion.DENSE if key[0].startswith(("dense", "linear")) else suggestion.OTHER


def rate_of(key):
    """Returns the learning rate that the rule suggests for a setting."""
    weights, size, steps, sigma = int(key[1]), float(key[5]), int(key[6]), float(key[7])
    return suggestion.learning_rate(sigma / size, steps, weights, key[8], kind(key))


def accuracy_at(curve, rate):
    """Returns the accuracy at a rate, interpolated on a logarithmic axis of rates."""
    for (low, left), (high, right) in zip(curve, curve[1:], strict=False):
        if low <= rate <= high:
            return left + math.log(rate / low) / math.log(high / low) * (right - left)
    return curve[0][1] if rate < curve[0][0] else curve[-1][1]


def breaking(key, curve):
    """Returns the smallest rate above the best rate at which training breaks.

    At this rate, training loses at least 30% of the best rate's gain over guessing.
    """
    best_rate, best = max(curve, key=lambda pair: pair[1])
    least = chance(key) + 0.7 * (best - chance(key))
    return min((r for r, v in curve if r > best_rate and v < least), default=math.inf)


def main():
    """Prints the rows and the losses of the rule; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    files = [FOLDER / name for name in FILES]
    parser.add_argument("--rows", nargs="+", type=pathlib.Path, default=files, help="Files.")
    groups = collections.defaultdict(list)
    for path in parser.parse_args().rows:
        for key, curve in sorted(settings(path).items()):
            rate, (best_rate, best) = rate_of(key), max(curve, key=lambda pair: pair[1])
            near = [r for r, value in curve if value >= best - 0.02]
            lost, broken = best - accuracy_at(curve, rate), breaking(key, curve)
            images = "gray in [0, 1]" if key[2] in GRAY else "dark or centred"
            groups[path.name, key[8], images].append((lost, rate <= broken / 2))
            print(
                f"{key[0]:14} {key[1]:>8} {key[2]:10} N {key[3]:>5} eps {key[4]} B {key[5]:>4} "
                f"T {key[6]:>3} {key[8]:4} {key[9]:4} {100 * best:5.1f}% at {best_rate:.3g} "
                f"({min(near):.3g} to {max(near):.3g}); rule {rate:.3g} loses {100 * lost:.1f}; "
                f"breaks at {broken:.3g}"
            )
    results = {}
    for group, values in groups.items():
        lost = sorted(value for value, _ in values)
        near = sum(value <= 0.02 for value in lost)
        results[", ".join(group)] = [near, len(lost), sum(safe for _, safe in values)]
        print(
            f"{', '.join(group)}: {near} of {len(lost)} within 2 points, median loss "
            f"{100 * statistics.median(lost):.1f}, largest {100 * lost[-1]:.1f}; "
            f"{results[', '.join(group)][2]} at most half of the breaking rate"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
