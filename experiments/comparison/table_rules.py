"""The results of `classify --dataset=csv:PATH` with rough bounds and with rare labels.

    python -m experiments.comparison.table_rules --part=breast_cancer
    python -m experiments.comparison.table_rules --part=rough
    python -m experiments.comparison.table_rules --part=rare

The rules were fitted on tables drawn by `make_rough` and `make_rare` with other keys, and checked
on tables with tight bounds, so that these lose little. Each line has means over seeds: accuracy, or
the area under the curve (AUC) and the mean probability of the rare label beside its share.
"""

import argparse

import keras
import numpy as np
from sklearn import datasets, metrics

from tfdpx.train import tables
from tfdpx.train.data import tables as data_tables
from tfdpx.train.settings import resolve

TEST_ROWS = 4_000


def as_table(x, y, num_rows, limits, epsilon):
    """Returns a table of the numbers `x` with `num_rows` training rows, and a run's settings."""
    names = [f"column {i}" for i in range(x.shape[1])]
    rows = data_tables.Rows(dict(zip(names, x.T, strict=True)), y)
    kinds = dict.fromkeys(names, data_tables.NUMBER)
    table = data_tables.Table(kinds, ("no", "yes"), rows[:num_rows], rows[num_rows:])
    bounds = [f"{n}:{low!r}:{up!r}" for n, low, up in zip(names, *limits, strict=True)]
    asked = dict(dataset="csv:generated", target="t", epsilon=epsilon, bounds=bounds)
    return table, resolve(None, asked)


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


def widened(x, factor, at_both_ends):
    """Returns ranges of columns, of one digit, times a factor: too wide above or at both ends."""
    lower, upper = (sign * _digit(sign * f(x, axis=0)) for f, sign in ((np.min, -1), (np.max, 1)))
    more = (factor - 1) * (upper - lower)
    return lower - at_both_ends * more / 2, upper + more / (1 + at_both_ends)


def _digit(values, ratio=1):
    """Returns the next numbers of one digit above, or powers of ten for a ratio of 10."""
    units = 10.0 ** np.floor(np.log10(np.abs(values) + 1e-300))
    return np.ceil(values / units / ratio) * units * ratio


def scores(table, settings):
    """Returns accuracy, AUC, mean probability of the second label and its share on test rows."""
    estimator, target = tables.fit(table, settings), table.test.target
    yes = estimator.predict_proba(table.test.columns)[:, 1]
    keras.backend.clear_session()
    auc = metrics.roc_auc_score(target, yes)
    return np.mean((yes > 0.5) == target), auc, np.mean(yes), np.mean(target)


def cases(part, seed):
    """Yields names with tables and settings."""
    if part == "breast_cancer":
        data = datasets.load_breast_cancer()
        order = np.random.default_rng(seed).permutation(len(data.target))
        x, y = data.data[order], data.target[order].astype("int64")
        powers = _digit(np.max(x, axis=0), ratio=10)
        for name, limits in (
            ("to a digit", widened(x, 1, False)),
            ("to a power of ten", (0 * powers, powers)),
            ("to a power of ten beyond", (0 * powers, 10 * powers)),
            ("ten times at both ends", widened(x, 10, True)),
        ):
            yield name, *as_table(x, y, 455, limits, 3.0)
    elif part == "rough":
        for rows in (400, 2_000):
            x, y = make_rough(1_000 + seed, rows)
            for factor, both in ((1, 0), (3, 0), (10, 0), (100, 0), (3, 1), (10, 1), (100, 1)):
                name = f"{rows} rows, {factor} times {'at both ends' if both else 'above'}"
                yield name, *as_table(x, y, rows, widened(x, factor, both), 3.0)
    else:
        for rows, share, epsilon in (
            *((400, 0.1, 3.0), (2_000, 0.05, 3.0), (2_000, 0.5, 3.0), (20_000, 0.029, 3.0)),
            *((20_000, 0.01, 8.0), (20_000, 0.1, 1.0), (20_000, 0.2, 3.0), (20_000, 0.5, 3.0)),
        ):
            x, y = make_rare(1_000 + seed, rows, share)
            limits = np.full([2, x.shape[1]], [[-4.0], [4.0]])
            yield (
                f"{rows} rows, {share:.1%}, epsilon {epsilon:g}",
                *as_table(x, y, rows, limits, epsilon),
            )


def main():
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("breast_cancer", "rough", "rare"), required=True)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    results = {}
    for seed in range(arguments.seeds):
        for name, table, settings in cases(arguments.part, seed):
            results.setdefault(name, []).append(scores(table, settings))
    for name, values in results.items():
        accuracy, auc, probability, share = np.mean(values, axis=0)
        print(f"{name}: {accuracy:.1%}, AUC {auc:.3f}, mean {probability:.4f} of {share:.4f}")


if __name__ == "__main__":
    main()
