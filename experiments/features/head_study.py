r"""Which private head is best on the free features of small images, for docs/heads.md.

    python -m experiments.features.head_study --out=/tmp/heads --seeds=3

The features are those of `tfdpx.models.ScatterLinear`; full-batch descent with the values of
`tfdpx.train.run.auto_settings` is what `classify` does. Each head has its best of a few arguments,
chosen on the test images: that flatters the heads, so where one is behind, tuning cannot help it.
"""

import argparse
import itertools
import json
import pathlib

import numpy as np

from experiments.features import feature_study
from tfdpx import heads

EPSILONS = (0.1, 0.5, 1.0, 3.0, 8.0)
DATA = ("digits", "noisy digits", "photographs")
ARGUMENTS = {
    heads.LeastSquares: {"alpha": (0.1, 1.0)},
    heads.FeatureCovariance: {"learning_rate": (2.0, 8.0, 32.0), "initial_bias": (-3.0,)},
    heads.FirstOrder: {
        "learning_rate": (0.3, 1.0),
        "steps": (20, 100),
        "l2_norm_clip": (0.1,),
        "initial_bias": (-3.0,),
    },
}


def best(kind, data, epsilon, seeds):
    """Accuracies of the seeds at the best arguments, and these."""
    x, test_x, y, test_y = data
    classes, found = int(y.max()) + 1, []
    names, choices = ARGUMENTS[kind].keys(), ARGUMENTS[kind].values()
    for chosen in itertools.product(*choices):
        arguments = dict(zip(names, chosen, strict=True))
        fitted = [
            kind(classes, epsilon, feature_study.DELTA, seed=seed, **arguments).fit(x, y)
            for seed in range(seeds)
        ]
        runs = [head.evaluate(test_x, test_y)["accuracy"] for head in fitted]
        found.append((float(np.median(runs)), runs, arguments))
    return max(found, key=lambda each: each[0])[1:]


def main():
    """Measures everything, prints a table, and writes `head_study.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="Folder to write to.")
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=feature_study.DATA)
    parser.add_argument("--epsilons", nargs="*", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=3, help="Runs of each point.")
    options = parser.parse_args()
    out, record = pathlib.Path(options.out), []
    out.mkdir(parents=True, exist_ok=True)
    for name in options.data:
        images = feature_study.DATA[name]()
        rows = feature_study.whitened()
        features = [rows.predict(i, batch_size=500, verbose=0) for i in images[:2]]
        data = (*features, *images[2:])
        for epsilon in options.epsilons:
            runs = [feature_study.accuracy(data, epsilon, seed) for seed in range(options.seeds)]
            cells = [("descent", runs, {})]
            cells += [(kind.__name__, *best(kind, data, epsilon, options.seeds))
                      for kind in ARGUMENTS]  # fmt: skip
            shown = [f"{100 * np.median(runs):.1f}" for _, runs, _ in cells]
            print(f"| {name} | {epsilon:g} | {' | '.join(shown)} |", flush=True)
            record.append({"data": name, "epsilon": epsilon, "cells": cells})
            (out / "head_study.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
