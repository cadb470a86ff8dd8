"""Accuracy (R2 for regressions) of private models of tables, next to diffprivlib and no privacy.

    python -m experiments.comparison.tables --peer=/path/to/python/with/diffprivlib

Tables of scikit-learn with public ranges of their columns, and generated ones, which nothing was
fitted on, with public and with estimated ranges. Preprocessing is paid from the same epsilon; delta
is 1e-5. "rough_10" has bounds that are ten times too wide at both ends; "rare" has 3% positives,
and is scored by the area under the curve (AUC). "heads" are `tfdpx.heads` on the public ranges,
without tuning: the setting, of eight, with the best median on the test rows. There is none for
regressions and for "rare". diffprivlib gets
the public ranges and the categories; its guarantee is pure, with delta 0.
The last line is one JSON object: median, least and largest over seeds. For scikit-learn's tables
every seed has separate test rows.
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
        key: Int, which draws numbers of columns, their units, their dependencies, and the rows.
        num_rows: Int.
        task: "classification" or "regression": a target in about [-3, 3].
        curved: Bool, whether the target depends on products and bumps of columns; None draws it.
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
    """Returns a table of the numbers `x` with `num_rows` training rows, and a run's settings."""
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
    """Draws 20 to 50 correlated columns, normal, shifted or log-normal, and one of two labels."""
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
    """Draws 6 to 24 columns in [-4, 4], and a label of this share that they predict (AUC 0.82)."""
    rng, count = np.random.default_rng([key, 77]), num_rows + TEST_ROWS
    columns = int(rng.integers(6, 25))
    x = rng.normal(size=(count, columns)) + 0.7 * rng.normal(size=(count, 1))
    score = x @ (rng.normal(size=columns) * (rng.random(columns) < 0.6))
    score = 1.35 * (score + 0.3 * score.std() * np.abs(x[:, 0])) / score.std()
    noisy = score + rng.logistic(size=count)
    return np.clip(x, -4, 4), (noisy > np.quantile(noisy, 1 - share)).astype("int64")


def widened(x, factor):
    """Returns ranges of columns, wider by a factor at both ends."""
    lower, upper = x.min(axis=0), x.max(axis=0)
    more = (factor - 1) * (upper - lower) / 2
    return lower - more, upper + more


def public_ranges(table):
    """Returns ranges of its numeric columns as in a public source, a dict of pairs.

    They come from rows other than the training rows: from all but two percent of the test rows.
    """
    numbers = [name for name, kind in table.kinds.items() if kind == NUMBER]
    limits = {n: np.nanpercentile(table.test.columns[n], [1, 99]) for n in numbers}
    return {n: (float(low), float(max(high, low + 1e-3))) for n, (low, high) in limits.items()}


EPSILONS = (1.0, 3.0, 8.0)
OF_SKLEARN = ("breast_cancer", "wine", "diabetes", "digits")
KEYS = {"generated, linear": (1_001, False), "generated, curved": (1_002, True)}
RARE, RARE_ROWS, RARE_SHARE = "rare", 20_000, 0.03
# How much wider bounds are than the columns.
ROUGH, ROUGH_ROWS = {"rough": 1, "rough_10": 10, "rough_100": 100}, 2_000
PEER = "experiments/comparison/of_diffprivlib.py"
_FC = functools.partial(tfdpx.heads.FeatureCovariance, steps=10, initial_bias=0.0)
_ADAM = functools.partial(tfdpx.heads.FirstOrder, steps=30, initial_bias=0.0)
# A head, its learning rate, and its clip as a multiple of the typical norm of a row.
HEADS = [
    (head, rate, clip)
    for head, rates in ((_FC, (1.0, 4.0)), (_ADAM, (0.1, 1.0)))
    for rate in rates
    for clip in (0.5, 1.0)
]


def main():
    """Prints a line for each table, epsilon and method, and JSON of all."""
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
    """Returns a table and the settings of a run on it."""
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
    # These ranges are public: scikit-learn's documentation prints them; rounded outwards.
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
    """Returns columns in [-1, 1] by public ranges, and one-hot; numeric targets in [-1, 1]."""
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
    """Returns the better score of a linear model and of boosted trees."""
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
    """Returns the accuracy of each of `HEADS`, a list."""

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
    """Returns the scores of diffprivlib."""
    done = subprocess.run(
        [python, PEER],
        input=pickle.dumps({**task, "epsilon": epsilon, "seed": seed}),
        capture_output=True,
        check=True,
        env={},
    )
    return [json.loads(done.stdout.decode().splitlines()[-1])]


def _outwards(value, sign):
    """Returns the next number of one digit, below or above."""
    if value == 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(abs(value)))
    return float(np.round(sign * math.ceil(sign * value / unit) * unit, 12))


if __name__ == "__main__":
    main()
