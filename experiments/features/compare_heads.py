r"""Compares the private heads on features, over many epsilons, in a table and a picture.

    python -m experiments.features.compare_heads --workdir=/tmp/heads
    python -m experiments.features.compare_heads --features=/tmp/features --workdir=/tmp/digits

Without --features it makes a Gaussian mixture of 50,000 x 768 features in 100 classes
(`experiments.features.mixture`), which takes a quarter of an hour on two cores, and several hours
with the ten steps of dp_newton: --methods leaves it out. --features is a folder that
`tfdpx.train.features` wrote. Every fit is a line of `results.jsonl` in the working directory; a run
that was interrupted resumes after the last. `table.md` and `heads.png` are the medians.

    python -m experiments.features.compare_heads --speed

times DP-FC of 10 steps on the mixture against the plain products that it needs, in turn, and prints
medians, their ratio and the peak of memory as one line of JSON.
"""

import argparse
import math
import pathlib
import statistics

from experiments.features import head_comparison, head_speed, mixture
from tfdpx import _resumable as resumable
from tfdpx.train.config.errors import in_one_line
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.report.record import to_json
from tfdpx.train.run import head_methods

EPSILONS = "0.01,0.05,0.1,0.5,1,2,4,8,inf"


def main(arguments=None):
    """Runs what the flags ask for; errors of the user become one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, help="Folder for results.")
    add("--features", help="Folder of features. Default: a mixture.")
    add("--methods", default=",".join(head_methods.METHODS), help="Methods to compare.")
    add("--epsilons", default=EPSILONS, help="Budgets.")
    add("--seeds", default="0", help="Seeds of the noise.")
    add("--delta", type=float, default=1e-5)
    add("--speed", action="store_true", help="Time DP-FC against plain products instead.")
    add("--num_examples", type=int, default=50_000, help="Examples of the mixture.")
    values = parser.parse_args(arguments)
    if values.speed:
        print(to_json(head_speed.measure(values.num_examples)), flush=True)
        return
    if values.workdir is None:
        parser.error("--workdir names the folder for results. It is not set.")
    with in_one_line("experiments.features.compare_heads"):
        compare(values)


def compare(values):
    """Fits every method at every epsilon and seed that has no result yet, and reports all."""
    values.workdir.mkdir(parents=True, exist_ok=True)
    results = values.workdir / "results.jsonl"
    lines = resumable.lines(results)
    found = {(r["method"], r["epsilon"], r["seed"]): r["accuracy"] for r in lines}
    train, test, num_classes = _data(values)
    seeds = list(map(int, values.seeds.split(",")))
    for epsilon in map(float, values.epsilons.split(",")):
        for method in values.methods.split(","):
            for seed in seeds if epsilon < math.inf else seeds[:1]:
                key = method, f"{epsilon:g}", seed
                if key in found:
                    continue
                head = head_methods.build(method, num_classes, epsilon, values.delta, seed=seed)
                accuracy = head.fit(*train).evaluate(*test)["accuracy"]
                found[key] = accuracy
                line = dict(zip(("method", "epsilon", "seed"), key, strict=True), accuracy=accuracy)
                resumable.add_line(results, line)
                print(f"{method:24} epsilon {epsilon:<5g} {100 * accuracy:.1f}%", flush=True)
    medians = {}
    for (method, epsilon, _), accuracy in found.items():
        medians.setdefault((method, epsilon), []).append(accuracy)
    medians = {key: statistics.median(group) for key, group in medians.items()}
    head_comparison.write_table(medians, values.workdir / "table.md")
    head_comparison.draw(medians, values.workdir / "heads.png")


def _data(values):
    if values.features is None:
        train = mixture.mixture(values.num_examples, seed=0)
        return train, mixture.mixture(5_000, seed=1), 100
    folder = FeatureFolder(values.features)
    return folder.arrays("train")[:2], folder.arrays("test")[:2], folder.num_classes


if __name__ == "__main__":
    main()
