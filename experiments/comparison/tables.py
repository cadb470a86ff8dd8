"""Compares private models of tables with diffprivlib, and with models without privacy.

    python -m experiments.comparison.tables --peer=/path/to/python/with/diffprivlib

The score is the accuracy; for regressions R2, and for the table "rare", which has 3% positives, the
area under the ROC curve (AUC).

Tables: the tables of scikit-learn are used with public ranges of their columns. Generated tables
are used with public and with estimated ranges; no setting of tfdpx was chosen on them. "rough_10"
has bounds that are ten times too wide at both ends.

Methods: the models of tfdpx pay for their preprocessing from the same epsilon, at delta 1e-5.
"heads" are the heads in `tfdpx.heads` on the public ranges. Of eight settings, the one with the
best median on the test rows is shown. There are no heads for regressions and for "rare".
diffprivlib receives the public ranges and the categories, and has delta 0.

The last line is one JSON object: the median, least and largest score over seeds. For scikit-learn's
tables, each seed holds out other test rows.
"""

import argparse
import functools
import json
import math
import pickle
import subprocess
import time

import keras
import numpy as np
from sklearn import datasets, ensemble, linear_model, metrics

import tfdpx
from tfdpx.train import run
from tfdpx.train.data import tables as data_tables
from tfdpx.train.data.tables import CATEGORY, NUMBER
from tfdpx.train.settings import resolve

TEST_ROWS = 5_000


def make_table(key, num_rows, task="classification", curved=None):
    """Returns a `data_tables.Table` of `num_rows` rows to train on, and `TEST_ROWS` to test on.

    Args:
        key: Int, the seed of the table: its number of columns, their units and dependencies, and
            its rows.
        num_rows: Int, the number of training rows.
        task: "classification", or "regression" with a target in about [-3, 3].
        curved: Bool, whether the target also depends on absolute values and products of columns. By
            default a random choice.
    """
    rng = np.random.default_rng([key, 36])
    count = num_rows + TEST_ROWS
    curved = rng.random() < 0.5 if curved is None else curved
    numbers, texts = int(rng.integers(4, 16)), int(rng.integers(0, 5))
    hidden = rng.normal(size=(count, numbers))
    hidden = hidden @ np.linalg.cholesky(0.7 * np.eye(numbers) + 0.3)
    columns, score = {}, np.zeros(count)
    for i in range(numbers):
        relevant = rng.random() < 0.6
        score += relevant * rng.normal() * hidden[:, i]
        if curved and relevant:
            score += 2 * rng.normal() * np.abs(hidden[:, i])
            score += rng.normal() * hidden[:, i] * hidden[:, rng.integers(numbers)]
        shown = (lambda z: z, np.exp, lambda z: z**3, np.round)[rng.integers(4)](hidden[:, i])
        unit = 10.0 ** rng.integers(-2, 4)
        shown = unit * (shown + rng.choice([0, 0, 3]))
        columns[f"number {i}"] = np.where(rng.random(count) < rng.choice([0, 0.05]), np.nan, shown)
    for i in range(texts):
        size = int(rng.integers(2, 12))
        drawn = rng.choice(size, count, p=rng.dirichlet(np.ones(size)))
        score += (rng.random() < 0.6) * rng.normal(size=size)[drawn]
        columns[f"text {i}"] = np.array([f"value {j}" for j in range(size)])[drawn]
    score = (score - score.mean()) / score.std()
    noisy = score + rng.choice([0.1, 0.4]) * rng.normal(size=count)
    if task == "regression":
        target, names = noisy.astype("float32"), ()
    else:
        classes = int(rng.integers(2, 5))
        parts = np.cumsum(rng.dirichlet(4 * np.ones(classes)))[:-1]
        target = np.searchsorted(np.quantile(noisy, parts), noisy).astype("int64")
        names = tuple(f"class {j}" for j in range(classes))
    kinds = {name: NUMBER if name.startswith("number") else CATEGORY for name in columns}
    rows = data_tables.Rows(columns, target)
    return data_tables.Table(kinds, names, rows[:num_rows], rows[num_rows:])


def as_table(x, y, num_rows, limits, epsilon, classes=("no", "yes"), **goal):
    """Returns a table with the numeric columns of `x`, and the settings of a run on this table."""
    names = [f"column {i}" for i in range(x.shape[1])]
    rows = data_tables.Rows(dict(zip(names, x.T, strict=True)), y)
    kinds = dict.fromkeys(names, NUMBER)
    table = data_tables.Table(kinds, classes, rows[:num_rows], rows[num_rows:])
    bounds = [
        f"{n}:{float(low)!r}:{float(up)!r}" for n, low, up in zip(names, *limits, strict=True)
    ]
    asked = dict(dataset="csv:generated", target="t", epsilon=epsilon, bounds=bounds)
    return table, resolve(None, {**asked, **goal})


def make_rough(key, num_rows):
    """Draws a table of two classes, with 20 to 50 correlated columns.

    Columns are normal, shifted or log-normal. Returns x [rows, columns] and labels [rows].
    """
    rng, count = np.random.default_rng([key, 51]), num_rows + TEST_ROWS
    columns = int(rng.integers(20, 51))
    common = rng.normal(size=(count, 4)) @ rng.normal(size=(4, columns))
    hidden = (rng.normal(size=common.shape) + common / common.std(axis=0)) / 2**0.5
    score = hidden @ (rng.normal(size=columns) * (rng.random(columns) < 0.6))
    target = score / score.std() + 0.3 * rng.logistic(size=count) > 0
    kinds, width = rng.integers(4, size=columns), rng.uniform(0.3, 1, columns)
    shifted = hidden + rng.uniform(3, 20, columns)
    shown = np.where(kinds == 0, hidden, np.where(kinds == 1, shifted, np.exp(width * hidden)))
    return shown * 10 ** rng.uniform(-3, 4, columns), target.astype("int64")


def make_rare(key, num_rows, share):
    """Draws a table with a rare class: a share of `share` of the rows.

    It has 6 to 24 columns in [-4, 4], which predict the class with an AUC of about 0.82.
    """
    rng, count = np.random.default_rng([key, 77]), num_rows + TEST_ROWS
    columns = int(rng.integers(6, 25))
    x = rng.normal(size=(count, columns)) + 0.7 * rng.normal(size=(count, 1))
    score = x @ (rng.normal(size=columns) * (rng.random(columns) < 0.6))
    score = 1.35 * (score + 0.3 * score.std() * np.abs(x[:, 0])) / score.std()
    noisy = score + rng.logistic(size=count)
    return np.clip(x, -4, 4), (noisy > np.quantile(noisy, 1 - share)).astype("int64")


def widened(x, factor):
    """Returns lower and upper bounds of the columns of `x`, `factor` times as wide as needed."""
    lower, upper = x.min(axis=0), x.max(axis=0)
    more = (factor - 1) * (upper - lower) / 2
    return lower - more, upper + more


def public_ranges(table):
    """Returns a dict from each numeric column to its range, as if the range were public.

    The range contains all but two percent of the column's values in the test rows.
    """
    numbers = [name for name, kind in table.kinds.items() if kind == NUMBER]
    limits = {n: np.nanpercentile(table.test.columns[n], [1, 99]) for n in numbers}
    return {n: (float(low), float(max(high, low + 1e-3))) for n, (low, high) in limits.items()}


EPSILONS = (1.0, 3.0, 8.0)
OF_SKLEARN = ("breast_cancer", "wine", "diabetes", "digits")
KEYS = {"generated, linear": (1_001, False), "generated, curved": (1_002, True)}
RARE, RARE_ROWS, RARE_SHARE = "rare", 20_000, 0.03
# From a table's name to the factor by which its bounds are too wide.
ROUGH, ROUGH_ROWS = {"rough": 1, "rough_10": 10, "rough_100": 100}, 2_000
PEER = "experiments/comparison/of_diffprivlib.py"
_FC = functools.partial(tfdpx.heads.FeatureCovariance, steps=10, initial_bias=0.0)
_ADAM = functools.partial(tfdpx.heads.FirstOrder, steps=30, initial_bias=0.0)
# Settings of heads: class, learning rate, and the clip as a multiple of a row's typical norm.
HEADS = [
    (head, rate, clip)
    for head, rates in ((_FC, (1.0, 4.0)), (_ADAM, (0.1, 1.0)))
    for rate in rates
    for clip in (0.5, 1.0)
]


def main():
    """Prints a line for each table, epsilon and method; then prints all results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tables", default=",".join((*OF_SKLEARN, RARE, *ROUGH, *KEYS)).replace(", ", "_")
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--peer", default=None)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.tables.split(","):
        of_sklearn = name in (*OF_SKLEARN, RARE, *ROUGH)
        for epsilon, ranges in [(e, r) for r in ("public", "found") for e in EPSILONS]:
            if of_sklearn and ranges == "found":
                continue
            began, scores = time.perf_counter(), {"tfdpx": [], "none": [], "diffprivlib": []}
            of_heads = []
            for seed in range(arguments.seeds):
                table, settings = case(name, seed, epsilon, arguments.rows, ranges)
                fitted, test = run.fit_table(table, settings), table.test
                scores["tfdpx"].append(score(name, fitted, test.columns, test.target))
                if ranges == "public":
                    task = as_arrays(name, table, settings)
                    if epsilon == EPSILONS[0]:
                        scores["none"].append(without_privacy(name, task))
                    if task["classes"] and name != RARE:
                        of_heads.append(heads(task, epsilon))
                    if arguments.peer:
                        scores["diffprivlib"] += theirs(arguments.peer, task, epsilon, seed)
                keras.backend.clear_session()
            if of_heads:
                scores["heads"] = max(zip(*of_heads, strict=True), key=np.median)
            for method, values in scores.items():
                if values:
                    row = f"{name} {method} {'' if method == 'none' else epsilon} {ranges}"
                    results[row] = [float(f(values)) for f in (np.median, min, max)]
                    seconds = time.perf_counter() - began
                    numbers = "{:.3f} ({:.3f} to {:.3f})".format(*results[row])
                    print(f"{row}: {numbers}; {seconds:.0f} s", flush=True)
    print(json.dumps(results))


def score(name, fitted, x, y):
    """Returns the accuracy or R2 of a fitted model, or the AUC of the rare label."""
    if name == RARE:
        return metrics.roc_auc_score(y, fitted.predict_proba(x)[:, 1])
    return fitted.score(x, y)


def case(name, seed, epsilon, num_rows, ranges):
    """Returns the table called `name`, and the settings of a run on this table."""
    if name == RARE:
        x, y = make_rare(seed, RARE_ROWS, RARE_SHARE)
        limits = np.full(x.shape[1], -4.0), np.full(x.shape[1], 4.0)
        return as_table(x, y, RARE_ROWS, limits, epsilon)
    if name in ROUGH:
        x, y = make_rough(1_000 + seed, ROUGH_ROWS)
        return as_table(x, y, ROUGH_ROWS, widened(x, ROUGH[name]), epsilon)
    if name not in OF_SKLEARN:
        key, curved = next(v for k, v in KEYS.items() if k.replace(", ", "_") == name)
        table = make_table(key, num_rows, curved=curved)
        limits = public_ranges(table) if ranges == "public" else {}
        bounds = [f"{column}:{low!r}:{high!r}" for column, (low, high) in limits.items()]
        asked = dict(dataset=f"csv:{name}", target="t", epsilon=epsilon, bounds=bounds)
        return table, resolve(None, asked)
    data = getattr(datasets, f"load_{name}")()
    order = np.random.default_rng(seed).permutation(len(data.target))
    # scikit-learn's documentation prints these ranges, so they are public. Here they are rounded.
    limits = [(_outwards(v.min(), -1), _outwards(v.max(), 1)) for v in data.data.T]
    if name == "digits":
        limits = [(0.0, 16.0)] * data.data.shape[1]
    classes, goal, y = tuple(map(str, np.unique(data.target))), {}, data.target.astype("int64")
    if name == "diabetes":
        goal = dict(target_lower=25.0, target_upper=346.0)
        classes, y = (), data.target.astype("float32")
    num_rows = round(0.8 * len(y))
    arguments = num_rows, np.transpose(limits), epsilon, classes
    return as_table(data.data[order], y[order], *arguments, **goal)


def as_arrays(name, table, settings):
    """Returns a dict of arrays of training and test rows, for heads and for diffprivlib.

    Public ranges scale numeric columns and targets to [-1, 1]. Other columns are one-hot.
    """
    categories = {
        name: np.unique(v) for name, v in table.test.columns.items() if v.dtype.kind == "U"
    }

    def features(rows):
        parts = []
        for name, values in rows.columns.items():
            if name in categories:
                parts.append(values[:, None] == categories[name])
            else:
                low, high = settings.ranges[name]
                scaled = (2 * values - low - high) / (high - low)
                parts.append(np.nan_to_num(np.clip(scaled, -1, 1))[:, None])
        return np.concatenate(parts, axis=1).astype("float64")

    def target(rows):
        if table.class_names:
            return rows.target
        low, high = settings.target_lower, settings.target_upper
        return (2 * rows.target.astype("float64") - low - high) / (high - low)

    return {
        "classes": len(table.class_names),
        "metric": "auc" if name == RARE else "score",
        "x": features(table.train),
        "y": target(table.train),
        "test_x": features(table.test),
        "test_y": target(table.test),
    }


def without_privacy(name, task):
    """Fits a linear model and boosted trees, and returns the better score."""
    if task["classes"]:
        models = [
            linear_model.LogisticRegression(max_iter=1000),
            ensemble.HistGradientBoostingClassifier(),
        ]
    else:
        models = [linear_model.Ridge(), ensemble.HistGradientBoostingRegressor()]
    return max(
        score(name, model.fit(task["x"], task["y"]), task["test_x"], task["test_y"])
        for model in models
    )


def heads(task, epsilon):
    """Returns the accuracies of the settings in `HEADS`, a list of floats."""

    def features(x):
        return np.concatenate([x, np.ones([len(x), 1])], axis=1).astype("float32")

    accuracies, typical = [], 0.5 * (task["x"].shape[1] + 1) ** 0.5
    for head, rate, clip in HEADS:
        of_one = {"epsilon": epsilon, "delta": 1e-5, "learning_rate": rate}
        scaled = [features(task[name]) / (clip * typical) for name in ("x", "test_x")]
        fitted = head(task["classes"], **of_one).fit(scaled[0], task["y"])
        accuracies.append(fitted.evaluate(scaled[1], task["test_y"])["accuracy"])
    return accuracies


def theirs(python, task, epsilon, seed):
    """Returns a list with the score of diffprivlib, from a process of the interpreter `python`."""
    done = subprocess.run(
        [python, PEER],
        input=pickle.dumps({**task, "epsilon": epsilon, "seed": seed}),
        capture_output=True,
        check=True,
        env={},
    )
    return [json.loads(done.stdout.decode().splitlines()[-1])]


def _outwards(value, sign):
    """Returns `value` rounded to one significant digit: up if `sign` is 1, down if it is -1."""
    if value == 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return float(np.round(sign * math.ceil(sign * value / unit) * unit, 12))


if __name__ == "__main__":
    main()
