r"""Trains with every combination of some settings, and writes a table of the results.

    python -m tfdpx.train.sweep --preset=digits --epsilon=8 --seeds=0,1,2 --workdir=runs/sweep \
        --grid="learning_rate=1,2,4;batch_size=256,512,1024"

A sweep can vary any setting of `tfdpx.train.classify`, and presets (`--grid="preset=a,b"`). Each
combination of values is a point of the grid. Other flags of `classify` are the same for all runs.
Of noise_multiplier, epsilon, steps and batch_size, one follows from the other three. For example,
if a sweep varies the batch size, with epsilon and steps fixed, the noise changes, too. A grid that
would change epsilon silently is an error. `augmult=0` is a point without augmentation.

You choose a point by its accuracy, so accuracy is not measured on test images but on held-out
training images: a quarter of them, unless preset or flags set another share. --eval_split=test
measures on the test images instead.

The program writes to the working directory:

    table.csv  one row for each run: swept settings, seed, accuracy, and report
    runs/      the folder of each run, with its log

To resume an interrupted sweep, start it again with the same --workdir. You may add more values or
seeds. Failed runs are repeated. The last line of the standard output is one JSON object.

The guarantee of a run covers only that run. It covers neither the choice of a run on private data
nor the release of several runs. With --private_tuning=M, epsilon covers the choice (Papernot and
Steinke 2021): the program makes a random number of runs, M on average, each at a random point of
the grid. All runs use the same images, noise, sampling and number of updates. The score of a run is
the number of training images that it classifies correctly, plus noise. One image changes this
number by at most 1, so no image has to be held out. The best run stays in the folder `best/`, and
the others are deleted. All runs together stay within --epsilon:

    python -m tfdpx.train.sweep --preset=digits --epsilon=3 --private_tuning=5 \
        --grid="learning_rate=4,8,16" --workdir=runs/tuned
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import collections
import contextlib
import csv
import dataclasses
import itertools
import math
import pathlib
import re
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from concurrent import futures

import keras
import numpy as np
from absl import flags
from sklearn.model_selection import ParameterGrid

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx.accounting import calibration, selection
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.report import measure, page, report
from tfdpx.report.spent import MODEL
from tfdpx.train import defaults, devices, presets, resume
from tfdpx.train.data import images
from tfdpx.train.data.folder import NONE
from tfdpx.train.errors import (
    UserError,
    checking_flags,
    did_you_mean,
    in_one_line,
    start_program,
    valid_values,
)
from tfdpx.train.output import print_record, print_rows, to_json
from tfdpx.train.settings import (
    DATA_DIR,
    DOWNLOAD,
    IMAGES,
    PRIVACY,
    WORKDIR,
    Settings,
    flag_values,
    kind_of,
    resolve,
)
from tfdpx.train.start_from import Start, ledger_on

# The share of training images to hold out if neither preset nor flags set it. A point must not be
# chosen by the test images, which the final report uses.
HELD_OUT = 0.25
# If --epsilon is not set, these settings change the epsilon of a run.
_CHANGES_EPSILON = {*PRIVACY, "preset", "dataset", "validation", "delta", "sampling", "accountant"}
# Flags that are not fields of `Settings`. They are passed on to every run.
flags.adopt_module_key_flags(devices)
_HANDED_ON = ("data_dir", "download", "strategy", "tpu", "cpu_devices")
# Statistics of a point's accuracies over seeds.
_MEASURES = {
    "mean": statistics.mean,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
    "median": statistics.median,
    "lowest": min,
    "highest": max,
}

# The guarantee of private tuning requires these settings.
_NEEDED = dict(
    private=[True], sampling=["poisson"], noise_multiplier=[None], seed=[None], user=[None, NONE],
    individual=[False], validation=[0.0],
)  # fmt: skip
# These settings determine the training images and the releases of a run, so private tuning requires
# that they are the same for all points.
_SHARED = (
    "dataset", "test_fraction", "test_seed", "skip_broken", "eval_split", "epsilon", "delta",
    "batch_size", "steps", "accountant",
)  # fmt: skip
# The noise multiplier of a score, divided by the noise multiplier of a single release that would
# spend the whole budget.
_SCORE = 4.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep.

    Attributes:
        point: Dict, the values of the swept settings.
        chosen: Dict with "preset" and all settings that override the preset, including `point`.
    """

    point: dict
    chosen: dict

    @property
    def settings(self):
        """The `Settings` of the run, with the values of the preset."""
        chosen = dict(self.chosen)
        return resolve(chosen.pop("preset"), chosen)

    @property
    def name(self):
        """The name of the run's folder, for example `"learning_rate=2.0,seed=0"`."""
        return ",".join(f"{k}={urllib.parse.quote(_text(v), '')}" for k, v in self.point.items())

    @property
    def arguments(self):
        """Returns a list of the flags of `tfdpx.train.classify` for this run."""
        return [f"--{name}={_text(value)}" for name, value in self.chosen.items()]


def _text(value):
    return ",".join(value) if isinstance(value, list) else str(value)


def _value(name, text):
    return text if name == "preset" else flags.FLAGS[name].parser.parse(text)


def define_flags(values):
    """Defines the flags of this program in `values`, an `absl.flags.FlagValues`.

    Other programs of this package have flags with the same names, so importing this module must not
    define them.
    """
    common = {"flag_values": values}
    text = f"Settings to start from, one of: {presets.summary()}."
    flags.DEFINE_string("preset", "digits", text, **common)
    flags.DEFINE_string(
        "grid", None, 'Settings to sweep, as "learning_rate=1,2,4;batch_size=256,512".', **common
    )
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each point runs with each seed.", **common)
    flags.DEFINE_integer("jobs", 1, "Number of runs at the same time.", lower_bound=1, **common)
    flags.DEFINE_float(
        "private_tuning",
        None,
        "Mean of a random number of runs; the best is kept, and epsilon covers all of them.",
        *(1.1, 1000),
        **common,
    )


def main(argv, values=flags.FLAGS):
    """Runs the sweep that the flags describe. A `UserError` is printed as one line."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_paid = values.private_tuning is not None
    try:
        with in_one_line("tfdpx.train.sweep", argv):
            if WORKDIR.value is None:
                raise UserError("Flag --workdir names the folder of the sweep. It is not set.")
            workdir = pathlib.Path(WORKDIR.value)
            record = _tune(values, workdir) if is_paid else _sweep(values, workdir)
    except KeyboardInterrupt:
        remedy = "nothing is kept" if is_paid else "the same command resumes it"
        sys.exit(f"tfdpx.train.sweep: stopped; {remedy}.")
    print(to_json(record), flush=True)
    if record.get("failures"):
        sys.exit(1)


def _sweep(values, workdir):
    began = time.perf_counter()
    grid = {**parse(values.grid), "seed": _parse_values("seeds", "seed", ",".join(values.seeds))}
    shared = _settings_of_all(values, grid)
    runs = grid_runs(grid, shared)
    with resume.locked_folder(workdir) as lock:
        failures = execute(runs, workdir, shared, values.jobs, lock)
    seconds = time.perf_counter() - began
    return {**summarize(workdir), "failures": failures, "seconds": seconds}


def _settings_of_all(values, grid):
    """Returns a dict of the settings that all runs share, including "preset" unless it varies."""
    shared = {name: value for name, value in flag_values().items() if value is not None}
    if (kind := kind_of(shared.get("dataset"), shared.get("head"))) != IMAGES:
        raise UserError(
            f"A sweep trains networks on images, not {kind}. For tables, search with scikit-learn "
            "and `tfdpx.sklearn`, which adds up the epsilons; for heads, run `tfdpx classify` for "
            f"each value. Received: --dataset={shared.get('dataset')} --head={shared.get('head')}."
        )
    if "preset" not in grid or values["preset"].present:
        shared["preset"] = values.preset
    for name in set(grid) & set(shared):
        raise UserError(
            f"Flags --grid and --seeds give values of {name}, and one is given for all runs: leave "
            f"one of them out. Received: --{name}={shared[name]}."
        )
    return shared


def parse(text):
    """Parses a grid, for example `"learning_rate=1,2,4;batch_size=256,512"`.

    Args:
        text: String with settings separated by `;` and their values by `,`.

    Returns:
        Dict from the names of settings to lists of values with the types of their flags.

    Raises:
        UserError: If a name is not a setting or is repeated, or a value is missing, invalid or
            repeated.
    """
    names = [
        "preset",
        *(f.name for f in dataclasses.fields(Settings) if IMAGES in f.metadata["of"]),
    ]
    names.remove("seed")
    grid = {}
    for part in (text or "").split(";"):
        name, _, values = (piece.strip() for piece in part.partition("="))
        if name not in names or name in grid or not values:
            raise UserError(
                "Flag --grid says what to sweep, each setting once with its values, such as "
                '--grid="learning_rate=1,2,4;batch_size=256,512".'
                f"{did_you_mean(name, names)} It can sweep "
                f"{', '.join(names)}. Received: {part.strip()!r} in --grid={text}."
            )
        grid[name] = _parse_values("grid", name, values)
    return grid


def _parse_values(flag, name, text):
    # Does not split at commas between the arguments of an object.
    words = [word.strip() for word in re.split(r",(?![ \w]+=)", text)]
    problem = "a value comes twice"
    try:
        values = [_value(name, word) for word in words]
    except (ValueError, TypeError):
        values, problem = [], f"each must be {valid_values(name)}"
    if not values or any(values.count(value) > 1 for value in values):
        raise UserError(
            f"Flag --{flag} has invalid values of {name}: {problem}. Received: {text!r}."
        )
    return values


def grid_runs(grid, shared):
    """Returns a `Run` for each point of a grid.

    A run is measured on held-out training images, unless `grid` or `shared` sets `eval_split`, or
    sets `validation` to 0.

    Args:
        grid: Dict as from `parse`. It may also have values of "seed".
        shared: Dict of settings that all runs share; "preset" must be in it or in the grid.

    Raises:
        UserError: If a point is not a valid configuration, or if points differ in epsilon although
            the grid does not sweep epsilon.
    """
    runs, changing = [], sorted(_CHANGES_EPSILON & set(grid))
    for point in ParameterGrid(grid):
        base_settings = shared
        if point.get("augmult") == 0:  # Without views there is no augmentation.
            base_settings = {**shared, "augment": ""}
        chosen = {**base_settings, **point}
        if "eval_split" not in chosen and chosen.get("validation") != 0:
            chosen["validation"] = Run(point, chosen).settings.validation or HELD_OUT
            chosen["eval_split"] = "validation"
        runs.append(Run(point, chosen))
        settings = runs[-1].settings
        if changing and settings.private and settings.budget is None:
            raise UserError(
                f"Sweeping {', '.join(changing)} changes epsilon, and accuracies at different "
                "budgets are not to be compared: give --epsilon (the noise or the number of "
                "updates then follows), or sweep epsilon too. Received: no --epsilon."
            )
    return runs


def execute(runs, workdir, shared, jobs=1, lock=None):
    """Trains every run that is not finished yet.

    Each run is a process of `tfdpx.train.classify` in `<workdir>/runs/<name>`. If a run fails, or
    is killed for lack of memory, the others continue. An interrupted run resumes from its last
    checkpoint. The next call repeats failed runs.

    Args:
        runs: List of `Run`.
        workdir: Folder of the sweep, `pathlib.Path`.
        shared: Dict of the settings that all runs share.
        jobs: Int, the number of runs at the same time.
        lock: File descriptor from `resume.locked_folder`, or None. It is passed to the runs, so the
            folder stays locked until they end, even if this process ends first.

    Returns:
        Dict from the name of each failed run to a line with the reason.

    Raises:
        UserError: If the folder has a sweep with other shared settings.
    """
    holder, remedy = f"The folder --workdir={workdir} holds a sweep", "Choose another folder."
    with checking_flags():
        resumable.begin(workdir / "sweep.json", shared, holder, remedy, runs[0].point)
    waiting = [run for run in runs if _read_run(workdir / "runs" / run.name) is None]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already.", flush=True)
    handed_on = [flags.FLAGS[name] for name in _HANDED_ON]
    handed_on = [flag.serialize() for flag in handed_on if not flag.using_default_value]
    failures, processes = {}, []

    def train(run):
        folder = workdir / "runs" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        program = [sys.executable, "-m", "tfdpx.train.classify", f"--workdir={folder}", "--resume"]
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [*program, *run.arguments, *handed_on],
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[] if lock is None else [lock],
            )
        processes.append(process)
        status = process.wait()
        if finished := _read_run(folder):
            return f"{100 * finished['accuracy']:.1f}%"
        lines = (folder / "log.txt").read_text().split("\n")
        why = next((line.strip() for line in reversed(lines) if line.strip()), f"status {status}")
        failures[run.name] = f"failed: {why}"
        if status < 0:
            signal_name = signal.Signals(-status).name
            failures[run.name] = f"killed by {signal_name}: out of memory, unless you ended it"
        return failures[run.name]

    with futures.ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = {pool.submit(train, run): run.name for run in waiting}
            for done, task in enumerate(futures.as_completed(tasks), 1):
                print(f"[{done}/{len(waiting)}] {tasks[task]}: {task.result()}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    return failures


def _read_run(folder):
    """Returns the row of a run (see `read_table`), or None if the run is not finished."""
    if not (folder / records.FILE).exists():
        return None
    with checking_flags():
        record = records.read(folder / records.FILE)
    report = record.view()
    measured_on = "validation" if report.get("test_accuracy") is None else "test"
    accuracy = {"measured_on": measured_on, "accuracy": report[f"{measured_on}_accuracy"]}
    return {"folder": folder, **record.settings, **report, **accuracy}


def read_table(workdir):
    """Returns a row for each finished run of a sweep, and the names of the swept settings.

    A row is a dict with the run's `folder`, its settings, the entries of its report, its
    `accuracy`, and `measured_on`: "validation" or "test", the images that accuracy was measured on.

    Args:
        workdir: Folder of the sweep, `pathlib.Path`.

    Raises:
        UserError: If a folder has a run that is not of this sweep.
    """
    rows, swept = [], {}
    with checking_flags():
        began = resumable.begun(workdir / "sweep.json") or {"settings": {}}
    shared = {"preset": began["settings"].get("preset")}
    for folder in (workdir / "runs").glob("*"):
        if row := _read_run(folder):
            parts = (part.partition("=") for part in folder.name.split(","))
            try:
                point = {name: _value(name, urllib.parse.unquote(text)) for name, _, text in parts}
            except (KeyError, ValueError) as error:
                raise UserError(
                    f"The folder {folder} has a run, but not the name of one of this sweep: move "
                    "it to another place."
                ) from error
            rows.append(shared | row | point)
            swept |= dict.fromkeys(name for name in point if name != "seed")

    def place(row):
        values = [row[name] for name in (*swept, "seed")]
        return [(value is not None, isinstance(value, str), value or 0) for value in values]

    return sorted(rows, key=place), list(swept)


def points(rows, swept):
    """Returns statistics of the accuracy of each point over seeds, in the order of the rows.

    Args:
        rows: List of rows from `read_table`.
        swept: Names of the settings that define a point.

    Returns:
        List of dicts with the settings in `swept`, and `mean`, `std` (the standard deviation over
        seeds, 0 for one seed), `median`, `lowest`, `highest` and `runs` (the number of runs).
    """
    summaries = []
    for values, group in itertools.groupby(rows, key=lambda row: [row[name] for name in swept]):
        accuracies = [row["accuracy"] for row in group]
        measures = {name: measure_of(accuracies) for name, measure_of in _MEASURES.items()}
        point = dict(zip(swept, values, strict=True))
        summaries.append({**point, **measures, "runs": len(accuracies)})
    return summaries


def rank(point):
    """Returns a key to sort points from worst to best: by median, then by lowest accuracy."""
    return point["median"], point["lowest"]


def summarize(workdir):
    """Writes the table of all finished runs of a sweep.

    Args:
        workdir: Folder of the sweep, `pathlib.Path`.

    Returns:
        Dict for the last line of the output.

    Raises:
        UserError: If no run has finished.
    """
    rows, swept = read_table(workdir)
    if not rows:
        raise UserError(f"No run in --workdir={workdir} has finished.")
    path = workdir / "table.csv"
    columns = dict.fromkeys([*swept, "seed", "accuracy", "measured_on", *itertools.chain(*rows)])
    with files.replacing(path, mode=0o644) as fresh, fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    summaries = sorted(points(rows, swept), key=rank)
    best, measured_on = summaries[-1], rows[0]["measured_on"]
    shown = [
        [point[name] for name in swept]
        + [f"{100 * point[name]:.1f}" for name in _MEASURES]
        + [point["runs"]]
        for point in summaries
    ]
    print_rows((*swept, *_MEASURES, "runs"), shown, f"{measured_on} accuracy, %")
    return {
        "runs": len(rows),
        "points": len(summaries),
        "measured_on": measured_on,
        "best": {name: best[name] for name in swept},
        **{f"best_{name}_accuracy": best[name] for name in _MEASURES},
        "table": str(path),
        "workdir": str(workdir),
    }


def _tune(values, workdir):
    """Trains at random points, keeps the best run in `<workdir>/best`, and deletes all others.

    Guarantee: the folder `best` is (epsilon, delta)-differentially private under adding or removing
    one training image (Papernot and Steinke 2021, `tfdpx.accounting.selection`). The number of runs
    must stay secret. The guarantee does not cover the time that the tuning took. The epsilon in the
    files follows from the ledger that the best run wrote.

    Args:
        values: The flags.
        workdir: `pathlib.Path`.

    Returns:
        The report, a dict.

    Raises:
        UserError: If a setting is not allowed, if points differ in images, noise, sampling or
            number of updates, or if a run fails or was not trained as planned.
    """
    for name in ("seeds", "jobs"):
        if values[name].present:
            raise UserError(
                f"Flags --private_tuning and --{name} exclude each other. Received: "
                f"--{name}={values[name].value}."
            )
    mean, grid = values.private_tuning, parse(values.grid)
    final = {"validation": 0.0, "eval_split": "test"}
    runs = grid_runs(grid, {**final, **_settings_of_all(values, grid)})
    if (workdir / "best").exists():
        raise UserError(f"The folder --workdir={workdir} holds a tuned run. Choose another.")
    starts = [Start(run.settings) for run in runs]
    data = images.load_for(runs[0].settings, DATA_DIR.value, DOWNLOAD.value)
    num_examples, about = data.num_train, (tuple(data.image_shape), data.num_classes)
    points = [
        defaults.complete(
            dataclasses.replace(run.settings, init_from=start.settings.init_from),
            num_examples,
            sketch=lambda name, start=start: start.sketch(name, *about),
        )[0]
        for run, start in zip(runs, starts, strict=True)
    ]
    _check(points)
    updates, score = _entries(points[0], num_examples, mean)
    trainings = tuple(dict.fromkeys(itertools.chain(*(start.seen for start in starts))))
    before = ledger_on(trainings, points[0].dataset)
    with (
        resume.locked_folder(workdir) as lock,
        tempfile.TemporaryDirectory(prefix=".private_tuning-", dir=workdir) as folder,
    ):
        top, best = -math.inf, pathlib.Path(folder, "best")
        for _ in range(selection.draw_runs(mean)):
            place = secrets.randbelow(len(runs))
            run = _at_noise(runs[place], points[place], updates.noise_multiplier)
            with contextlib.redirect_stdout(None):  # The number of runs is secret.
                failures = execute([run], pathlib.Path(folder, "run"), {}, lock=lock)
            if failures:
                raise UserError(f"A run {failures[run.name]} Nothing is kept.")
            trained = pathlib.Path(folder, "run", "runs", run.name)
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
    """Raises UserError unless all points have valid settings, and the same images and plan."""
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


def _entries(settings, num_examples, mean):
    """Returns two `Entry`s of the ledger of one run: for its updates, and for its noisy score.

    The noise is so large that a tuning with `mean` runs on average stays within the epsilon of
    `settings`.
    """
    plan = settings.privacy_plan(num_examples)
    once = dict(steps=1, epsilon=settings.epsilon, delta=settings.delta)
    entries = [
        Entry(plan.noise_multiplier, plan.sampling_probability, plan.steps),
        Entry(_SCORE * calibration.solve("noise_multiplier", once, "gdp"), 1.0, 1),
    ]
    scale = selection.selection_scale(entries, settings.epsilon, settings.delta, mean)
    return [dataclasses.replace(e, noise_multiplier=scale * e.noise_multiplier) for e in entries]


def _at_noise(run, settings, noise_multiplier):
    """Returns a copy of a run with all settings filled in, and with `noise_multiplier`."""
    settings = dataclasses.replace(settings, epsilon=None, noise_multiplier=noise_multiplier)
    chosen = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if settings.kind in field.metadata["of"] and getattr(settings, field.name) is not None
    }
    return dataclasses.replace(run, chosen={"preset": run.chosen["preset"], **chosen})


def _entry_of(folder, before, planned):
    """Returns the `Entry` of a run's updates, from the ledger in the run's folder.

    Raises:
        UserError: If the entry is not the one that was planned for all runs.
    """
    ledger, spent = records.read(folder / records.FILE).ledger, collections.Counter()
    for entry in ledger.entries:
        if entry not in before.entries:
            spent[dataclasses.replace(entry, run=None, steps=1)] += entry.steps
    entries = [dataclasses.replace(entry, steps=steps) for entry, steps in spent.items()]
    if entries != [planned] or not ledger.is_complete:
        raise UserError(
            f"A run was not trained as planned: its ledger has {entries}, and the noise is for "
            f"{planned}. Do not change the images during a sweep. Nothing is kept."
        )
    return entries[0]


def _count_right(folder, settings):
    """Returns the number of training images that a run's model classifies correctly."""
    model = keras.saving.load_model(folder / MODEL, compile=False)
    shape = model.input_shape[1:]
    data = images.load_for(settings, DATA_DIR.value, DOWNLOAD.value, shape)
    # With --augment=ResizeCropFlip training images are larger than the inputs of the model.
    model = keras.Sequential([keras.layers.Resizing(*shape[:2]), model])
    batches = measure.predicted(model, (data.train_x, data.train_y))
    return sum(np.sum(measure.predicted_classes(z, settings.threshold) == y) for z, y in batches)


def _write(folder, ledger, trainings, search):
    """Writes the privacy loss of all runs to the files of the best run, and deletes some files.

    It deletes the learning curve and TensorBoard's events, which show the epsilon of only one run,
    and the log, which shows the private training loss.
    """
    for name in ("curve.jsonl", page.CURVE, "log.txt"):
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


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    start_program(main)
