r"""Compares the private heads on features at several epsilons, in a table and a picture.

    python -m experiments.heads.compare --workdir=/tmp/heads
    python -m experiments.heads.compare --dataset=digits:5-9 --init_from=runs/pretrained \
        --workdir=/tmp/digits

Without --dataset, the features are drawn from a Gaussian mixture (`mixture`): 50,000 examples with
768 features, in 100 classes. The comparison takes a quarter of an hour on two cores, and several
hours with the ten steps of dp_newton; --methods can leave out dp_newton. With --dataset the
features are computed as in `classify --head`. Every fit writes a line to `results.jsonl` in the
working directory; an interrupted run resumes after the last line. `table.md` and `heads.png` show
medians. The last row of the table has the seconds of a fit (Table 6 of the paper has hours).
"""

import argparse
import math
import pathlib
import statistics
import time

import numpy as np
from absl import flags

from experiments import pictures
from experiments.heads import methods
from tfdpx import _resumable as resumable
from tfdpx.train import settings
from tfdpx.train.errors import in_one_line
from tfdpx.train.heads import Features


def mixture(count, dimension=768, num_classes=100, seed=0, separation=0.5):
    """Returns features of norm one, float32 `[count, dimension]`, and labels `[count]`.

    As in a trained network, the variance falls as 1/i over the directions i. Classes differ in the
    first `num_classes - 1` directions. In each of these directions, the standard deviation of the
    classes' means is `separation` times the standard deviation within a class. A random rotation,
    the same for all seeds, is applied last.

    Args:
        count: Int, the number of examples.
        dimension: Int, the number of features.
        num_classes: Int.
        seed: Int, the seed of the examples. The classes do not depend on it.
        separation: Float, see above.
    """
    classes, examples = np.random.default_rng(20_220_428), np.random.default_rng([seed, 1])
    scales = (1.0 + np.arange(dimension)) ** -0.5
    means = separation * scales * classes.normal(size=(num_classes, dimension))
    means[:, num_classes - 1 :] = 0.0
    turn = np.linalg.qr(classes.normal(size=(dimension, dimension)))[0].astype("float32")
    labels = examples.integers(0, num_classes, count)
    features = np.empty([count, dimension], "float32")
    for start in range(0, count, 4096):
        part = slice(start, start + 4096)
        y = labels[part]
        x = means[y] + scales * examples.standard_normal((len(y), dimension))
        features[part] = x.astype("float32") @ turn
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features, labels


def write_table(medians, seconds, path):
    """Writes a table with a row per epsilon and a column per method. A row's best is bold.

    Args:
        medians: Dict from `(method, epsilon as a string)` to the median accuracy.
        seconds: Dict from a method to the median seconds of its fits.
        path: `pathlib.Path`.
    """
    methods, epsilons = _axes(medians)
    lines = [f"| epsilon | {' | '.join(methods)} |", "|" + "---|" * (len(methods) + 1)]
    for epsilon in epsilons:
        values = [medians.get((method, epsilon)) for method in methods]
        best = max(value for value in values if value is not None)
        cells = ["" if v is None else f"{'**' * (v == best)}{100 * v:.1f}{'**' * (v == best)}"
                 for v in values]  # fmt: skip
        lines.append(f"| {epsilon} | {' | '.join(cells)} |")
    times = (f"{seconds[method]:.2g}" for method in methods)
    lines.append(f"| seconds | {' | '.join(times)} |")
    path.write_text("\n".join(lines) + "\n")


def _axes(medians):
    methods = list(dict.fromkeys(method for method, _ in medians))
    return methods, sorted({epsilon for _, epsilon in medians}, key=float)


EPSILONS = "0.01,0.05,0.1,0.5,1,2,4,8,inf"


def main(arguments=None):
    """Runs the comparison that the flags describe. A `UserError` is printed as one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, help="Folder for results.")
    add("--dataset", help="As for tfdpx classify. Default: a mixture.")
    add("--init_from", help="As for tfdpx classify.")
    add("--init_data", help="As for tfdpx classify.")
    add("--methods", default=",".join(methods.METHODS), help="Methods to compare.")
    add("--epsilons", default=EPSILONS, help="Budgets.")
    add("--seeds", default="0", help="Seeds of the noise.")
    add("--delta", type=float, default=1e-5)
    add("--num_examples", type=int, default=50_000, help="Examples of the mixture.")
    values = parser.parse_args(arguments)
    flags.FLAGS.mark_as_parsed()  # The flags of `classify` keep their defaults.
    if values.workdir is None:
        parser.error("--workdir names the folder for results. It is not set.")
    flags.FLAGS(["experiments.heads"])  # The flags of the data keep their defaults.
    with in_one_line("experiments.heads.compare"):
        compare(values)


def compare(values):
    """Makes the missing fits of all methods, epsilons and seeds, and writes all results."""
    values.workdir.mkdir(parents=True, exist_ok=True)
    results = values.workdir / "results.jsonl"
    lines = resumable.lines(results)
    accuracies = {(r["method"], r["epsilon"], r["seed"]): r["accuracy"] for r in lines}
    times = {}
    for line in lines:
        times.setdefault(line["method"], []).append(line["seconds"])
    train, test, num_classes = _data(values)
    seeds = list(map(int, values.seeds.split(",")))
    for epsilon in map(float, values.epsilons.split(",")):
        for method in values.methods.split(","):
            for seed in seeds if epsilon < math.inf else seeds[:1]:
                key = method, f"{epsilon:g}", seed
                if key in accuracies:
                    continue
                head = methods.build(method, num_classes, epsilon, values.delta, seed=seed)
                began = time.perf_counter()
                head.fit(*train)
                times.setdefault(method, []).append(time.perf_counter() - began)
                accuracies[key] = accuracy = head.evaluate(*test)["accuracy"]
                line = dict(zip(("method", "epsilon", "seed"), key, strict=True), accuracy=accuracy)
                resumable.add_line(results, {**line, "seconds": times[method][-1]})
                print(f"{method:24} epsilon {epsilon:<5g} {100 * accuracy:.1f}%", flush=True)
    groups, lines = {}, {}
    for (method, epsilon, _), accuracy in accuracies.items():
        groups.setdefault((method, epsilon), []).append(accuracy)
        lines.setdefault(method, {}).setdefault(float(epsilon), []).append(accuracy)
    medians = {key: statistics.median(group) for key, group in groups.items()}
    seconds = {method: statistics.median(values) for method, values in times.items()}
    write_table(medians, seconds, values.workdir / "table.md")
    pictures.draw({"": lines}, values.workdir / "heads.png")


def _data(values):
    if values.dataset is None:
        train = mixture(values.num_examples, seed=0)
        return train, mixture(5_000, seed=1), 100
    origin = {name: getattr(values, name) for name in ("dataset", "init_from", "init_data")}
    features = Features(settings.resolve(None, dict(origin, head="least_squares")))
    return features.train, features.test, features.data.num_classes


if __name__ == "__main__":
    main()
