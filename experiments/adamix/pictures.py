"""Pictures and tables of the study, after Figures 1 to 3 of the paper.

Throughout, `results` is a dict from `(method, shots, shift, epsilon)` to a list with the result of
each fit (see `methods.Study.measured`). For methods without private steps `epsilon` is None.
"""

import math
import statistics

import numpy as np
from matplotlib import figure

from experiments import pictures
from experiments.adamix.methods import FREE

STARTS = {
    "zero": "zero_start", "names of classes": "names_start", "public images": "adamix",
    "names, then public images": "names_and_images",
}  # fmt: skip


def spread(values):
    """Returns a text with the mean and the standard deviation in percent."""
    percent = [100 * value for value in values]
    deviation = statistics.stdev(percent) if len(percent) > 1 else 0.0
    return f"{statistics.mean(percent):.1f} ± {deviation:.1f}"


def _mean(fits, name="error"):
    return statistics.mean(fit[name] for fit in fits)


def write_table(results, path):
    """Writes a table of test errors, with a row for each method.

    There is a column for each number of public examples and each epsilon.
    """
    settings = list(dict.fromkeys(key[1:] for key in results if key[0] not in FREE))
    names = [
        f"{'' if shift == 'none' else f'{shift}, '}{shots} public per class, epsilon {epsilon:g}"
        for shots, shift, epsilon in settings
    ]
    lines = [f"| test error, % | {' | '.join(names)} |", "|" + "---|" * (len(settings) + 1)]
    for method in _methods(results):
        cells = []
        for shots, shift, epsilon in settings:
            key = (method, shots, shift, None if method in FREE else epsilon)
            cells.append(spread([r["error"] for r in results[key]]) if key in results else "")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


def draw(results, folder):
    """Draws all figures that there are results for, as PNG files in `folder`."""
    for shots, shift in sorted({key[1:3] for key in results}):
        draw_errors(results, shots, shift, folder / f"errors_{shots}_{shift}.png")
    plain = {key: fits for key, fits in results.items() if key[2] == "none"}
    for shots in sorted({key[1] for key in plain}):
        draw_membership(plain, shots, folder / f"membership_{shots}.png")
    private = {key: fits for key, fits in plain.items() if key[0] not in FREE}
    for shots, epsilon in sorted({(key[1], key[3]) for key in private}):
        draw_individuals(private, shots, epsilon, folder / f"individual_{shots}_{epsilon:g}.png")
        if ("names_start", shots, "none", epsilon) in private:
            draw_starts(private, shots, epsilon, folder / f"starts_{shots}_{epsilon:g}.png")
    shots_with_baseline = {key[1] for key in plain if key[0] == "only_public"}
    comparable = {key: fits for key, fits in plain.items() if key[1] in shots_with_baseline}
    if "paragon" in _methods(plain):
        for epsilon in sorted({key[3] for key in comparable} - {None}):
            draw_boost(comparable, epsilon, folder / f"boost_{epsilon:g}.png")


def draw_errors(results, shots, shift, path):
    """Draws test error against epsilon by method (Figure 1, left; Figure 3, right)."""
    lines = {}
    for (method, *setting, epsilon), fits in results.items():
        if setting == [shots, shift]:
            errors = [fit["error"] for fit in fits]
            lines.setdefault(method, {})[epsilon or math.inf] = errors
    title = f"{shots} public images per class" + ("" if shift == "none" else f", {shift}")
    pictures.draw({title: lines}, path, "test error, %")


def draw_sigmas(by_sigma, folder):
    """Draws test error against sigma (the paper's appendix), if a setting has several sigmas.

    Args:
        by_sigma: Dict from `(method, shots, shift, epsilon)` to a dict from sigma to errors.
        folder: `pathlib.Path`.
    """
    settings = {key[1:] for key, errors in by_sigma.items() if len(errors) > 1}
    for shots, shift, epsilon in sorted(settings):
        fig, axes = _axes("noise multiplier, sigma", "test error, %")
        for (method, *setting), errors in by_sigma.items():
            if setting == [shots, shift, epsilon]:
                means = [100 * statistics.mean(errors[sigma]) for sigma in sorted(errors)]
                axes.plot(sorted(errors), means, marker="o", label=method)
        axes.set_title(f"{shots} public images per class, epsilon {epsilon:g}")
        _save(fig, axes, folder / f"sigma_{shots}_{shift}_{epsilon:g}.png")


def draw_starts(results, shots, epsilon, path):
    """Draws the test error for each choice of initial weights (Figure 4, left)."""
    fig, axes = _axes("test error, %", "")
    for name, method in STARTS.items():
        fits = results.get((method, shots, "none", epsilon))
        if fits:
            axes.barh(name, 100 * _mean(fits), color="grey")
    _save(fig, axes, path)


def boost(results, method, shots, epsilon):
    """Returns the paper's performance boost, (public - paragon) / (private - paragon), a float.

    Here "public", "private" and "paragon" are test errors. The boost is 1 if private data do not
    help, and infinite if the private error equals the paragon's.
    """
    # The paragon is fitted on all examples together, so the split is irrelevant.
    together = [fit for key, fits in results.items() if key[0] == "paragon" for fit in fits]
    paragon = _mean(together)
    gap = _mean(results[method, shots, "none", epsilon]) - paragon
    public = _mean(results["only_public", shots, "none", None])
    return (public - paragon) / gap if gap > 0 else float("inf")


def draw_boost(results, epsilon, path):
    """Draws the boost against the number of public examples (Figure 2, right)."""
    fig, axes = _axes("public images of each class", "performance boost")
    for method in _methods(results):
        if method not in FREE:
            shots = sorted(key[1] for key in results if (key[0], key[3]) == (method, epsilon))
            boosts = [boost(results, method, count, epsilon) for count in shots]
            axes.plot(shots, boosts, marker="o", label=method)
    axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_title(f"epsilon {epsilon:g}")
    _save(fig, axes, path)


def draw_membership(results, shots, path):
    """Draws the attack's AUC against test error, a point for each epsilon (Figure 1, right)."""
    fig, axes = _axes("test error, %", "membership attack, AUC")
    for method in _methods(results):
        points = sorted(
            (100 * _mean(fits), _mean(fits, "auc"), key[3] or 0.0)
            for key, fits in results.items()
            if key[:2] == (method, shots)
        )
        if points:
            errors, aucs, epsilons = zip(*points, strict=True)
            axes.plot(errors, aucs, marker="o", label=method)
            for error, auc, epsilon in points:
                if epsilon:
                    axes.annotate(f"{epsilon:g}", (error, auc), fontsize=7)
    axes.axhline(0.5, color="black", linestyle=":", linewidth=1)
    _save(fig, axes, path)


def draw_individuals(results, shots, epsilon, path):
    """Draws the sorted epsilons of single examples (Figure 3, left and centre)."""
    fig, axes = _axes("private examples, sorted, %", "individual epsilon")
    for (method, *setting), [first, *_] in results.items():
        if setting == [shots, "none", epsilon]:
            values, worst = first["individual"], first["spent"]
            axes.plot(np.linspace(0, 100, len(values)), values, label=method)
    axes.axhline(worst, color="black", linestyle=":", linewidth=1, label="worst case")
    axes.set_ylim(0, None)
    _save(fig, axes, path)


def _methods(results):
    return list(dict.fromkeys(key[0] for key in results))


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
