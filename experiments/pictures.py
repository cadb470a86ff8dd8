"""Draws the picture of most studies: accuracy against epsilon, with a line for each method."""

import math

import numpy as np
from matplotlib import figure


def draw(panels, path, ylabel="test accuracy, %"):
    """Draws the median of runs against epsilon, with bars from the least to the largest.

    The axis of epsilon is logarithmic. A dotted line is the median without privacy, if `panels` has
    results for an infinite epsilon.

    Args:
        panels: Nested dict: from a panel's title to a method to an epsilon to a list of accuracies.
        path: PNG file to write.
        ylabel: String, the label of the vertical axis.
    """
    fig = figure.Figure(figsize=(max(7, 3 * len(panels)), 4.5), layout="constrained")
    for axes, (title, methods) in zip(
        np.atleast_1d(fig.subplots(1, len(panels))), panels.items(), strict=True
    ):
        for name, points in methods.items():
            private = sorted(epsilon for epsilon in points if epsilon < math.inf)
            runs = [100 * np.array(points[epsilon]) for epsilon in private]
            middle = np.array([np.median(r) for r in runs])
            spread = [middle - [r.min() for r in runs], [r.max() for r in runs] - middle]
            line = axes.errorbar(private, middle, spread, marker="o", capsize=2, label=name)
            if math.inf in points:
                public = 100 * np.median(points[math.inf])
                axes.axhline(public, color=line.lines[0].get_color(), linestyle=":", linewidth=1)
        axes.set(xscale="log", xlabel=r"$\varepsilon$", title=title)
        axes.set_xticks(private, [f"{epsilon:g}" for epsilon in private])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    first = fig.axes[0]
    first.set_ylabel(ylabel)
    first.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
