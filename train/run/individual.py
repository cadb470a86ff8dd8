"""Individual epsilons of a run of `classify`: what is kept as it trains, and what is written.

All of it is private data, one number an example, and goes to a folder of its own that its owner
alone may read. Nothing of it goes to TensorBoard or into the report, but for released statistics.
"""

import dataclasses
import json
import os

import keras
import numpy as np
import scipy.special

import tfdpx
from tfdpx import _files as files
from tfdpx.accounting.ledger import Ledger
from tfdpx.train.report import individual_pictures as pictures
from tfdpx.train.report.groups import group_report
from tfdpx.train.run import evaluation
from tfdpx.training.budget import steps_taken
from tfdpx.training.session import after_save

FOLDER = "individual_PRIVATE"
_NOTICE = """PRIVATE DATA, like the data set itself.

What is in this folder was computed for each training image, and no privacy guarantee covers it.
Do not publish it, nor the pictures. An image's epsilon may be given to whom it belongs.

    arrays.npz    epsilons [n], and labels [n], losses [reports, n] and norms [reports, n] over the
                  clip, of the training images in their order; steps [reports]; and held-out losses
    groups.json   mean epsilon, loss and success of a membership attack of each class
"""


def accountant(settings, plan):
    """The `IndividualAccountant` that the settings ask for, or None."""
    if not settings.individual:
        return None
    return tfdpx.accounting.IndividualAccountant(
        plan, settings.individual_rounding, settings.individual_refreshes
    )


class History(keras.callbacks.Callback):
    """Keeps norms and losses of all training examples after every Keras epoch.

    A pass over these takes as long as the forward part of an epoch of training.

    Args:
        data: `images.ImageData`.
        path: File to keep them in, so that a resumed run has those before it.
    """

    def __init__(self, data, path):
        super().__init__()
        self._data, self._path = data, path
        self.steps, self.norms, self.losses = [], [], []

    def on_train_begin(self, logs=None):
        """Reads what is there, up to where the run continues."""
        del logs
        if self._path.exists():
            with np.load(self._path) as kept:
                count = int(np.searchsorted(kept["steps"], self._step(), side="right"))
                self.steps = list(kept["steps"][:count])
                self.norms, self.losses = list(kept["norms"])[:count], list(kept["losses"])[:count]

    def on_epoch_end(self, epoch, logs=None):
        """Measures and writes."""
        del epoch, logs
        optimizer = self.model.optimizer
        self.steps.append(self._step())
        self.norms.append(optimizer.individual.norms().astype("float32"))
        examples = (self._data.train_x, self._data.train_y)
        self.losses.append(losses(self.model, examples))
        after_save(self.model, self._write)

    def _write(self):
        with files.replacing(self._path) as fresh:
            np.savez(fresh, steps=self.steps, norms=self.norms, losses=self.losses)

    def _step(self):
        return steps_taken(self.model.optimizer)


def losses_and_labels(model, examples):
    """The cross-entropy of each example, float32 [n], and its label, int64 [n], in their order.

    Args:
        model: A `keras.Model` from images to logits.
        examples: Tuple of the arguments of `tfdpx.sampling.examples.as_examples`.
    """
    losses, labels = [], []
    for logits, y in evaluation.predicted(model, examples):
        log_probabilities = scipy.special.log_softmax(logits, axis=1)
        losses.append(-np.take_along_axis(log_probabilities, y[:, np.newaxis], axis=1)[:, 0])
        labels.append(y)
    return np.concatenate(losses), np.concatenate(labels)


def losses(model, examples):
    """The losses of `losses_and_labels` alone."""
    return losses_and_labels(model, examples)[0]


def release(each, noise_multiplier):
    """Statistics for the record, a dict, and their `Ledger`; empty if no noise multiplier asks.

    Args:
        each: The `IndividualAccountant` of the run.
        noise_multiplier: Float or None.
    """
    if noise_multiplier is None:
        return {}, Ledger()
    found = each.release(noise_multiplier=noise_multiplier)
    quantiles = {str(share): value for share, value in found.quantiles.items()}
    released = {
        "individual_mean": found.mean,
        "individual_quantiles": quantiles,
        "individual_release_epsilon": found.epsilon,
    }
    return released, found.ledger


def write(epsilons, worst, history, model, data, workdir):
    """Writes arrays, pictures and the report of the classes to `workdir / FOLDER`.

    Args:
        epsilons: float64 array [n], of the training alone.
        worst: Float, the plan's epsilon after it.
        history: `History`.
        model: The trained `keras.Model`.
        data: `images.ImageData`.
        workdir: `pathlib.Path`.

    Returns:
        Path of the folder.
    """
    folder = workdir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
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
    at_the_end = group_report(
        epsilons, final, names[labels],
        held_out_losses=held_out, held_out_groups=names[held_out_labels],
    )  # fmt: skip
    on_average = group_report(epsilons, mean, names[labels])
    reports = {"loss at the end": at_the_end, "loss on average": on_average}
    (folder / "groups.json").write_text(
        json.dumps({n: dataclasses.asdict(report) for n, report in reports.items()}, indent=1)
    )
    pictures.histogram(epsilons, worst, folder / "histogram.png")
    if len(history.steps) > 1:
        pictures.strata(history.steps, np.array(history.norms), folder / "norms.png")
    found = {"at the end": final, "on average": mean}
    pictures.loss_against_epsilon(epsilons, found, folder / "loss.png")
    pictures.groups(on_average, folder / "groups.png")
    pictures.attacks(at_the_end, folder / "attacks.png")
    return folder
