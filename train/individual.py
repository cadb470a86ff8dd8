"""Releases and writes the individual epsilons of a run of `classify`.

An individual epsilon is the privacy loss of one example, and is private data. So individual
epsilons are written to a folder that only its owner can read. TensorBoard and the report show only
noisy statistics of them.
"""

import keras
import numpy as np

from tfdpx import _files as files
from tfdpx.accounting.ledger import Ledger
from tfdpx.report import measure, pictures

FOLDER = "individual_PRIVATE"
_NOTICE = """PRIVATE DATA, like the data set itself.

No privacy guarantee covers these files and pictures. Do not publish them. You may tell the owner of
an image its epsilon. For the training images, arrays.npz has names, labels, epsilons, losses, and
the last gradient norms divided by the clip. For held-out images it has names, labels and losses.

All epsilons in files, pictures and released statistics cover only the training. A release of
statistics (--individual_release) costs every image more; record.json counts both.
"""


def losses_and_labels(model, examples):
    """Returns two arrays [n]: the cross-entropies of the examples, and their labels.

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
    """Returns the individual epsilons, and noisy statistics that can be published.

    The release of the statistics also costs privacy, which increases every epsilon. The returned
    epsilons do not include this increase: they are read before the release.

    Args:
        accountant: The `IndividualAccountant` of the run.
        noise_multiplier: Float, the noise multiplier of the statistics; None for no statistics.

    Returns:
        Three values: the individual epsilons of the training, a private float64 array [n]; a dict
        of statistics for the record; and the `Ledger` of the release. Without a noise multiplier,
        the dict and the ledger are empty.
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


def write(epsilons, worst, norms, model, data, workdir):
    """Writes arrays and pictures to `workdir / FOLDER`.

    Args:
        epsilons: float64 array [n], returned by `release`.
        worst: Float, an upper bound on `epsilons`: the epsilon of the training, without the release
            of statistics.
        norms: Float array [n], the last gradient norm of each example divided by the clip.
        model: The trained `keras.Model`.
        data: `images.ImageData`.
        workdir: `pathlib.Path`.

    Returns:
        Path of the folder.
    """
    folder = workdir / FOLDER
    files.make_folder(folder)
    (folder / "README.txt").write_text(_NOTICE)
    losses, labels = losses_and_labels(model, (data.train_x, data.train_y))
    held_out_losses, held_out_labels = losses_and_labels(model, data.eval_examples)
    class_names = np.array(data.class_names)
    np.savez(
        folder / "arrays.npz", notice=_NOTICE, names=data.names_of("train"),
        labels=class_names[labels], epsilons=epsilons, norms=norms, losses=losses,
        held_out_names=data.names_of("eval"), held_out_labels=class_names[held_out_labels],
        held_out_losses=held_out_losses,
    )  # fmt: skip
    means = [
        {"name": name, "mean_epsilon": np.mean(epsilons[labels == label])}
        for label, name in enumerate(data.class_names)
        if np.any(labels == label)
    ]
    pictures.individual_histogram(epsilons, worst, folder / "histogram.png")
    means.sort(key=lambda group: group["mean_epsilon"])
    pictures.individual_groups(means, folder / "groups.png")
    return folder
