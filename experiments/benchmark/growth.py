"""How the cost of a step grows with images and with views, and a picture of it."""

import dataclasses
import gc
import statistics

import numpy as np
from matplotlib import figure, ticker

from experiments.benchmark import steps

SIZES = (1, 2, 4, 8, 16, 32)

# What is varied, and how the axis is called.
AXES = {"augmult": "views K", "images": "examples B"}


def measure(settings, repeats, report):
    """Times the ordinary and the private step for K in `SIZES` and for batches of `SIZES`.

    The value that is not varied is taken from `settings`.

    Args:
        settings: `steps.Settings`.
        repeats: Int. Runs of each step.
        report: Function of one line of text, called as the work proceeds.

    Returns:
        List of dicts with `axis` (a key of `AXES`), `augmult`, `images`, `ordinary_seconds`,
        `private_seconds` and `step_ratio`.
    """
    points = []
    for axis in AXES:
        for size in SIZES:
            chosen = dataclasses.replace(settings, **{axis: size})
            report(f"sweep: images={chosen.images}, augmult={chosen.augmult}")
            pair = {kind: steps.make_step(kind, chosen) for kind in ("ordinary", "private")}
            seconds = steps.interleaved(pair, repeats)
            ordinary, private = (statistics.median(seconds[kind]) for kind in pair)
            points.append(
                {
                    "axis": axis,
                    "augmult": chosen.augmult,
                    "images": chosen.images,
                    "ordinary_seconds": ordinary,
                    "private_seconds": private,
                    "step_ratio": private / ordinary,
                }
            )
            del pair
            gc.collect()  # Graphs and models hold reference cycles.
    return points


def line(sizes, seconds):
    """The straight line `fixed + slope * size` that fits best relative to the times.

    Args:
        sizes: Numbers of images or views.
        seconds: Times measured there.

    Returns:
        `fixed` and `slope` in seconds, and the largest deviation from the line as a fraction of it.
    """
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(columns, np.ones_like(sizes), rcond=None)
    fitted = fixed + slope * sizes
    return fixed, slope, float(np.max(np.abs(seconds / fitted - 1)))


def draw(points, path, title):
    """Draws times with their straight lines, and below them the ratios, one column an axis.

    Args:
        points: What `measure` returned.
        path: PNG file to write.
        title: Heading.
    """
    fig = figure.Figure(figsize=(9, 6), layout="constrained")
    fig.suptitle(title)
    panels = fig.subplots(2, 2, sharex="col", sharey="row", height_ratios=[3, 2])
    for column, (axis, label) in enumerate(AXES.items()):
        chosen = [point for point in points if point["axis"] == axis]
        times, ratios = panels[0][column], panels[1][column]
        sizes = [point[axis] for point in chosen]
        for kind in ("ordinary", "private"):
            seconds = [point[f"{kind}_seconds"] for point in chosen]
            fixed, slope, deviation = line(sizes, seconds)
            (marks,) = times.plot(sizes, seconds, "o", markersize=4)
            fine = np.geomspace(sizes[0], sizes[-1], 100)
            times.plot(
                fine,
                fixed + slope * fine,
                color=marks.get_color(),
                linewidth=1,
                label=f"{kind}: {fixed:.2g} s + {slope:.2g} s each, ±{100 * deviation:.0f}%",
            )
        ratios.plot(sizes, [point["step_ratio"] for point in chosen], "o-", color="black", ms=4)
        times.set_yscale("log")
        times.set_xscale("log", base=2)
        other = next(name for name in AXES if name != axis)
        times.set_title(f"{AXES[other]} = {chosen[0][other]}", fontsize="medium")
        ratios.set_xlabel(label)
        ratios.xaxis.set_major_locator(ticker.FixedLocator(sizes))
        ratios.xaxis.set_major_formatter(ticker.ScalarFormatter())
        times.legend(fontsize="small")
        for panel in (times, ratios):
            panel.grid(alpha=0.3)
        ratios.axhline(1, color="grey", linewidth=1)
    panels[1][0].set_ylim(0, 1.1 * max(point["step_ratio"] for point in points))
    panels[0][0].set_ylabel("seconds a step")
    panels[1][0].set_ylabel("private / ordinary")
    fig.savefig(path, dpi=120)
