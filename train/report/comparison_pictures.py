"""A picture of several runs: accuracy against epsilon, a point a run."""

import math

from matplotlib import figure


def draw(points, path, measured_on="test"):
    """Draws the runs, each under its name; those without privacy at the right.

    Args:
        points: Tuples of a name, an epsilon (infinite without privacy) and an accuracy in [0, 1].
        path: PNG file to write.
        measured_on: What the accuracies were measured on.
    """
    finite = [epsilon for _, epsilon, _ in points if epsilon < math.inf]
    far = 1.25 * max(finite, default=1.0) or 1.0  # An epsilon of zero is one, too.
    fig = figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = fig.add_subplot()
    for name, epsilon, accuracy in points:
        place = min(epsilon, far), 100 * accuracy
        axes.plot(*place, marker="o" if epsilon < math.inf else "s")
        # As it is: a pair of dollars in the name of a folder is no formula.
        axes.annotate(
            name, place, xytext=(5, 4), textcoords="offset points", fontsize=8, parse_math=False
        )
    if len(finite) < len(points):
        axes.axvline(far, color="grey", linestyle=":", linewidth=1, zorder=0)
        axes.annotate(
            "without privacy", (far, 1.01), xycoords=("data", "axes fraction"), ha="right"
        )
    axes.set_xlabel("privacy spent, epsilon")
    axes.set_ylabel(f"{measured_on} accuracy, %")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    fig.savefig(path, dpi=120)
