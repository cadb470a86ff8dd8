"""Accuracy of heads against epsilon: a table in Markdown and a picture."""

import math

from matplotlib import figure


def write_table(medians, path):
    """Writes a row an epsilon and a column a method; the best of each row in bold.

    Args:
        medians: Dict from `(method, epsilon as a string)` to accuracy.
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
    path.write_text("\n".join(lines) + "\n")


def draw(medians, path):
    """Draws a line a method, and as a dotted line what it reaches without privacy.

    Args:
        medians: As for `write_table`.
        path: PNG file to write.
    """
    methods, epsilons = _axes(medians)
    fig = figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = fig.add_subplot()
    for method in methods:
        points = [
            (float(epsilon), 100 * medians[method, epsilon])
            for epsilon in epsilons
            if (method, epsilon) in medians
        ]
        private = [point for point in points if point[0] < math.inf]
        [line] = axes.plot(*zip(*private, strict=True), marker="o", label=method)
        for _, accuracy in points[len(private) :]:
            axes.axhline(accuracy, color=line.get_color(), linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel(r"$\varepsilon$ (dotted: without privacy)")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    fig.savefig(path, dpi=120)


def _axes(medians):
    methods = list(dict.fromkeys(method for method, _ in medians))
    return methods, sorted({epsilon for _, epsilon in medians}, key=float)
