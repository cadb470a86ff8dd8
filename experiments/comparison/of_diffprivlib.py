"""Fits diffprivlib's models on a table. Runs in a Python in which diffprivlib is installed.

Reads a pickle of arrays from the standard input, and prints the accuracy, R2 or AUC.
"""

import pickle
import sys
import warnings

import numpy as np
from diffprivlib import models
from sklearn.metrics import roc_auc_score


def main():
    """Fits a model to the table and prints the model's score."""
    task = pickle.load(sys.stdin.buffer)
    warnings.simplefilter("ignore")
    common = dict(epsilon=task["epsilon"], random_state=task["seed"])
    if task["classes"]:
        # Most rows with values in [-1, 1] have at most this norm. diffprivlib clips longer rows.
        norm = float(np.sqrt(task["x"].shape[1]) / 2)
        model = models.LogisticRegression(data_norm=norm, max_iter=500, **common)
    else:
        bounds = (-1.0, 1.0)
        model = models.LinearRegression(bounds_X=bounds, bounds_y=bounds, **common)
    model.fit(task["x"], task["y"])
    if task.get("metric") == "auc":
        of_second = model.predict_proba(task["test_x"])[:, 1]
        print(float(roc_auc_score(task["test_y"], of_second)))
    else:
        print(float(model.score(task["test_x"], task["test_y"])))


if __name__ == "__main__":
    main()
