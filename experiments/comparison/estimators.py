"""`tfdpx.sklearn` beside diffprivlib's logistic and linear regression, on four tables.

    python -m experiments.comparison.estimators --peer=/path/to/python/with/diffprivlib

Accuracy of wine and breast cancer, R2 of diabetes, and the area under the curve (AUC) of a
generated table of 20,000 rows with 3% positives, on rows that no fit saw. Bounds of columns are
public, as in `tables.py`; delta is 1e-5, and 0 of diffprivlib. The last line is one JSON object:
median, least and largest over seeds, each with separate test rows.
"""

import argparse
import json

import keras
import numpy as np
from sklearn import linear_model, metrics

from experiments.comparison import table_rules, tables
from tfdpx.sklearn import PrivateClassifier, PrivateRegressor

EPSILONS = (1.0, 3.0, 8.0)
RARE, RARE_ROWS, RARE_SHARE = "rare", 20_000, 0.03


def main():
    """Prints a line for each table, method and epsilon, and JSON of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default="wine,breast_cancer,diabetes,rare")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--peer", default=None)
    arguments = parser.parse_args()
    report = {}
    for name in arguments.tables.split(","):
        scores = {}
        for seed in range(arguments.seeds):
            for epsilon in EPSILONS:
                task = case(name, seed, epsilon)
                scores.setdefault(f"tfdpx {epsilon:g}", []).append(score(task, ours(task)))
                if arguments.peer:
                    theirs = tables.theirs(arguments.peer, task, epsilon, seed)
                    scores.setdefault(f"diffprivlib {epsilon:g}", []).extend(theirs)
                keras.backend.clear_session()
            scores.setdefault("not private", []).append(score(task, without_privacy(task)))
        for method, values in scores.items():
            row = report[f"{name} {method}"] = [float(f(values)) for f in (np.median, min, max)]
            print("{} {}: {:.3f} ({:.3f} to {:.3f})".format(name, method, *row), flush=True)
    print(json.dumps(report))


def case(name, seed, epsilon):
    """Dict of the arrays of `tables.as_arrays`, the rows as they are, and their bounds."""
    if name == RARE:
        x, y = table_rules.make_rare(seed, RARE_ROWS, RARE_SHARE)
        limits = np.full(x.shape[1], -4.0), np.full(x.shape[1], 4.0)
        table, settings = table_rules.as_table(x, y, RARE_ROWS, limits, epsilon)
    else:
        table, settings = tables.case(name, seed, epsilon, None, "public")
    limits = np.array([settings.ranges[column] for column in table.kinds])
    return {
        **tables.as_arrays(table, settings),
        "epsilon": epsilon,
        "metric": "auc" if name == RARE else "score",
        "rows": [np.stack(list(p.columns.values()), 1) for p in (table.train, table.test)],
        "limits": {"lower": limits[:, 0], "upper": limits[:, 1]},
    }


def ours(task):
    """A fitted private estimator, and the rows to test on."""
    rows, test_rows = task["rows"]
    if task["classes"]:
        estimator = PrivateClassifier(task["epsilon"], **task["limits"])
    else:  # The targets of `as_arrays` are in [-1, 1].
        target = {"target_lower": -1.0, "target_upper": 1.0}
        estimator = PrivateRegressor(task["epsilon"], **target, **task["limits"])
    return estimator.fit(rows, task["y"]), test_rows


def without_privacy(task):
    """A fitted linear model of scikit-learn, and the columns to test on."""
    estimator = linear_model.Ridge()
    if task["classes"]:
        estimator = linear_model.LogisticRegression(max_iter=1000)
    return estimator.fit(task["x"], task["y"]), task["test_x"]


def score(task, fitted):
    """AUC, accuracy or R2 of a fitted estimator on rows."""
    estimator, rows = fitted
    if task["metric"] == "auc":
        return metrics.roc_auc_score(task["test_y"], estimator.predict_proba(rows)[:, 1])
    return estimator.score(rows, task["test_y"])


if __name__ == "__main__":
    main()
