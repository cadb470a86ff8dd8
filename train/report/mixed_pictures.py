"""Pictures and tables of mixed training, after Figures 1 to 3 of the AdaMix paper."""

import statistics

import numpy as np
from matplotlib import figure

_FREE = ("only_public", "paragon")


def spread(values):
    """Mean and standard deviation, in percent, as text."""
    percent = [100 * value for value in values]
    deviation = statistics.stdev(percent) if len(percent) > 1 else 0.0
    return f"{statistics.mean(percent):.1f} ± {deviation:.1f}"


def write_table(results, path):
    """Writes test errors: a row for each method, a column for public examples and epsilon.

    Args:
        results: Dict from `(method, shots, shift, epsilon)` to a list of dicts with `error`.
        path: `pathlib.Path`.
    """
    settings = list(dict.fromkeys(key[1:] for key in results if key[0] not in _FREE))
    lines = [
        "| test error, % | " + " | ".join(_name(*setting) for setting in settings) + " |",
        "|" + "---|" * (len(settings) + 1),
    ]
    for method in dict.fromkeys(key[0] for key in results):
        cells = []
        for shots, shift, epsilon in settings:
            key = (method, shots, shift, None if method in _FREE else epsilon)
            cells.append(spread([r["error"] for r in results[key]]) if key in results else "")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


def _name(shots, shift, epsilon):
    domain = "" if shift == "none" else f"{shift}, "
    return f"{domain}{shots} public a class, epsilon {epsilon:g}"


def draw_errors(results, shots, shift, path):
    """Test error against epsilon, a line for each method (Figure 1, left; Figure 3, right).

    Args:
        results: As for `write_table`.
        shots: Int.
        shift: String.
        path: PNG file to write.
    """
    fig, axes = _axes("privacy budget, epsilon", "test error, %")
    for method in dict.fromkeys(key[0] for key in results):
        points = sorted(
            (key[3] or 0.0, [100 * r["error"] for r in found])
            for key, found in results.items()
            if key[:3] == (method, shots, shift)
        )
        if method in _FREE:
            for _, errors in points:
                style = {"color": "black", "linestyle": "--" if method == "paragon" else ":"}
                axes.axhline(statistics.mean(errors), label=method, **style)
        elif points:
            low, mid, high = zip(*(np.quantile(e, [0, 0.5, 1]) for _, e in points), strict=True)
            epsilons = [epsilon for epsilon, _ in points]
            [line] = axes.plot(epsilons, mid, marker="o", label=method)
            axes.fill_between(epsilons, low, high, color=line.get_color(), alpha=0.15)
    axes.set_title(f"{shots} public images a class" + ("" if shift == "none" else f", {shift}"))
    _save(fig, axes, path)


def boost(results, method, shots, shift, epsilon):
    """Float: the paper's performance boost, (public - paragon) / (private - paragon).

    1 where private data bring nothing; infinite at the paragon's error.
    """

    def error(name, at):
        return statistics.mean(r["error"] for r in results[name, shots, shift, at])

    # All examples together are the same ones however they were split.
    together = [found for key, found in results.items() if key[0] == "paragon"]
    paragon = statistics.mean(r["error"] for found in together for r in found)
    gap = error(method, epsilon) - paragon
    return (error("only_public", None) - paragon) / gap if gap > 0 else float("inf")


def draw_boost(results, epsilon, path):
    """The boost against the number of public examples (Figure 2, right).

    Args:
        results: As for `write_table`.
        epsilon: Float.
        path: PNG file to write.
    """
    fig, axes = _axes("public images of each class", "performance boost")
    methods = [m for m in dict.fromkeys(key[0] for key in results) if m not in _FREE]
    for method in methods:
        shots = sorted({k[1] for k in results if (k[0], *k[2:]) == (method, "none", epsilon)})
        axes.plot(
            shots,
            [boost(results, method, count, "none", epsilon) for count in shots],
            marker="o",
            label=method,
        )
    axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_title(f"epsilon {epsilon:g}")
    _save(fig, axes, path)


def draw_membership(results, shots, path):
    """The attack's AUC against test error, a point for each epsilon (Figure 1, right).

    Args:
        results: As for `write_table`, with `auc`.
        shots: Int.
        path: PNG file to write.
    """
    fig, axes = _axes("test error, %", "membership attack, AUC")
    for method in dict.fromkeys(key[0] for key in results):
        points = sorted(
            (
                100 * statistics.mean(r["error"] for r in found),
                statistics.mean(r["auc"] for r in found),
                key[3],
            )
            for key, found in results.items()
            if key[:3] == (method, shots, "none")
        )
        if not points:
            continue
        axes.plot(*zip(*(p[:2] for p in points), strict=True), marker="o", label=method)
        for error, auc, epsilon in points:
            if epsilon:
                axes.annotate(f"{epsilon:g}", (error, auc), fontsize=7)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=1)
    _save(fig, axes, path)


def draw_individuals(epsilons, budget, path):
    """Sorted epsilons of single examples (Figure 3, left and centre).

    Args:
        epsilons: Dict from a method to an array `[n]`.
        budget: Float, epsilon of the run.
        path: PNG file to write.
    """
    fig, axes = _axes("private examples, sorted, %", "individual epsilon")
    for method, values in epsilons.items():
        axes.plot(np.linspace(0, 100, len(values)), np.sort(values), label=method)
    axes.axhline(budget, color="black", linestyle=":", linewidth=1, label="worst case")
    axes.set_ylim(0, None)
    _save(fig, axes, path)


def _axes(x, y):
    fig = figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = fig.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return fig, axes


def _save(fig, axes, path):
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
    fig.savefig(path, dpi=120)
