"""Generated tables: relevant and irrelevant columns, heavy tails, categories, few of a class.

A table is drawn from a key; those of the fit and those of the study have different keys.
"""

import numpy as np

from tfdpx.train.tables import columns
from tfdpx.train.tables.reading import CATEGORY, NUMBER

TEST_ROWS = 5_000


def table(key, num_rows, task="classification", curved=None):
    """A `columns.Table` of `num_rows` rows to train on, and `TEST_ROWS` to test on.

    Args:
        key: Int, which draws numbers of columns, their units, what depends on what, and the rows.
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
    found, score = {}, np.zeros(count)
    for i in range(numbers):
        relevant = rng.random() < 0.6
        score += relevant * rng.normal() * hidden[:, i]
        if curved and relevant:
            score += 2 * rng.normal() * np.abs(hidden[:, i])
            score += rng.normal() * hidden[:, i] * hidden[:, rng.integers(numbers)]
        shown = (lambda z: z, np.exp, lambda z: z**3, np.round)[rng.integers(4)](hidden[:, i])
        unit = 10.0 ** rng.integers(-2, 4)
        shown = unit * (shown + rng.choice([0, 0, 3]))
        found[f"number {i}"] = np.where(rng.random(count) < rng.choice([0, 0.05]), np.nan, shown)
    for i in range(texts):
        size = int(rng.integers(2, 12))
        drawn = rng.choice(size, count, p=rng.dirichlet(np.ones(size)))
        score += (rng.random() < 0.6) * rng.normal(size=size)[drawn]
        found[f"text {i}"] = np.array([f"value {j}" for j in range(size)])[drawn]
    score = (score - score.mean()) / score.std()
    noisy = score + rng.choice([0.1, 0.4]) * rng.normal(size=count)
    if task == "regression":
        target, names = noisy.astype("float32"), ()
    else:
        classes = int(rng.integers(2, 5))
        parts = np.cumsum(rng.dirichlet(4 * np.ones(classes)))[:-1]
        target = np.searchsorted(np.quantile(noisy, parts), noisy).astype("int64")
        names = tuple(f"class {j}" for j in range(classes))
    kinds = {name: NUMBER if name.startswith("number") else CATEGORY for name in found}
    rows = columns.Rows(found, target)
    return columns.Table(kinds, names, rows[:num_rows], rows[num_rows:])


def ranges(table):
    """Ranges of its columns of numbers as a public source may know them, a dict of pairs.

    They are of other rows than those to train on: of all but two percent of those to test on.
    """
    numbers = [name for name, kind in table.kinds.items() if kind == NUMBER]
    limits = {n: np.nanpercentile(table.test.columns[n], [1, 99]) for n in numbers}
    return {n: (float(low), float(max(high, low + 1e-3))) for n, (low, high) in limits.items()}
