r"""Compares the private heads on features, over many epsilons, in a table and a picture.

    python -m experiments.features.compare_heads --workdir=/tmp/heads
    python -m experiments.features.compare_heads --features=/tmp/features --workdir=/tmp/heads_digits

Without --features it makes a Gaussian mixture of 50,000 x 768 features in 100 classes
(`experiments.features.mixture`), which takes a quarter of an hour on two cores, and several hours
with the ten steps of dp_newton: --methods leaves it out. --features is a folder that
`tfdpx.train.features` wrote. Every fit is a line of `results.jsonl` in the working directory; a run
that was cut off goes on after the last. `table.md` and `heads.png` are the medians.

    python -m experiments.features.compare_heads --speed

times DP-FC of 10 steps on the mixture against the plain products that it needs, in turn, and prints
medians, their ratio and the peak of memory as one line of JSON.
"""

import json
import math
import pathlib
import statistics
import sys

from absl import app, flags

from experiments.features import head_comparison, head_speed, mixture
from tfdpx.train.config.errors import UserError
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.report.record import to_json
from tfdpx.train.run import head_methods

EPSILONS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf)


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("workdir", None, "Folder for results.", **common)
    flags.DEFINE_string("features", None, "Folder of features. Default: a mixture.", **common)
    flags.DEFINE_list("methods", list(head_methods.METHODS), "Methods to compare.", **common)
    flags.DEFINE_list("epsilons", [f"{e:g}" for e in EPSILONS], "Budgets.", **common)
    flags.DEFINE_list("seeds", ["0"], "Seeds of the noise.", **common)
    flags.DEFINE_float("delta", 1e-5, "Delta.", **common)
    flags.DEFINE_bool("speed", False, "Time DP-FC against plain products instead.", **common)
    flags.DEFINE_integer("num_examples", 50_000, "Examples of the mixture.", **common)


def main(argv, values=flags.FLAGS):
    """Runs what the flags ask for; errors of the user become one line."""
    try:
        if len(argv) > 1:
            raise UserError(f"Only flags are understood. Received: {' '.join(argv[1:])}.")
        if values.speed:
            print(to_json(head_speed.measure(values.num_examples)), flush=True)
            return
        if values.workdir is None:
            raise UserError("Flag --workdir names the folder for results. It is not set.")
        compare(values)
    except UserError as error:
        sys.exit(f"experiments.features.compare_heads: {' '.join(str(error).split())}")


def compare(values):
    """Fits every method at every epsilon and seed that has no result yet, and reports all."""
    workdir = pathlib.Path(values.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    results = workdir / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    found = {(r["method"], r["epsilon"], r["seed"]): r["accuracy"] for r in map(json.loads, lines)}
    train, test, num_classes = _data(values)
    for epsilon in map(float, values.epsilons):
        for method in values.methods:
            for seed in map(int, values.seeds if epsilon < math.inf else values.seeds[:1]):
                key = method, f"{epsilon:g}", seed
                if key in found:
                    continue
                head = head_methods.build(method, num_classes, epsilon, values.delta, seed=seed)
                accuracy = head.fit(*train).evaluate(*test)["accuracy"]
                found[key] = accuracy
                line = dict(zip(("method", "epsilon", "seed"), key, strict=True), accuracy=accuracy)
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(f"{method:24} epsilon {epsilon:<5g} {100 * accuracy:.1f}%", flush=True)
    medians = {}
    for (method, epsilon, _), accuracy in found.items():
        medians.setdefault((method, epsilon), []).append(accuracy)
    medians = {key: statistics.median(group) for key, group in medians.items()}
    head_comparison.write_table(medians, workdir / "table.md")
    head_comparison.draw(medians, workdir / "heads.png")


def _data(values):
    if values.features is None:
        train = mixture.mixture(values.num_examples, seed=0)
        return train, mixture.mixture(5_000, seed=1), 100
    folder = FeatureFolder(values.features)
    return folder.arrays("train")[:2], folder.arrays("test")[:2], folder.num_classes


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
