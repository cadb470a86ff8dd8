r"""Draws a sweep: the accuracy for each value of a setting, with the best other settings.

    python -m tfdpx.train.sweep --workdir=runs/sweep --epsilon=8 ... --grid=...
    python -m experiments.high_accuracy.sweep_figures --workdir=runs/sweep

Writes `accuracy_by_<setting>.png` into the folder of the sweep, and `curves.png`, which shows each
run's accuracy against epsilon during the training (from its curve.jsonl). With --training_accuracy,
the program also measures the models on their training images. No epsilon covers these accuracies,
so they are drawn in separate files, with names that begin with PRIVATE. You may run the program
several times during a sweep.

For these figures of De et al. 2022, sweep with the paper's presets for CIFAR-10:

    2, 7   --grid="batch_size=256,1024,4096,16384;steps=1250,2500,5000;learning_rate=1,2,4,8"
    3      --grid="augmult=0,1,2,4,8,16,32;learning_rate=1,2,4"
    6      --grid="noise_multiplier=2,2.5,3,4,5;learning_rate=1,2,4" --batch_size=4096
    8      --grid="l2_norm_clip=0.01,0.1,1,10;learning_rate=0.5,1,2,4,8"
    9      --grid="model=wrn_16_4,wrn_28_4,wrn_40_4,wrn_64_4,wrn_100_4;augmult=0,1,16"
           --noise_multiplier=2 --epsilon=64 --batch_size=4096, curves.png

Figures 2, 3 and 6 also show the accuracy on training images (--training_accuracy).
"""

import argparse
import json
import pathlib
import sys

import keras
import numpy as np
from matplotlib import colormaps, figure, ticker

from tfdpx.train import sweep
from tfdpx.train.data import images

# If the largest value is at least this many times the smallest, the axis is logarithmic.
_LOG_FROM = 4.0


def main(arguments=None):
    """Draws the sweep in --workdir, and prints a JSON object with the paths of the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workdir", required=True, help="Folder of a sweep.")
    add = parser.add_argument
    add("--training_accuracy", action="store_true", help="Draw the private one too.")
    values = parser.parse_args(arguments)
    workdir = pathlib.Path(values.workdir)
    rows, swept = sweep.read_table(workdir)
    if not rows:
        sys.exit(f"experiments.high_accuracy.sweep_figures: no run in {workdir} has finished.")
    drawn = [*draw(rows, swept, workdir), *draw_curves(workdir)]
    if values.training_accuracy:
        drawn += draw(on_training_images(rows), swept, workdir, "PRIVATE_training_")
    print(json.dumps({"figures": [str(path) for path in drawn]}))


def on_training_images(rows):
    """Returns the rows with each run's accuracy on its training images.

    No epsilon covers these accuracies.
    """
    measured = []
    for row in rows:
        model = keras.saving.load_model(row["folder"] / "model.keras", compile=False)
        data = images.load(row["dataset"], validation=row["validation"])
        right = model.predict(data.train_x, verbose=0).argmax(1) == data.train_y
        accuracy = {"accuracy": float(np.mean(right)), "measured_on": "training, PRIVATE"}
        measured.append({**row, **accuracy})
    return measured


def draw(rows, swept, folder, prefix=""):
    """Draws a PNG file for each setting with several values.

    The left panel shows the median accuracy over seeds against the setting, with the range as a
    bar. There is one line for each value of the next setting; any further settings have their best
    values. For the broad grey line all other settings have their best values, as in the plots of
    batch size, noise and updates of De et al. (2022, Figures 2, 3, 6). Each panel to the right
    shows the best values of another setting (Figure 7 of the paper).

    Args:
        rows: Result of `sweep.read_table`.
        swept: Names of the swept settings.
        folder: `pathlib.Path` to write to.
        prefix: String, the beginning of the file names.

    Returns:
        List of the paths of the files.
    """
    points = sweep.points(rows, swept)
    several = [name for name in swept if len(_values(points, name)) > 1]
    measured_on = " and ".join(sorted({row["measured_on"] for row in rows}))
    paths = []
    for name in several:
        other_names = [other for other in several if other != name]
        fig = figure.Figure(figsize=(5.5 + 3.5 * len(other_names), 4), layout="constrained")
        panels = np.atleast_1d(
            fig.subplots(1, 1 + len(other_names), width_ratios=[5.5] + [3.5] * len(other_names))
        )
        _accuracy(panels[0], points, name, other_names)
        panels[0].set_ylabel(f"{measured_on} accuracy, %")
        for panel, other in zip(panels[1:], other_names, strict=True):
            _optimum(panel, points, name, other)
        paths.append(folder / f"{prefix}accuracy_by_{name}.png")
        fig.savefig(paths[-1], dpi=120)
    return paths


def draw_curves(folder):
    """Draws each run's accuracy against epsilon (Figure 9); returns a list of paths."""
    curves = {}
    for path in sorted(folder.glob("runs/*/curve.jsonl")):
        curves[path.parent.name] = [json.loads(line) for line in path.read_text().splitlines()]
    lines = {run: [row for row in rows if "accuracy" in row] for run, rows in curves.items()}
    if not any(lines.values()):
        return []
    fig = figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = fig.add_subplot(xscale="log", xlabel="epsilon spent", ylabel="accuracy, %")
    for run, rows in lines.items():
        spent, reached = ([float(row[key]) for row in rows] for key in ("epsilon", "accuracy"))
        axes.plot(spent, 100 * np.array(reached), marker="o", ms=3, label=run)
    axes.legend(fontsize="small")
    fig.savefig(folder / "curves.png", dpi=120)
    return [folder / "curves.png"]


def _accuracy(panel, points, name, other_names):
    values = _values(points, name)
    if other_names:
        lines = _values(points, other_names[0])
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(lines)))
        for line, colour in zip(lines, colours, strict=True):
            chosen = [point for point in points if point[other_names[0]] == line]
            _line(panel, chosen, name, values, color=colour, label=_short(line))
        # Drawn below the other lines, which it would hide.
        broad = dict(color="lightgrey", elinewidth=0, capsize=0, ms=0, lw=7, zorder=1)
        _line(panel, points, name, values, **broad, label="best of all")
        panel.legend(title=other_names[0], fontsize="small", title_fontsize="small")
    else:
        _line(panel, points, name, values, color="black")
    _axis(panel, "x", name, values)
    panel.grid(alpha=0.3)


def _line(panel, points, name, values, **style):
    best = _best_at(points, name, values)
    medians = 100 * np.array([point["median"] for point in best])
    below = medians - 100 * np.array([point["lowest"] for point in best])
    above = 100 * np.array([point["highest"] for point in best]) - medians
    where = [_position(point[name], values) for point in best]
    look = {"marker": "o", "ms": 4, "capsize": 2, "lw": 1.2, **style}
    panel.errorbar(where, medians, [below, above], **look)


def _optimum(panel, points, name, other):
    values, other_values = _values(points, name), _values(points, other)
    best = _best_at(points, name, values)
    panel.plot(
        [_position(point[name], values) for point in best],
        [_position(point[other], other_values) for point in best],
        "o--",
        color="black",
        ms=4,
        lw=1.2,
    )
    _axis(panel, "x", name, values)
    _axis(panel, "y", f"best {other}", other_values)
    # The axis shows all tested values. An optimum at its edge means that the grid was too small.
    edges = [_position(value, other_values) for value in other_values]
    for edge in (edges[0], edges[-1]):
        panel.axhline(edge, color="grey", lw=0.8, ls=":")
    panel.autoscale(axis="y")
    panel.grid(alpha=0.3)


def _best_at(points, name, values):
    groups = [[point for point in points if point[name] == value] for value in values]
    return [max(group, key=sweep.rank) for group in groups if group]


def _values(points, name):
    return list(dict.fromkeys(point[name] for point in points))


def _numeric(values):
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)


def _position(value, values):
    """Returns the position on the axis: a number's value, or the index of a name or a bool."""
    return value if _numeric(values) else values.index(value)


def _axis(panel, which, label, values):
    axis = getattr(panel, f"{which}axis")
    if _numeric(values) and min(values) > 0 and max(values) / min(values) >= _LOG_FROM:
        getattr(panel, f"set_{which}scale")("log")
    axis.set_major_locator(ticker.FixedLocator([_position(value, values) for value in values]))
    axis.set_major_formatter(ticker.FixedFormatter([_short(value) for value in values]))
    if which == "x" and not _numeric(values):
        axis.set_tick_params(rotation=20)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_label_text(label)


def _short(value):
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rpartition("/")[2]  # For presets, the column of the table.


if __name__ == "__main__":
    main()
