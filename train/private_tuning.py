"""Tuning that is paid for: the best of a random number of runs at random points is kept.

Papernot and Steinke 2021 (`tfdpx.accounting.selection`). All runs train on the same images, with
the same noise, sampling and number of updates. A run is scored by how many of its training images
it gets right, with noise: one image changes that by 1, and no image needs to be held out.
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
from tfdpx.train import defaults, measure, report
from tfdpx.train.data import images
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.run_flags import DATA_DIR, DOWNLOAD
from tfdpx.train.settings import PRIVACY, resolve
from tfdpx.train.start_from import Start, ledger_on

# Settings that the guarantee needs.
_NEEDED = dict(
    private=True, sampling="poisson", noise_multiplier=None, seed=None, user=None, individual=False,
    validation=0.0,
)  # fmt: skip
# Settings that say on which images a run trains, and what it releases.
_SHARED = (
    "dataset", "test_fraction", "test_seed", "skip_broken", "eval_split", "epsilon", "delta",
    "batch_size", "steps", "accountant",
)  # fmt: skip
# The noise of a score, of that at which one release would spend the whole budget.
_SCORE = 4.0


def tune(runs, mean, workdir, train):
    """Trains and keeps the best run in `<workdir>/best`; all others are deleted.

    Guarantee: (epsilon, delta)-differential privacy of that folder, but not of how long this took,
    under adding or removing one training image. How many runs there were is not published. The
    epsilon in its files is that of the ledger which the kept run wrote.

    Args:
        runs: List of `sweep.Run`, the points of the grid.
        mean: Float > 1, mean number of runs.
        workdir: `pathlib.Path`.
        train: Function of a `sweep.Run` and a new folder that trains in it. It returns the folder
            of the finished run, and raises UserError if it fails.

    Returns:
        Dict, the report.

    Raises:
        UserError: If a setting does not fit, points differ in their images or releases, or a run
            fails or releases anything else.
    """
    with checking_flags():
        selection.check_mean(mean)
    if (workdir / "best").exists():
        raise UserError(f"The folder --workdir={workdir} holds a tuned run. Choose another.")
    starts = [Start(p, p.pixels, p.batch_norm, p.features) for p in (r.settings for r in runs)]
    points = [
        dataclasses.replace(run.settings, init_from=start.settings.init_from)
        for run, start in zip(runs, starts, strict=True)
    ]
    num_examples = _load(points[0]).num_train
    points = [defaults.complete(settings, num_examples)[0] for settings in points]
    _check(points)
    updates, score = _entries(points[0], num_examples, mean)
    seen = tuple(dict.fromkeys(itertools.chain(*(start.seen for start in starts))))
    before = ledger_on(seen, points[0].dataset)
    workdir.mkdir(parents=True, exist_ok=True)
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
                top, kept, point = right, entry, run.point
                shutil.rmtree(best, ignore_errors=True)
                trained.rename(best)
            shutil.rmtree(pathlib.Path(folder, "run"))
        search = {"best": point, "mean_runs": mean, "noisy_train_accuracy": top / num_examples}
        ledger = before + Ledger.selected([kept, score], mean, points[0].delta)
        record = _write(best, ledger, seen, search)
        best.rename(workdir / "best")
    return {**record.view(), "workdir": str(workdir / "best")}


def _check(points):
    """Raises UserError, naming a setting, unless all points have the same images and releases."""
    for name, value in _NEEDED.items():
        for point in points:
            if getattr(point, name) != value:
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
    """The `Entry` objects of the updates and of the score of each run."""
    plan = settings.privacy_plan(num_examples)
    once = dict(steps=1, epsilon=settings.epsilon, delta=settings.delta)
    entries = [
        Entry(plan.noise_multiplier, plan.sampling_probability, plan.steps),
        Entry(_SCORE * calibration.solve("noise_multiplier", once, "gdp"), 1.0, 1),
    ]
    scale = selection.selection_scale(entries, settings.epsilon, settings.delta, mean)
    return [dataclasses.replace(e, noise_multiplier=scale * e.noise_multiplier) for e in entries]


def _at_noise(run, settings, noise_multiplier):
    """The `sweep.Run` of settings that leave nothing open, at the noise of all runs."""
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
    """The `Entry` of a run's updates, as its own ledger has it.

    Raises:
        UserError: If it is not the entry that all runs were planned to have.
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
    """The number of training images that a run's model gets right."""
    model = keras.saving.load_model(folder / "model.keras", compile=False)
    shape = model.input_shape[1:]
    data = _load(settings, shape)
    # With --augment_resize training images are larger than those that the model takes.
    model = keras.Sequential([keras.layers.Resizing(*shape[:2]), model])
    on_training = dataclasses.replace(data, eval_x=data.train_x, eval_y=data.train_y)
    batches = measure.predicted(model, on_training.eval_examples)
    return sum(np.sum(measure.predicted_classes(z, settings.threshold) == y) for z, y in batches)


def _write(folder, ledger, seen, search):
    """Puts the cost of all runs in place of one's, in every file; deletes what no account covers.

    Curves and events name the epsilon of a run alone, and Keras prints the training loss.
    """
    for name in ("curve.jsonl", report.CURVE, "log.txt", "point.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    record = records.read(folder / records.FILE)
    record = dataclasses.replace(
        record,
        program="sweep",
        ledger=ledger,
        accountant="rdp",
        seen=seen,
        searched=f"a random number of runs, {search['mean_runs']:g} on average, each at a point "
        "drawn at random, of which the best by a noisy score is kept",
        results={**record.results, **search},
    )
    record.save(folder / "model.keras")
    report.write_record(record, folder)
    report.print_record(record)
    report.write_page(folder)
    return record
