"""Tracks, releases and writes the individual epsilons of a run of `classify`.

Everything is private data: there is one number for each example, and is written to a folder
that only its owner can read. TensorBoard and the report get released statistics only.
"""

import csv
import json

import keras
import numpy as np

import tfdpx
from tfdpx import _files as files
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import plain
from tfdpx.report import measure, pictures
from tfdpx.train.errors import UserError, printable
from tfdpx.training.budget import steps_taken
from tfdpx.training.session import after_save

FOLDER = "individual_PRIVATE"
_NOTICE = """PRIVATE DATA, like the data set itself.

The files in this folder were computed for each training image, and no privacy guarantee covers
them. Do not publish them, nor the pictures. An image's epsilon may be given to its owner.

    arrays.npz    epsilons [n], and labels [n], losses [reports, n] and norms [reports, n] over the
                  clip, of the training images in their order; steps [reports]; and held-out losses
    groups.json   mean epsilon, loss and success of a membership attack of each class, or of each
                  group of --individual_groups

All epsilons, in files, pictures and released statistics, are of the training alone. A release of
statistics (--individual_release) costs every image more, and record.json has both together.
"""


def accountant(settings, plan):
    """Returns the `IndividualAccountant` that the settings ask for, or None."""
    if not settings.individual:
        return None
    rounding, refreshes = settings.individual_rounding, settings.individual_refreshes
    return tfdpx.accounting.IndividualAccountant(plan, rounding, refreshes)


class History(keras.callbacks.Callback):
    """Stores norms and losses of all training examples after every Keras epoch.

    This takes as long as the forward passes of an epoch of training.

    Args:
        data: `images.ImageData`.
        path: `pathlib.Path` of the file that stores them for a resumed run.

    Attributes:
        steps: List of ints, the number of updates at each report.
        norms: List of float32 arrays [n], as fractions of the clip.
        losses: List of float32 arrays [n].
    """

    def __init__(self, data, path):
        super().__init__()
        self._data, self._path = data, path
        self.steps, self.norms, self.losses = [], [], []

    def on_train_begin(self, logs=None):
        """Reads the file up to the update at which the run continues."""
        del logs
        if self._path.exists():
            with np.load(self._path) as saved:
                steps = steps_taken(self.model.optimizer)
                count = int(np.searchsorted(saved["steps"], steps, side="right"))
                self.steps, self.norms, self.losses = (
                    list(saved[name][:count]) for name in ("steps", "norms", "losses")
                )

    def on_epoch_end(self, epoch, logs=None):
        """Measures and writes."""
        del epoch, logs
        optimizer = self.model.optimizer
        self.steps.append(steps_taken(optimizer))
        self.norms.append(optimizer.individual.norms().astype("float32"))
        examples = (self._data.train_x, self._data.train_y)
        self.losses.append(losses_and_labels(self.model, examples)[0])
        after_save(self.model, self._write)

    def _write(self):
        with files.replacing(self._path) as fresh:
            np.savez(fresh, steps=self.steps, norms=self.norms, losses=self.losses)


def losses_and_labels(model, examples):
    """Returns the cross-entropy of each example and its label, two arrays [n] in their order.

    Args:
        model: A `keras.Model` from images to logits.
        examples: Tuple of the arguments of `tfdpx.sampling.examples.as_examples`.
    """
    losses, labels = [], []
    for logits, y in measure.predicted(model, examples):
        loss = keras.ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
        losses.append(np.asarray(loss))
        labels.append(y)
    return np.concatenate(losses), np.concatenate(labels)


def release(accountant, noise_multiplier):
    """Returns the individual epsilons, and statistics of them that can be published.

    It does both: a release is charged to every example: after it, the epsilons would be
    larger than the epsilons in the statistics.

    Args:
        accountant: The `IndividualAccountant` of the run.
        noise_multiplier: Float, the noise of the statistics, or None for no statistics.

    Returns:
        Epsilons of only the training, float64 array [n], private; a dict of statistics for the
        record; and their `Ledger`. The last two are empty without a noise multiplier.
    """
    epsilons = accountant.epsilon()
    if noise_multiplier is None:
        return epsilons, {}, Ledger()
    statistics = accountant.release(noise_multiplier=noise_multiplier)
    quantiles = {str(share): value for share, value in statistics.quantiles.items()}
    released = {
        "individual_mean": statistics.mean,
        "individual_quantiles": quantiles,
        "individual_release_epsilon": statistics.epsilon,
    }
    return epsilons, released, statistics.ledger


def read_groups(path, data):
    """Returns the groups of the training images and of those to measure on, two arrays of strings.

    Args:
        path: CSV file of rows `image,group`, with or without a header; None for classes.
        data: `images.ImageData`; `names_of` tells how images are called.

    Raises:
        UserError: If the file cannot be read, or an image is missing.
    """
    if path is None:
        return None
    try:
        with open(path, newline="", encoding="utf-8") as file:
            groups = {row[0]: row[1] for row in csv.reader(file) if len(row) > 1}
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read --individual_groups={path}: {error}.") from error
    names = [data.names_of(part) for part in ("train", "eval")]
    if missing := [name for part in names for name in part if name not in groups]:
        raise UserError(
            "Flag --individual_groups must name the group of each image in rows image,group. "
            f"Received: --individual_groups={path}, in which {len(missing)} images are missing, "
            f"for example {printable(missing[0])}."
        )
    return [np.array([groups[name] for name in part]) for part in names]


def write(epsilons, worst, history, model, data, workdir, groups=None):
    """Writes arrays, pictures and the report of the classes to `workdir / FOLDER`.

    Args:
        epsilons: float64 array [n], returned by `release`.
        worst: Float, the epsilon of the training without a release; it holds for every example.
        history: `History`.
        model: The trained `keras.Model`.
        data: `images.ImageData`.
        workdir: `pathlib.Path`.
        groups: Returned by `read_groups`.

    Returns:
        Path of the folder.
    """
    folder = workdir / FOLDER
    files.make_folder(folder)
    (folder / "README.txt").write_text(_NOTICE)
    final, labels = losses_and_labels(model, (data.train_x, data.train_y))
    held_out, held_out_labels = losses_and_labels(model, data.eval_examples)
    mean = np.mean(history.losses, axis=0) if history.losses else final
    np.savez(
        folder / "arrays.npz",
        notice=_NOTICE, epsilons=epsilons, labels=labels, final_losses=final,
        steps=history.steps, norms=history.norms, losses=history.losses,
        held_out_losses=held_out, held_out_labels=held_out_labels,
    )  # fmt: skip
    names = np.array(data.class_names)
    groups, held_out_groups = groups or (names[labels], names[held_out_labels])
    at_the_end = group_report(epsilons, final, groups, held_out, held_out_groups)
    on_average = group_report(epsilons, mean, groups)
    reports = {"loss at the end": at_the_end, "loss on average": on_average}
    (folder / "groups.json").write_text(json.dumps(plain(reports), indent=1))
    pictures.individual_histogram(epsilons, worst, folder / "histogram.png")
    pictures.individual_groups(on_average["groups"], folder / "groups.png")
    return folder


def group_report(epsilons, losses, groups, held_out_losses=None, held_out_groups=None):
    """Compares groups of examples in privacy, in loss, and in the success of an attack.

    After Yu et al. 2022, section 5. All of it is a function of private data.

    Args:
        epsilons: Float array [num_examples], of `IndividualAccountant.epsilon`.
        losses: Float array [num_examples], of the same examples.
        groups: Array [num_examples] of ints or strings, for example classes.
        held_out_losses: Optional float array [n] of examples that were not trained on, for the
            attack. Losses of another model than the one of `epsilons` show more: an attack
            against a private one has next to no success.
        held_out_groups: Array [n] of their ids.

    Returns:
        Dict of `correlation` (Pearson's, of epsilon and loss over all examples; NaN where one of
        them is constant), `group_correlation` (of the means of groups) and `groups`: a list of
        dicts, by mean loss, of `name`, `count`, `mean_epsilon`, `mean_loss`, `correlation` within
        the group, and `attack_success` (see `membership_success`; None without two held-out
        losses).
    """
    reports = []
    for name in np.unique(groups):
        rows = groups == name
        held_out = () if held_out_losses is None else held_out_losses[held_out_groups == name]
        can_attack = min(np.sum(rows), len(held_out)) > 1
        reports.append(
            {
                "name": name.item(),
                "count": int(np.sum(rows)),
                "mean_epsilon": float(np.mean(epsilons[rows])),
                "mean_loss": float(np.mean(losses[rows])),
                "correlation": _correlation(epsilons[rows], losses[rows]),
                "attack_success": membership_success(losses[rows], held_out)
                if can_attack
                else None,
            }
        )
    reports.sort(key=lambda report: report["mean_loss"])
    means = ([report[name] for report in reports] for name in ("mean_epsilon", "mean_loss"))
    return {
        "groups": reports,
        "correlation": _correlation(epsilons, losses),
        "group_correlation": _correlation(*means),
    }


def membership_success(members, others, splits=100, seed=0):
    """Returns the success of the attack that takes examples of low loss for members.

    After Yu et al. 2022, section 5.3, with as many members as others. The threshold that is best on
    one half of these is tested on the other half.

    Args:
        members: Float array [n] of losses of examples that were trained on; at least two.
        others: Float array [m] of losses of examples that were not; at least two.
        splits: Int, number of random choices and halves to average over.
        seed: Int, the seed of these.

    Returns:
        Float in [0, 1]; 0.5 is guessing.
    """
    count = min(len(members), len(others))
    generator, half = np.random.default_rng(seed), count // 2
    successes = []
    for _ in range(splits):
        inside = generator.permutation(members)[:count]
        outside = generator.permutation(others)[:count]
        losses = np.unique([-np.inf, *inside[:half], *outside[:half]])
        taken_right = np.searchsorted(np.sort(inside[:half]), losses, side="right")
        taken_wrong = np.searchsorted(np.sort(outside[:half]), losses, side="right")
        best = np.argmax(taken_right - taken_wrong)
        threshold = losses[best : best + 2].mean()  # Half way to the next loss.
        right = np.mean(inside[half:] <= threshold) + np.mean(outside[half:] > threshold)
        successes.append(right / 2)
    return float(np.mean(successes))


def _correlation(a, b):
    """Returns Pearson's correlation; NaN where it is undefined."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
