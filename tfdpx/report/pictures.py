"""Draws pictures of runs: accuracy, mistakes, bounds on attacks, and individual epsilons.

matplotlib is imported only when a picture is drawn, because some programs never draw. Names of
classes may be in any script, for example Chinese.
"""

import functools
import math

import numpy as np

MAX_LABELLED_CLASSES = 20
_COLUMNS, _LONGEST_NAME = 3, 14
_PRIVATE, _TENTHS = "private data: not to be published", 10


def learning_curve(rows, path, eval_split="test", base_rate=None):
    """Draws accuracy against the epsilon spent, with the number of updates on a second axis.

    Without privacy (an infinite epsilon), accuracy is drawn only against the number of updates.

    Args:
        rows: List of dicts with `step`, `epsilon`, `accuracy` and, for two classes, `auc`, in the
            order of steps.
        path: PNG file to write.
        eval_split: String, the split of the examples on which accuracy was measured.
        base_rate: Float, the share of the most frequent class among these examples. It is drawn as
            a line; None draws no line.
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
    """Draws the share of each true class (row) that was predicted as each class (column).

    Args:
        labels: Integer labels `[num_examples]`.
        predictions: Predicted labels `[num_examples]`.
        class_names: List with a name for each class.
        path: PNG file to write.
    """
    from sklearn import metrics

    are_few = len(class_names) <= MAX_LABELLED_CLASSES
    axes = _axes((7, 6), f"{np.sum(np.equal(labels, predictions))} of {len(labels)} right")
    axes.grid(False)
    names, fonts = readable(class_names)
    metrics.ConfusionMatrixDisplay.from_predictions(
        *(labels, predictions),
        labels=range(len(names)),
        display_labels=names,
        normalize="true",
        include_values=are_few,
        values_format=".0%",
        xticks_rotation=45,
        cmap="Blues",
        ax=axes,
        im_kw={"vmin": 0, "vmax": 1},
        text_kw={"fontsize": 8},
    )
    axes.tick_params(labelfontfamily=fonts)
    if not are_few:
        axes.set(xticks=[], yticks=[])
    axes.figure.savefig(path)


def calibration(labels, probabilities, name, path, with_thresholds=False):
    """Draws how often a class occurs at each predicted probability.

    The picture also has a histogram of the predicted probabilities.

    Args:
        labels: Labels `[num_examples]`, 1 for the class and 0 for the other.
        probabilities: Probabilities of the class, `[num_examples]`.
        name: Name of the class.
        path: PNG file to write.
        with_thresholds: Bool, whether precision and recall are also drawn against the threshold.
            Use True only for public examples: a threshold that is chosen from the picture depends
            on the examples.
    """
    from sklearn import metrics
    from sklearn.calibration import CalibrationDisplay

    [name], fonts = readable([f'"{name}"'])
    title = f"mean probability of {name} {np.mean(probabilities):.3g}; share {np.mean(labels):.3g}"
    axes = _axes((7, 4.5 + 3.5 * with_thresholds))
    axes.set_title(title, fontfamily=fonts)
    tenths = dict(pos_label=1, n_bins=_TENTHS, strategy="quantile", name="tenths of the examples")
    shown = CalibrationDisplay.from_predictions(labels, probabilities, **tenths, ax=axes)
    largest = max(1.05 * shown.prob_true.max(), 1.05 * shown.prob_pred.max(), 1e-9)
    axes.set(xlim=(0, largest), ylim=(0, largest))
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
    """Draws images with their true class and their predicted class.

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


def attack_curve(bounds, path):
    """Draws the largest true positive rate of an attack against its false positive rate.

    Args:
        bounds: `tfdpx.accounting.AttackBounds`.
        path: PNG file to write.
    """
    axes = _axes((6, 5.5))
    rates = np.unique([*np.geomspace(1e-6, 1e-2, 100), *np.linspace(0, 1, 201)])
    axes.plot(100 * rates, 100 * bounds.true_positive_rate(rates), label="no attack is above")
    axes.plot([0, 100], [0, 100], color="gray", linestyle="--", label="guessing")
    axes.set(xlim=(-1, 101), ylim=(-1, 101), aspect="equal")
    axes.set_xlabel("absent ones that are taken for present, %")
    axes.set_ylabel("present ones that are recognised, %")
    axes.legend(loc="lower right")
    axes.figure.savefig(path)


def individual_histogram(epsilons, worst, path):
    """Draws a histogram of individual epsilons (Yu et al. 2022, Figure 1). Do not publish it.

    Args:
        epsilons: Float array [n] of values up to `worst`.
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


def individual_groups(groups, path):
    """Draws the mean epsilon of each group (Yu et al. 2022, Figure 6). Do not publish the picture.

    Args:
        groups: List of dicts with `name` and `mean_epsilon`, in the order to draw.
        path: PNG file to write.
    """
    names, fonts = readable([group["name"] for group in groups])
    axes = _axes((6, 4), _PRIVATE)
    axes.bar(range(len(names)), [group["mean_epsilon"] for group in groups])
    axes.set_ylabel(r"mean individual $\varepsilon$")
    rotation = 45 if max(map(len, names)) > 3 else 0
    axes.set_xticks(range(len(names)), names, rotation=rotation, fontfamily=fonts)
    axes.figure.savefig(path)


def readable(names):
    r"""Returns names that matplotlib can show, and the fonts that have the letters of the names.

    Args:
        names: List of names.

    Returns:
        List of strings, and a list of font families. Letters that no installed font has are
        replaced by escapes, for example `\u732b`. Dollar signs are escaped, too, because a pair of
        them marks a formula.
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
    """Returns the set of characters in a font file, empty if matplotlib cannot draw the font."""
    from matplotlib import font_manager

    try:
        font = font_manager.get_font(path)
    except (OSError, RuntimeError):  # For example, a font of coloured bitmaps.
        return frozenset()
    return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()


def _axes(size, title=""):
    """Returns the axes of a new figure. `size` is its width and height in inches."""
    from matplotlib import figure

    axes = figure.Figure(figsize=size, layout="constrained", dpi=120).add_subplot()
    axes.set_title(title)
    axes.grid(alpha=0.3)
    return axes
