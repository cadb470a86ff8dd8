"""Tuning that is paid for: a random number of runs at random points, of which the best is kept.

Papernot and Steinke 2021 (`tfdpx.accounting.selection`). All runs have the same noise, sampling and
number of updates. A run is scored by how many of its own training images it gets right, with
noise: one image changes that by 1, and no image needs to be held out.
"""

import dataclasses
import itertools
import pathlib
import secrets
import shutil
import tempfile

import keras
import numpy as np

from tfdpx.accounting import calibration, selection
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.train.config import preset_lookup, run_flags
from tfdpx.train.config.training import PRIVACY
from tfdpx.train.data import images
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.report import page
from tfdpx.train.run import auto_settings, evaluation, provenance, results
from tfdpx.train.sweeps import grid, runs

# What all runs must share, or what the guarantee has no room for.
_FIXED = (
    *(*PRIVACY, grid.PRESET, "dataset", "validation", "eval_split", "delta", "sampling"),
    *("accountant", "private", "seed"),
)
# The noise of a score, of that at which one release would spend the whole budget.
_SCORE = 4.0


def tune(preset, given, swept, mean, workdir, extra):
    """Trains and keeps the best run in `<workdir>/best`; all others are deleted.

    Guarantee: (epsilon, delta)-differential privacy of that folder, but not of how long this took,
    under adding or removing one training image. How many runs there were is not published.

    Args:
        preset: Name of a preset.
        given: Dict of settings that hold for all runs; epsilon must be among them or the preset's.
        swept: What `grid.parse` returned.
        mean: Float > 1, mean number of runs.
        workdir: `pathlib.Path`.
        extra: Further flags of `classify`.

    Returns:
        Dict, the report.

    Raises:
        UserError: If a setting does not fit, or a run fails.
    """
    with checking_flags():
        selection.check_mean(mean)
    best = workdir / "best"
    if best.exists():
        raise UserError(f"The folder --workdir={workdir} holds a tuned run. Choose another.")
    points = _points(preset, given, swept)
    if user := next((settings.user for _, settings in points if settings.user), None):
        raise UserError(
            "Private tuning protects single images. Received: --user="
            f"{user}. Leave it out, or run `classify` with settings chosen without these images."
        )
    data = images.load_for(points[0][1], run_flags.DATA_DIR.value, run_flags.DOWNLOAD.value)
    if data.train_y is None:
        raise UserError(f"The images must fit in memory. Received: --dataset={data.name}.")
    points = [
        (point, auto_settings.complete(settings, data.num_train)[0]) for point, settings in points
    ]
    entries, score, shared = _noise(points, data.num_train, mean)
    seen = {
        provenance.seen_by(provenance.files(settings), settings.init_data) for _, settings in points
    }
    before = sum((provenance.on_same_data(each, shared.dataset) for each in seen), Ledger())
    sigma = entries[0].noise_multiplier
    workdir.mkdir(parents=True, exist_ok=True)
    top = None
    with tempfile.TemporaryDirectory(prefix=".private_tuning-", dir=workdir) as folder:
        for index in range(selection.draw_runs(mean)):
            point, settings = points[secrets.randbelow(len(points))]
            run = _run(preset, point, settings, sigma)
            there = pathlib.Path(folder) / str(index)
            failures = runs.execute([run], there, extra, say=lambda line: None)
            if failures:
                raise UserError(f"A run {failures[run.name]} Nothing is kept.")
            found = there / "runs" / run.name
            right = evaluation.noisy_count(_right(found, data), score)
            if top is None or right > top[0]:
                if top:
                    shutil.rmtree(top[2])
                top = right, point, found
            else:
                shutil.rmtree(there)
        right, point, found = top
        ledger = before + Ledger.selected(entries, mean, shared.delta)
        record = _record(found, point, ledger, mean, right / data.num_train)
        found.rename(best)
    return {**record.view(), "workdir": str(best)}


def _points(preset, given, swept):
    """Pairs of a point and its settings, which share all that the account counts on."""
    for name in _FIXED:
        if name in swept:
            raise UserError(
                f"With --private_tuning all runs share {name}. Received: --grid={name}=... "
                f"Sweep what epsilon does not depend on, such as learning_rate or l2_norm_clip."
            )
    points = []
    for values in itertools.product(*swept.values()):
        point = dict(zip(swept, values, strict=True))
        settings = preset_lookup.resolve(preset, {**given, **point})
        _check(settings)
        points.append((point, settings))
    return points


def _check(settings):
    must = {
        "private": settings.private,
        "sampling": settings.sampling == "poisson",
        "validation": not settings.validation,
        "epsilon": settings.epsilon is not None,
        "noise_multiplier": settings.noise_multiplier is None,
        "seed": settings.seed is None,
        "individual": not settings.individual,
    }
    for name, fits in must.items():
        if not fits:
            raise UserError(
                "Flag --private_tuning needs --epsilon, from which the noise follows, Poisson "
                "sampling, no seed, no epsilons of single images, and no images held out: it "
                "measures on those it trains on. "
                f"Received: --{name}={getattr(settings, name)}."
            )


def _noise(points, num_examples, mean):
    """What a run releases, the noise of its score, and one of the settings."""
    shared = points[0][1]
    for name in ("batch_size", "steps"):
        found = {getattr(settings, name) for _, settings in points}
        if len(found) > 1 or None in found:
            raise UserError(
                f"With --private_tuning all runs share {name}. Received: {name} of "
                f"{', '.join(map(str, found))}. Give --{name}."
            )
    plan = shared.privacy_plan(num_examples)
    once = dict(steps=1, epsilon=shared.epsilon, delta=shared.delta)
    entries = [
        Entry(plan.noise_multiplier, plan.sampling_probability, plan.steps),
        Entry(_SCORE * calibration.solve("noise_multiplier", once, "gdp"), 1.0, 1),
    ]
    scale = selection.selection_scale(entries, shared.epsilon, shared.delta, mean)
    entries = [
        dataclasses.replace(entry, noise_multiplier=scale * entry.noise_multiplier)
        for entry in entries
    ]
    return entries, entries[1].noise_multiplier, shared


def _run(preset, point, settings, noise_multiplier):
    """The `grid.SweepRun` of settings that leave nothing open, at the noise of all runs."""
    values = {name: value for name, value in dataclasses.asdict(settings).items()
              if value is not None and name != "epsilon"}  # fmt: skip
    values["noise_multiplier"] = noise_multiplier
    arguments = [f"--preset={preset}", *(f"--{k}={grid.text_of(v)}" for k, v in values.items())]
    return grid.SweepRun(preset, point, {}, settings, tuple(arguments))


def _right(folder, data):
    model = keras.saving.load_model(folder / "model.keras", compile=False)
    measured = evaluation.measure(
        model, dataclasses.replace(data, eval_x=data.train_x, eval_y=data.train_y)
    )
    return np.sum(np.asarray(measured.predictions) == np.asarray(measured.labels))


def _record(folder, point, ledger, mean, noisy_accuracy):
    """Puts the cost of all runs in place of one's, in every file; deletes what no account covers.

    Curves and events name the epsilon of a run alone, and Keras prints the training loss.
    """
    for name in ("curve.jsonl", page.CURVE, "log.txt", runs.POINT):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    ran = records.read(folder / records.FILE)
    record = dataclasses.replace(
        ran,
        program="sweep",
        ledger=ledger,
        accountant="rdp",
        searched=f"a random number of runs, {mean:g} on average, each at a point "
        "drawn at random, of which the best by a noisy score is kept",
        results={
            **ran.results,
            "best": point,
            "mean_runs": mean,
            "noisy_train_accuracy": noisy_accuracy,
        },
    )
    record.save(folder / "model.keras")
    results.write_record(record, folder)
    page.write_page(folder)
    return record
