"""Pictures of a run: accuracy against privacy spent, and which classes are mistaken for which."""

import functools
import math
import pathlib

import matplotlib
import numpy as np
import tensorflow as tf
from matplotlib import figure, font_manager, ticker
from sklearn import metrics

MAX_LABELLED_CLASSES = 20
_COLUMNS, _LONGEST_NAME = 3, 14


def learning_curve(rows, path, eval_split="test"):
    """Draws accuracy against the epsilon spent, with the model updates on a second axis.

    Without privacy (an infinite epsilon) the updates are the only axis.

    Args:
        rows: List of dicts with `step`, `epsilon` and `accuracy`, in the order of steps.
        path: PNG file to write.
        eval_split: What the accuracy was measured on.
    """
    steps = np.array([row["step"] for row in rows], float)
    epsilons = np.array([row["epsilon"] for row in rows], float)
    accuracy = 100 * np.array([row["accuracy"] for row in rows], float)
    private = bool(np.isfinite(epsilons).all())

    fig = figure.Figure(figsize=(7, 4.5), layout="constrained")
    axes = fig.add_subplot()
    axes.plot(epsilons if private else steps, accuracy, marker="o", markersize=3)
    axes.set_xlabel(r"privacy spent, $\varepsilon$" if private else "model updates")
    axes.set_ylabel(f"{eval_split} accuracy, %")
    axes.set_title(f"{accuracy[-1]:.1f}% after {steps[-1]:.0f} updates")
    axes.grid(alpha=0.3)
    # A row for update 0 at epsilon 0 anchors the second axis; both columns rise strictly with it.
    if private and epsilons[0] > 0:
        steps, epsilons = np.append(0, steps), np.append(0, epsilons)
    if private and len(steps) > 1 and (np.diff(epsilons) > 0).all():
        second = axes.secondary_xaxis(
            "top",
            functions=(
                lambda e: _piecewise(e, epsilons, steps),
                lambda s: _piecewise(s, steps, epsilons),
            ),
        )
        second.set_xlabel("model updates")
        second.xaxis.set_major_locator(ticker.FixedLocator(_round_ticks(steps[-1])))
    fig.savefig(path, dpi=120)


def confusion_matrix(labels, predictions, class_names, path):
    """Draws how often each class (row) was taken for each other (column), in percent of the row.

    Args:
        labels: Integer labels `[num_examples]`.
        predictions: Predicted labels `[num_examples]`.
        class_names: One name a class.
        path: PNG file to write.
    """
    num_classes = len(class_names)
    counts = metrics.confusion_matrix(labels, predictions, labels=np.arange(num_classes))
    percent = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    fig = figure.Figure(figsize=(7, 6), layout="constrained")
    axes = fig.add_subplot()
    image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100)
    fig.colorbar(image, label="% of the true class")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(f"{int(np.trace(counts))} of {len(labels)} right")
    if num_classes <= MAX_LABELLED_CLASSES:
        shown, fonts = readable(class_names)
        axes.set_xticks(np.arange(num_classes), shown, rotation=45, ha="right", fontfamily=fonts)
        axes.set_yticks(np.arange(num_classes), shown, fontfamily=fonts)
        for row, column in zip(*np.nonzero(counts), strict=True):
            colour = "white" if percent[row, column] > 50 else "black"
            text = str(counts[row, column])
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    fig.savefig(path, dpi=120)


def wrong_predictions(images, labels, predictions, class_names, path):
    """Draws images with their class and the one that they were taken for.

    Args:
        images: uint8 array `[count, height, width, channels]`.
        labels: Integer labels `[count]`.
        predictions: Predicted labels `[count]`.
        class_names: One name a class.
        path: PNG file to write.
    """
    rows = math.ceil(len(images) / _COLUMNS)
    fig = figure.Figure(figsize=(5.2, 2.1 * rows), layout="constrained")
    names, fonts = readable(class_names)
    names = list(map(_short, names))
    for place, (image, label, predicted) in enumerate(
        zip(images, labels, predictions, strict=True), start=1
    ):
        axes = fig.add_subplot(rows, _COLUMNS, place)
        axes.imshow(image[..., 0] if image.shape[-1] < 3 else image, "gray", vmin=0, vmax=255)
        axes.set_axis_off()
        title = f"{names[label]}\ntaken for {names[predicted]}"
        axes.set_title(title, fontfamily=fonts, fontsize=9)
    fig.savefig(path, dpi=120)


def _short(name):
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def write_to_tensorboard(paths, log_dir, step):
    """Shows PNG files in TensorBoard, each under the name of its file.

    Args:
        paths: PNG files.
        log_dir: Folder for the event file.
        step: Model updates at which the pictures were taken.
    """
    with tf.summary.create_file_writer(str(log_dir)).as_default():
        for path in map(pathlib.Path, paths):
            picture = tf.io.decode_png(path.read_bytes(), channels=3)
            tf.summary.image(path.stem, picture[None], step=step)


def readable(names):
    r"""Names of classes, in any script, as matplotlib is to show them, and the fonts that do.

    Args:
        names: List of names.

    Returns:
        List of strings: letters that no installed font has are escapes, such as `\u732b`, and
        dollars too, a pair of which means a formula. And the list of font families.
    """
    names = [str(name) for name in names]
    families = list(matplotlib.rcParams["font.family"])
    missing = set("".join(names)) - _letters(font_manager.findfont(font_manager.FontProperties()))
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        if font.name.startswith("Last Resort"):  # A box for every letter.
            continue
        if font.style == "normal" and (more := missing & _letters(font.fname)):
            families.append(font.name)
            missing -= more
    escapes = {ord(letter): ascii(letter)[1:-1] for letter in missing} | {ord("$"): r"\$"}
    return [name.translate(escapes) for name in names], families


@functools.cache
def _letters(path):
    """The characters that a font file has, a frozenset; none if matplotlib cannot draw it."""
    try:
        font = font_manager.get_font(path)
    except (OSError, RuntimeError):  # Of coloured bitmaps.
        return frozenset()
    return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()


def _piecewise(x, from_points, to_points):
    """Interpolates linearly, going on with the outer slopes beyond both ends."""
    x = np.asarray(x, float)
    inner = np.interp(x, from_points, to_points)
    slopes = np.diff(to_points) / np.diff(from_points)
    below = np.minimum(x - from_points[0], 0) * slopes[0]
    above = np.maximum(x - from_points[-1], 0) * slopes[-1]
    return inner + below + above


def _round_ticks(last_step, wanted=6):
    """Returns round numbers of steps from 0 to the last one."""
    magnitude = 10 ** math.floor(math.log10(max(last_step / wanted, 1)))
    spacing = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude * wanted >= last_step)
    return np.arange(0, last_step + 1, spacing)
