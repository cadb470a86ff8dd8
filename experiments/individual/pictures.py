"""Draws Figures 2, 5, 7 and 8 of Yu et al. 2022 from the private arrays of a run or of the study.

    python -m experiments.individual.pictures --folder=RUN/individual_PRIVATE
    python -m experiments.individual.pictures --folder=STUDY

The folder is `individual_PRIVATE` in a run of `classify --individual` (Figures 5 and 7), or the
--workdir of `study` (Figure 2) or of `study --clips` (Figure 8). Figure 7 compares classes, or the
groups in --groups, a CSV file with rows `image,group`. There `image` is a path below the data
folder, or SPLIT/ROW for other data sets. The pictures are private data, like the arrays.
"""

import argparse
import csv
import json
import pathlib

import numpy as np
from matplotlib import figure

from experiments.individual.groups import group_report


def by_updates(arrays, axes):
    """Draws mean norms during the training for five groups of examples (Figure 2).

    The groups are fifths of the examples, sorted by their mean norm over the training.
    """
    norms = arrays["norms"]
    order = np.argsort(norms.mean(axis=0), kind="stable")
    for number, part in enumerate(np.array_split(order, 5)):
        label = f"{20 * number} to {20 * (number + 1)}%"
        axes.plot(np.arange(1, 1 + len(norms)), norms[:, part].mean(axis=1), label=label)
    axes.set(xlabel="model updates", ylabel="mean gradient norm over the clip")
    axes.legend(title="examples, by mean norm")


def by_loss(arrays, axes):
    """Draws mean epsilons of tenths of the examples, sorted by loss (Figure 5)."""
    losses, epsilons = arrays["losses"], arrays["epsilons"]
    parts = np.array_split(np.argsort(losses, kind="stable"), 10)
    axes.plot(*np.array([[losses[p].mean(), epsilons[p].mean()] for p in parts]).T, marker="o")
    axes.set(xscale="log", xlabel="mean loss of a tenth", ylabel="mean individual epsilon")
    axes.set_title(f"correlation {np.corrcoef(epsilons, losses)[0, 1]:.2f}")


def by_attack(groups, axes):
    """Draws the mean epsilon of each group, and the success of the attack on it (Figure 7)."""
    groups = sorted(groups, key=lambda group: group["mean_epsilon"])
    axes.bar([str(g["name"]) for g in groups], [g["mean_epsilon"] for g in groups], alpha=0.6)
    axes.set_ylabel("mean individual epsilon (bars)")
    right = axes.twinx()
    right.plot([group["attack_success"] for group in groups], color="tab:red", marker="o")
    right.set_ylabel("membership attack, share right", color="tab:red")


def by_clip(arrays, axes):
    """Draws epsilons for several clips, multiples of the median norm at the start (Figure 8)."""
    for name in (name for name in arrays if name.startswith("clip_")):
        label = f"{name.removeprefix('clip_')} times the median norm"
        axes.hist(arrays[name], bins=40, histtype="step", label=label)
    axes.set(xlabel="individual epsilon", ylabel="examples")
    axes.legend()


def attacked(arrays, path):
    """Returns `group_report` for the groups in a CSV file of rows `image,group`, or for classes."""
    labels = arrays["labels"], arrays["held_out_labels"]
    if path:
        with open(path, newline="", encoding="utf-8") as file:
            group_of = {row[0]: row[1] for row in csv.reader(file)}
        names = arrays["names"], arrays["held_out_names"]
        labels = [np.array([group_of[name] for name in part]) for part in names]
    held_out = arrays["held_out_losses"], labels[1]
    return group_report(arrays["epsilons"], arrays["losses"], labels[0], *held_out)["groups"]


def main(arguments=None):
    """Draws a picture of each file of arrays in the folder, and prints their paths as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="Of arrays.")
    parser.add_argument("--groups", help="CSV of rows image,group.")
    values = parser.parse_args(arguments)
    folder = values.folder
    if (folder / "private.npz").exists():
        arrays = dict(np.load(folder / "private.npz"))
        drawings = {"norms": (by_updates, arrays)} if "norms" in arrays else {}
        drawings = drawings or {"clips": (by_clip, arrays)}
    else:
        arrays = dict(np.load(folder / "arrays.npz"))
        groups = attacked(arrays, values.groups)
        drawings = {"loss": (by_loss, arrays), "attacks": (by_attack, groups)}
    for name, (draw, data) in drawings.items():
        fig = figure.Figure(figsize=(6, 4), layout="constrained")
        draw(data, fig.add_subplot())
        fig.savefig(folder / f"{name}.png", dpi=120)
    print(json.dumps({"figures": [str(folder / f"{name}.png") for name in drawings]}))


if __name__ == "__main__":
    main()
