"""Tunes privately: keeps the best of a random number of runs at random points.

Papernot and Steinke 2021 (`tfdpx.accounting.selection`). All runs train on the same images, with
the same noise, sampling and number of updates. The score of a run is the noisy number of training
images that it classifies correctly. One image changes that number by 1, so no image has to be held
out.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
import secrets
import shutil
import tempfile

import keras
import numpy as np

from tfdpx.accounting import calibration, selection
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.report import measure, page, report
from tfdpx.report.spent import MODEL
from tfdpx.train import defaults
from tfdpx.train.data import images
from tfdpx.train.data.folder import NONE
from tfdpx.train.errors import UserError
from tfdpx.train.output import print_record
from tfdpx.train.run_flags import DATA_DIR, DOWNLOAD
from tfdpx.train.settings import PRIVACY, resolve
from tfdpx.train.start_from import Start, ledger_on

# The settings that the guarantee requires.
_NEEDED = dict(
    private=[True], sampling=["poisson"], noise_multiplier=[None], seed=[None], user=[None, NONE],
    individual=[False], validation=[0.0],
)  # fmt: skip
# Settings that determine the training images and the releases of a run.
_SHARED = (
    "dataset", "test_fraction", "test_seed", "skip_broken", "eval_split", "epsilon", "delta",
    "batch_size", "steps", "accountant",
)  # fmt: skip
# The noise of a score, as a multiple of the noise of one release with the whole budget.
_SCORE = 4.0


def tune(runs, mean, workdir, train):
    """Trains, keeps the best run in `<workdir>/best`, and deletes all others.

    Guarantee: (epsilon, delta)-differential privacy of that folder, but not of the time that this
    took, under adding or removing one training image. The number of runs is not published. The
    epsilon in the files follows from the ledger that the best run wrote.

    Args:
        runs: List of `sweep.Run`, the points of the grid.
        mean: Float > 1, the mean number of runs.
        workdir: `pathlib.Path`.
        train: Function that trains a `sweep.Run` in a new folder. It returns the folder of the
            finished run, and raises UserError if the run fails.

    Returns:
        The report, a dict.

    Raises:
        UserError: If a setting is not allowed, points differ in their images or releases, or a run
            fails or makes other releases.
    """
    try:
        selection.check_mean(mean)
    except ValueError as error:
        raise UserError(
            "Flag --private_tuning must be a number above 1, up to 1000. Received: "
            f"--private_tuning={mean:g}."
        ) from error
    if (workdir / "best").exists():
        raise UserError(f"The folder --workdir={workdir} holds a tuned run. Choose another.")
    starts = [Start(run.settings) for run in runs]
    points = [
        dataclasses.replace(run.settings, init_from=start.settings.init_from)
        for run, start in zip(runs, starts, strict=True)
    ]
    data = _load(points[0])
    num_examples, about = data.num_train, (tuple(data.image_shape), data.num_classes)
    points = [
        defaults.complete(point, num_examples, sketch=lambda name, s=start: s.sketch(name, *about))[
            0
        ]
        for point, start in zip(points, starts, strict=True)
    ]
    _check(points)
    updates, score = _entries(points[0], num_examples, mean)
    trainings = tuple(dict.fromkeys(itertools.chain(*(start.seen for start in starts))))
    before = ledger_on(trainings, points[0].dataset)
    with tempfile.TemporaryDirectory(prefix=".private_tuning-", dir=workdir) as folder:
        top, best = -math.inf, pathlib.Path(folder, "best")
        for _ in range(selection.draw_runs(mean)):
            place = secrets.randbelow(len(runs))
            run = _at_noise(runs[place], points[place], updates.noise_multiplier)
            trained = train(run, pathlib.Path(folder, "run"))
            entry = _entry_of(trained, before, updates)
            right = _count_right(trained, points[place])
            right = measure.noisy_count(right, score.noise_multiplier)
            if right > top:
                top, best_entry, point = right, entry, run.point
                shutil.rmtree(best, ignore_errors=True)
                trained.rename(best)
            shutil.rmtree(pathlib.Path(folder, "run"))
        search = {"best": point, "mean_runs": mean, "noisy_train_accuracy": top / num_examples}
        ledger = before + Ledger.selected([best_entry, score], mean, points[0].delta)
        record = _write(best, ledger, trainings, search)
        best.rename(workdir / "best")
    return {**record.view(), "workdir": str(workdir / "best")}


def _check(points):
    """Raises UserError unless all points have allowed settings and the same images and releases."""
    for name, allowed in _NEEDED.items():
        for point in points:
            if getattr(point, name) not in allowed:
                raise UserError(
                    "Flag --private_tuning protects single images and needs --epsilon, from which "
                    "the noise follows, Poisson sampling, no --seed, no --user, no --individual, "
                    "and no images held out, because it measures on those it trains on. Received: "
                    f"--{name}={getattr(point, name)}."
                )
    for name in _SHARED:
        values = list(dict.fromkeys(getattr(point, name) for point in points))
        if len(values) > 1 or (name in PRIVACY and values == [None]):
            raise UserError(
                f"With --private_tuning all runs share {name}. Received: {name} of "
                f"{', '.join(map(str, values))}. Give one --{name}, and sweep settings that change "
                "neither the training images nor epsilon, such as learning_rate or l2_norm_clip."
            )


def _load(settings, takes=None):
    return images.load_for(settings, DATA_DIR.value, DOWNLOAD.value, takes)


def _entries(settings, num_examples, mean):
    """Returns the `Entry` objects of the updates and of the score of each run."""
    plan = settings.privacy_plan(num_examples)
    once = dict(steps=1, epsilon=settings.epsilon, delta=settings.delta)
    entries = [
        Entry(plan.noise_multiplier, plan.sampling_probability, plan.steps),
        Entry(_SCORE * calibration.solve("noise_multiplier", once, "gdp"), 1.0, 1),
    ]
    scale = selection.selection_scale(entries, settings.epsilon, settings.delta, mean)
    return [dataclasses.replace(e, noise_multiplier=scale * e.noise_multiplier) for e in entries]


def _at_noise(run, settings, noise_multiplier):
    """Returns the `sweep.Run` of complete settings at the noise of all runs."""
    settings = dataclasses.replace(settings, epsilon=None, noise_multiplier=noise_multiplier)
    plan = {name: getattr(settings, name) for name in PRIVACY if name != "epsilon"}
    usual = dataclasses.asdict(resolve(run.chosen["preset"], plan))
    differing = {
        name: value
        for name, value in dataclasses.asdict(settings).items()
        if value is not None and value != usual[name]
    }
    return dataclasses.replace(run, chosen={"preset": run.chosen["preset"], **plan, **differing})


def _entry_of(folder, before, planned):
    """Returns the `Entry` of a run's updates in the ledger that it wrote.

    Raises:
        UserError: If it is not the entry that was planned for all runs.
    """
    ledger, spent = records.read(folder / records.FILE).ledger, collections.Counter()
    for entry in ledger.entries:
        if entry not in before.entries:
            spent[dataclasses.replace(entry, run=None, steps=1)] += entry.steps
    entries = [dataclasses.replace(entry, steps=steps) for entry, steps in spent.items()]
    if entries != [planned] or not ledger.is_complete:
        raise UserError(
            f"A run was not trained as planned: its ledger has {entries}, and the noise is for "
            f"{planned}. Leave the images alone while this runs. Nothing is kept."
        )
    return entries[0]


def _count_right(folder, settings):
    """Returns the number of training images that a run's model classifies correctly."""
    model = keras.saving.load_model(folder / MODEL, compile=False)
    shape = model.input_shape[1:]
    data = _load(settings, shape)
    # With --augment=ResizeCropFlip training images are larger than the inputs of the model.
    model = keras.Sequential([keras.layers.Resizing(*shape[:2]), model])
    batches = measure.predicted(model, (data.train_x, data.train_y))
    return sum(np.sum(measure.predicted_classes(z, settings.threshold) == y) for z, y in batches)


def _write(folder, ledger, trainings, search):
    """Writes the cost of all runs to every file, and deletes files that no account covers.

    Curves and events have the epsilon of one run only, and Keras logs the training loss.
    """
    for name in ("curve.jsonl", page.CURVE, "log.txt", "point.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    record = report.rewrite(
        folder,
        program="sweep",
        ledger=ledger,
        accountant="rdp",
        seen=trainings,
        searched=f"a random number of runs, {search['mean_runs']:g} on average, each at a point "
        "drawn at random, of which the best by a noisy score is kept",
        results=search,
    )
    print_record(record)
    return record
