"""Draws pictures of runs: accuracy, mistakes, bounds on attacks, and individual epsilons.

matplotlib is imported when something is drawn, because most runs of `account` draw nothing. Names
of classes may be in any script, for example Chinese.
"""

import functools
import math

import numpy as np

MAX_LABELLED_CLASSES = 20
_COLUMNS, _LONGEST_NAME = 3, 14
_PRIVATE, _STRATA, _TENTHS = "private data: not to be published", 5, 10


def learning_curve(rows, path, eval_split="test", base_rate=None):
    """Draws accuracy against the epsilon spent, with the model updates on a second axis.

    Without privacy (an infinite epsilon) the updates are the only axis.

    Args:
        rows: List of dicts with `step`, `epsilon`, `accuracy` and, for two classes, `auc`, in the
            order of steps.
        path: PNG file to write.
        eval_split: String, the name of the examples on which accuracy was measured.
        base_rate: Float, the share of their most frequent class, drawn as a line; or None.
    """
    from matplotlib import ticker

    steps, epsilons, accuracy = np.array(
        [[row["step"], row["epsilon"], 100 * row["accuracy"]] for row in rows], float
    ).T
    is_private = bool(np.isfinite(epsilons).all())
    title = f"{accuracy[-1]:.1f}% after {steps[-1]:.0f} updates"
    axes = _axes((7, 4.5), title)
    along = epsilons if is_private else steps
    axes.plot(along, accuracy, marker="o", markersize=3, label="accuracy")
    if all("auc" in row for row in rows):
        axes.plot(along, [100 * row["auc"] for row in rows], marker="o", markersize=3, label="AUC")
    if base_rate is not None:
        axes.axhline(100 * base_rate, color="gray", linestyle="--", label="base rate")
        axes.legend()
    axes.set_xlabel(r"privacy spent, $\varepsilon$" if is_private else "model updates")
    axes.set_ylabel(f"{eval_split} accuracy, %")
    if is_private:
        locator = ticker.MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])
        ticks = locator.tick_values(steps[0], steps[-1])
        ticks = ticks[(steps[0] <= ticks) & (ticks <= steps[-1])]
        top = axes.twiny()
        top.set_xlim(axes.get_xlim())
        top.set_xticks(np.interp(ticks, steps, epsilons), [f"{tick:.0f}" for tick in ticks])
        top.set_xlabel("model updates")
    axes.figure.savefig(path)


def confusion_matrix(labels, predictions, class_names, path):
    """Draws how often each class (row) was taken for each other (column), in percent of the row.

    Args:
        labels: Integer labels `[num_examples]`.
        predictions: Predicted labels `[num_examples]`.
        class_names: List with a name for each class.
        path: PNG file to write.
    """
    num_classes = len(class_names)
    counts = np.zeros([num_classes, num_classes], int)
    np.add.at(counts, (np.asarray(labels), np.asarray(predictions)), 1)
    percent = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)

    axes = _axes((7, 6), f"{np.trace(counts)} of {len(labels)} right")
    axes.grid(False)
    image = axes.imshow(percent, cmap="Blues", vmin=0, vmax=100)
    axes.figure.colorbar(image, label="% of the true class")
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    if num_classes <= MAX_LABELLED_CLASSES:
        names, fonts = readable(class_names)
        axes.set_xticks(range(num_classes), names, rotation=45, ha="right", fontfamily=fonts)
        axes.set_yticks(range(num_classes), names, fontfamily=fonts)
        for row, column in zip(*np.nonzero(counts), strict=True):
            color = "white" if percent[row, column] > 50 else "black"
            place = dict(ha="center", va="center", color=color, fontsize=8)
            axes.text(column, row, str(counts[row, column]), **place)
    axes.figure.savefig(path)


def reliability(labels, probabilities, name, path, with_thresholds=False):
    """Draws the share of a class at each predicted probability, and a histogram of these.

    Args:
        labels: Labels `[num_examples]`, 1 for the class and 0 for the other.
        probabilities: Probabilities of the class, `[num_examples]`.
        name: Name of the class.
        path: PNG file to write.
        with_thresholds: Bool, whether precision and recall are drawn against the threshold. Use
            this only for public examples, because a threshold that is read off the picture depends
            on them.
    """
    from sklearn import calibration, metrics

    tenths = dict(pos_label=1, n_bins=_TENTHS, strategy="quantile")
    shares, means = calibration.calibration_curve(labels, probabilities, **tenths)
    largest = max(1.05 * shares.max(), 1.05 * means.max(), 1e-9)
    [name], fonts = readable([f'"{name}"'])
    title = f"mean probability of {name} {np.mean(probabilities):.3g}; share {np.mean(labels):.3g}"
    axes = _axes((7, 4.5 + 3.5 * with_thresholds))
    axes.set_title(title, fontfamily=fonts)
    axes.plot([0, largest], [0, largest], color="gray", linestyle="--", label="calibrated")
    axes.plot(means, shares, marker="o", markersize=4, label="tenths of the examples")
    axes.set(xlim=(0, largest), ylim=(0, largest), xlabel="probability", ylabel="observed share")
    axes.legend(loc="upper left")
    counts = axes.twinx()
    counts.hist(probabilities, np.linspace(0, largest, 41), color="gray", alpha=0.3)
    counts.set_ylabel("examples (bars)")
    if with_thresholds and np.any(labels):
        *rates, thresholds = metrics.precision_recall_curve(labels, probabilities)
        below = axes.figure.add_subplot(212)
        for rate, label in zip(rates, ("precision", "recall"), strict=True):
            below.step(thresholds, rate[:-1], where="pre", label=label)
        below.set_xlabel("--threshold")
        below.legend()
        for part in (axes, counts):
            part.set_subplotspec(below.get_gridspec()[0])
    axes.figure.savefig(path)


def wrong_predictions(images, labels, predictions, class_names, path):
    """Draws images with their class and the predicted class.

    Args:
        images: uint8 array `[count, height, width, channels]`.
        labels: Integer labels `[count]`.
        predictions: Predicted labels `[count]`.
        class_names: List with a name for each class.
        path: PNG file to write.
    """
    from matplotlib import figure

    names = [f"{n[:11]}..." if len(n) > _LONGEST_NAME else n for n in map(str, class_names)]
    names, fonts = readable(names)
    rows = math.ceil(len(images) / _COLUMNS)
    fig = figure.Figure(figsize=(5.2, 2.1 * rows), layout="constrained", dpi=120)
    for index, image in enumerate(images):
        axes = fig.add_subplot(rows, _COLUMNS, index + 1)
        axes.imshow(image[..., 0] if image.shape[-1] < 3 else image, "gray", vmin=0, vmax=255)
        axes.set_axis_off()
        title = f"{names[labels[index]]}\ntaken for {names[predictions[index]]}"
        axes.set_title(title, fontfamily=fonts, fontsize=9)
    fig.savefig(path)


def attack_curve(curves, path, measured=None, axes=None):
    """Draws the largest true positive rate of an attack against its false positive rate.

    Args:
        curves: Dict from names of runs to `tfdpx.accounting.AttackBounds`.
        path: PNG file to write.
        measured: Dict from names of real attacks to pairs of arrays [n], false and true positive
            rates; or None. The rates of an attack on private data are private.
        axes: matplotlib axes to draw on, or None for new ones. Their whole figure is written.
    """
    names, fonts = readable([*curves, *(measured or {})])
    axes = axes or _axes((6, 5.5))
    rates = np.unique([*np.geomspace(1e-6, 1e-2, 100), *np.linspace(0, 1, 201)])
    lines = [(rates, bounds.true_positive_rate(rates), "-") for bounds in curves.values()]
    lines += [(*pair, ".:") for pair in (measured or {}).values()]
    for name, (false_positives, true_positives, style) in zip(names, lines, strict=True):
        percent = 100 * np.array([false_positives, true_positives])
        axes.plot(*percent, style, label=name)
    axes.plot([0, 100], [0, 100], color="gray", linestyle="--", label="guessing")
    axes.set(xlim=(-1, 101), ylim=(-1, 101), aspect="equal")
    axes.set_xlabel("absent ones that are taken for present, %")
    axes.set_ylabel("present ones that are recognised, %")
    axes.legend(loc="lower right", prop={"family": fonts})
    axes.figure.savefig(path)


# Figures 1, 2, 5, 6 and 7 of Yu et al. 2022. They show private data.


def individual_histogram(epsilons, worst, path):
    """Draws a histogram of the epsilons of examples (Figure 1).

    Args:
        epsilons: Float array [n], at most `worst`.
        worst: Float, the epsilon that holds for every example.
        path: PNG file to write.
    """
    axes = _axes((6, 4), _PRIVATE)
    axes.hist(epsilons, bins=np.linspace(0, worst, 41))
    axes.axvline(np.mean(epsilons), color="black", linestyle="--", label="mean")
    axes.axvline(worst, color="black", label="of the plan")
    axes.set_xlabel(r"individual $\varepsilon$")
    axes.set_ylabel("examples")
    axes.legend()
    axes.figure.savefig(path)


def individual_norms(steps, norms, path):
    """Draws the norms of five groups of examples, by their mean over the training (Figure 2).

    Args:
        steps: Int array [t].
        norms: Float array [t, n], fractions of the clip.
        path: PNG file to write.
    """
    order = np.argsort(norms.mean(axis=0), kind="stable")
    axes = _axes((6, 4), _PRIVATE)
    for number, part in enumerate(np.array_split(order, _STRATA)):
        label = f"{20 * number} to {20 * (number + 1)}%"
        axes.plot(steps, norms[:, part].mean(axis=1), marker="o", markersize=3, label=label)
    axes.set_xlabel("model updates")
    axes.set_ylabel("mean gradient norm over the clip")
    axes.set_ylim(0, 1.03)
    axes.legend(title="examples, by mean norm")
    axes.figure.savefig(path)


def individual_losses(epsilons, losses, path):
    """Draws the mean epsilon of tenths of the examples, by loss (Figure 5).

    Args:
        epsilons: Float array [n].
        losses: Dict from a name, for example "loss at the end", to a float array [n].
        path: PNG file to write.
    """
    axes = _axes((6, 4), _PRIVATE)
    for name, values in losses.items():
        parts = np.array_split(np.argsort(values, kind="stable"), _TENTHS)
        means = np.array([[values[part].mean(), epsilons[part].mean()] for part in parts])
        label = f"{name}; r = {np.corrcoef(epsilons, values)[0, 1]:.2f}"
        axes.plot(*means.T, marker="o", label=label)
    axes.set_xscale("log")
    axes.set_xlabel("mean loss of a tenth of the examples")
    axes.set_ylabel(r"mean individual $\varepsilon$")
    axes.legend()
    axes.figure.savefig(path)


def individual_groups(groups, value, label, path):
    """Draws the mean epsilon of groups as bars, and another value as a line (Figures 6 and 7).

    Args:
        groups: List of dicts from `individual.group_report`, in the order to draw.
        value: String, the entry to draw as a line.
        label: String, the name of that entry.
        path: PNG file to write.
    """
    names, fonts = readable([group["name"] for group in groups])
    epsilons = [group["mean_epsilon"] for group in groups]
    axes = _axes((6, 4), _PRIVATE)
    axes.bar(range(len(names)), epsilons, color="tab:blue", alpha=0.6)
    axes.set_ylim(0.9 * min(epsilons), 1.05 * max(epsilons))
    axes.set_ylabel(r"mean individual $\varepsilon$ (bars)")
    rotation = 45 if max(map(len, names)) > 3 else 0
    axes.set_xticks(range(len(names)), names, rotation=rotation, fontfamily=fonts)
    right = axes.twinx()
    right.plot([group[value] for group in groups], color="tab:red", marker="o")
    right.set_ylabel(label, color="tab:red")
    axes.figure.savefig(path)


def readable(names):
    r"""Returns names for matplotlib to show, and the fonts with their letters.

    Args:
        names: List of names.

    Returns:
        List of strings, and a list of font families. Letters without an installed font become
        escapes, for example `\u732b`. Dollar signs do, too, because a pair of them means a formula.
    """
    import matplotlib
    from matplotlib import font_manager

    names = [str(name) for name in names]
    families = list(matplotlib.rcParams["font.family"])
    missing = set("".join(names)) - _letters(font_manager.findfont(font_manager.FontProperties()))
    for font in font_manager.fontManager.ttflist:
        if not missing:
            break
        # The font "Last Resort" only has boxes in place of letters.
        if font.style != "normal" or font.name.startswith("Last Resort"):
            continue
        if letters := missing & _letters(font.fname):
            families.append(font.name)
            missing -= letters
    escapes = {ord(letter): ascii(letter)[1:-1] for letter in missing} | {ord("$"): r"\$"}
    return [name.translate(escapes) for name in names], families


@functools.cache
def _letters(path):
    """Returns the characters that a font file has; none if matplotlib cannot draw it."""
    from matplotlib import font_manager

    try:
        font = font_manager.get_font(path)
    except (OSError, RuntimeError):  # A font of coloured bitmaps.
        return frozenset()
    return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()


def _axes(size, title=""):
    """Returns the axes of a new figure of `size`, a pair of inches."""
    from matplotlib import figure

    axes = figure.Figure(figsize=size, layout="constrained", dpi=120).add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return axes
