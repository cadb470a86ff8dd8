r"""Trains at every point of a grid with a fixed budget, and writes a table of the results.

    python -m tfdpx.train.sweep --preset=digits --epsilon=8 --seeds=0,1,2 --workdir=runs/sweep \
        --grid="learning_rate=1,2,4;batch_size=256,512,1024"

A sweep can vary any setting of `tfdpx.train.classify`, and presets (`--grid="preset=a,b"`). Other
flags of `classify` hold for all runs. One of noise_multiplier, epsilon, steps and batch_size is
solved for: for example, a sweep of the batch size at one epsilon and number of steps changes the
noise. A grid that would change epsilon silently is refused. `augmult=0` is a point without views
and without augmentation. Because a sweep chooses, accuracy is measured on held-out training images
(a quarter, unless preset or flags set another share) and not on test images, unless --final or
--eval_split=test is set.

The working directory receives:

    table.csv  one row a run: swept settings, seed, accuracy, and its report
    runs/      the folder of each run, with its log

Start an interrupted sweep again with the same --workdir to resume it, also with more values or
seeds. Failed runs are repeated. --table_only writes the table of the finished runs. The last line
of the standard output is one JSON object.

The guarantee of a run covers only that run, and neither a choice among runs on the private data
nor the release of several runs. --private_tuning=M covers the choice (Papernot and Steinke 2021).
It makes a random number of runs, M on average, each at a random point of the grid. The best run by
a noisy score is kept in `best/` of the working directory, the others are deleted, and all together
keep within --epsilon:

    python -m tfdpx.train.sweep --preset=digits --epsilon=3 --private_tuning=5 \
        --grid="learning_rate=4,8,16" --workdir=runs/tuned
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import contextlib
import csv
import dataclasses
import itertools
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from concurrent import futures

from absl import app, flags
from sklearn.model_selection import ParameterGrid

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx.accounting import record as records
from tfdpx.train import devices, presets, private_tuning, resume
from tfdpx.train.errors import UserError, checking_flags, in_one_line, parse_flags, valid_values
from tfdpx.train.output import print_rows, to_json
from tfdpx.train.run_flags import WORKDIR, given
from tfdpx.train.settings import PRIVACY, Settings, resolve

# The share of images to hold out if neither preset nor flags set it: a sweep must not
# choose by the images of the final report.
HELD_OUT = 0.25
# Without --epsilon, these settings change the epsilon of a run.
_CHANGES_EPSILON = {*PRIVACY, "preset", "dataset", "validation", "delta", "sampling", "accountant"}
# Flags of every run that are not settings.
flags.adopt_module_key_flags(devices)
_HANDED_ON = ("data_dir", "download", "strategy", "tpu", "cpu_devices")
# The preset and settings of a run of the sweep, next to the files of `classify`.
_POINT = "point.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a sweep.

    Attributes:
        point: Dict, the values of the swept settings.
        chosen: Dict of "preset" and the settings that override it, including the point.
    """

    point: dict
    chosen: dict

    @property
    def settings(self):
        """The whole `Settings`."""
        chosen = dict(self.chosen)
        return resolve(chosen.pop("preset"), chosen)

    @property
    def name(self):
        """The name of the run's folder, for example `"learning_rate=2.0,seed=0"`."""
        return ",".join(f"{k}={urllib.parse.quote(str(v), safe='')}" for k, v in self.point.items())

    @property
    def arguments(self):
        """Returns the flags of `tfdpx.train.classify` for these settings, a list."""
        texts = {k: ",".join(v) if isinstance(v, list) else str(v) for k, v in self.chosen.items()}
        return [f"--{name}={text}" for name, text in texts.items()]


def define_flags(values):
    """Defines the flags of this program in `values`, an `absl.flags.FlagValues`.

    This is a function because other programs of this package have flags with the same names.
    """
    common = {"flag_values": values}
    text = f"Settings to start from, one of: {presets.summary()}."
    flags.DEFINE_string("preset", "digits", text, **common)
    flags.DEFINE_string(
        "grid", None, 'What to sweep, such as "learning_rate=1,2,4;batch_size=256,512".', **common
    )
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; every point is run with each.", **common)
    flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1, **common)
    flags.DEFINE_bool("table_only", False, "Train nothing: write the table of --workdir.", **common)
    flags.DEFINE_float(
        "private_tuning",
        None,
        "Mean number of runs: keeps the best one, and epsilon covers all of them.",
        **common,
    )


def main(argv, values=flags.FLAGS):
    """Runs the sweep that the flags describe; errors of the user become one line."""
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
    began, failures = time.perf_counter(), {}
    if not values.table_only:
        seeds = _parse_values("seeds", "seed", ",".join(values.seeds))
        grid = {**parse(values.grid), "seed": seeds}
        shared = _settings_of_all(values, grid)
        runs = grid_runs(grid, shared)
        with resume.locked_folder(workdir) as lock:
            failures = execute(runs, workdir, shared, values.jobs, lock)
    seconds = time.perf_counter() - began
    return {**summarize(workdir), "failures": failures, "seconds": seconds}


def _tune(values, workdir):
    for name in ("seeds", "jobs", "table_only"):
        if values[name].present:
            raise UserError(
                f"Flags --private_tuning and --{name} exclude each other. Received: "
                f"--{name}={values[name].value}."
            )
    grid = parse(values.grid)
    final = {"validation": 0.0, "eval_split": "test"}
    runs = grid_runs(grid, {**final, **_settings_of_all(values, grid)})

    def train(run, folder):
        with contextlib.redirect_stdout(None):  # The number of runs is secret.
            failures = execute([run], folder, {}, lock=lock)
        if failures:
            raise UserError(f"A run {failures[run.name]} Nothing is kept.")
        return folder / "runs" / run.name

    with resume.locked_folder(workdir) as lock:
        return private_tuning.tune(runs, values.private_tuning, workdir, train)


def _settings_of_all(values, grid):
    """Returns a dict of the settings, and the preset unless it is swept, that all runs share."""
    shared = {name: value for name, value in given().items() if value is not None}
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
    names = ["preset", *(field.name for field in dataclasses.fields(Settings))]
    names.remove("seed")
    grid = {}
    for part in (text or "").split(";"):
        name, _, values = (piece.strip() for piece in part.partition("="))
        if name not in names or name in grid or not values:
            raise UserError(
                "Flag --grid says what to sweep, each setting once with its values, such as "
                '--grid="learning_rate=1,2,4;batch_size=256,512". It can sweep '
                f"{', '.join(names)}. Received: {part.strip()!r} in --grid={text}."
            )
        grid[name] = _parse_values("grid", name, values)
    return grid


def _parse_values(flag, name, text):
    # Not the commas between the arguments of an object.
    words = [word.strip() for word in re.split(r",(?![ \w]+=)", text)]
    problem = "a value comes twice"
    try:
        values = words if name == "preset" else [flags.FLAGS[name].parser.parse(w) for w in words]
    except (ValueError, TypeError):
        values, problem = [], f"each must be {valid_values(name)}"
    if not values or any(values.count(value) > 1 for value in values):
        raise UserError(
            f"Flag --{flag} has invalid values of {name}: {problem}. Received: {text!r}."
        )
    return values


def grid_runs(grid, shared):
    """Returns the `Run`s of a grid. They hold out images unless the settings set a split.

    Args:
        grid: Dict returned by `parse`, with or without values of "seed".
        shared: Dict of settings that all runs share; "preset" must be in it or in the grid.

    Raises:
        UserError: If a point is not a valid configuration, or budgets of points differ though
            epsilon is not swept.
    """
    runs, changing = [], sorted(_CHANGES_EPSILON & set(grid))
    for point in ParameterGrid(grid):
        base_settings = shared
        if point.get("augmult") == 0:  # There is no augmentation without views.
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

    A run is a process of `tfdpx.train.classify` in `<workdir>/runs/<name>`, so that the others
    continue if it fails or is killed because of its memory. A run that was interrupted resumes from
    its last checkpoint. A failed run is reported, and repeated by the next call.

    Args:
        runs: List of `Run`.
        workdir: Folder of the sweep, `pathlib.Path`.
        shared: Dict of the settings that all runs share.
        jobs: Int, runs at a time.
        lock: File descriptor of `resume.locked_folder` or None. Runs may outlive this process, and
            hold the lock until they end.

    Returns:
        Dict from the names of failed runs to a line with the reason.

    Raises:
        UserError: If the folder has a sweep with other shared settings.
    """
    holder, remedy = f"The folder --workdir={workdir} holds a sweep", "Choose another folder."
    with checking_flags():
        resumable.begin(workdir / "sweep.json", shared, holder, remedy, runs[0].point)
    waiting = [run for run in runs if _read_run(workdir / "runs" / run.name) is None]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already.", flush=True)
    failures, processes, is_stopped = {}, [], threading.Event()

    def train(run):
        folder = workdir / "runs" / run.name
        with _start(run, folder, lock) as process:
            processes.append(process)
            if is_stopped.is_set():
                process.terminate()
        if finished := _read_run(folder):
            return f"{100 * _accuracy(finished['report'])['accuracy']:.1f}%"
        failures[run.name] = _reason(process.returncode, folder / "log.txt")
        return failures[run.name]

    with futures.ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = {pool.submit(train, run): run.name for run in waiting}
            for done, task in enumerate(futures.as_completed(tasks), 1):
                print(f"[{done}/{len(waiting)}] {tasks[task]}: {task.result()}", flush=True)
        except BaseException:
            is_stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    return failures


def _start(run, folder, lock):
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"preset": run.chosen["preset"], **dataclasses.asdict(run.settings)}
    resumable.save(folder / _POINT, settings, point=run.point)
    handed_on = [flags.FLAGS[name] for name in _HANDED_ON]
    handed_on = [flag.serialize() for flag in handed_on if not flag.using_default_value]
    program = [sys.executable, "-m", "tfdpx.train.classify", f"--workdir={folder}", "--resume"]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(
            [*program, *run.arguments, *handed_on],
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[] if lock is None else [lock],  # Runs may outlive this process.
        )


def _reason(status, log):
    """Returns a line with the reason why a run has no result."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}: out of memory, unless you ended it"
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return f"failed: {lines[-1].strip() if lines else f'status {status}'}"


def _read_run(folder):
    """Returns a dict with settings, point and report of a finished run; None if unfinished."""
    if not (folder / records.FILE).exists():
        return None
    with checking_flags():
        run = resumable.begun(folder / _POINT)
        return {**run, "folder": folder, "report": records.read(folder / records.FILE).view()}


def _accuracy(report):
    """Returns the name of the images that a run was measured on, and its accuracy."""
    measured_on = "validation" if report.get("test_accuracy") is None else "test"
    return {"measured_on": measured_on, "accuracy": report[f"{measured_on}_accuracy"]}


def read_table(workdir):
    """Returns a row for each finished run of a sweep, and the names of the swept settings.

    A row is a dict of the run's `folder`, its settings, its report, and `accuracy` on the images
    `measured_on`.

    Args:
        workdir: Folder of the sweep, `pathlib.Path`.
    """
    runs = [run for folder in (workdir / "runs").glob("*") if (run := _read_run(folder))]
    swept = [*dict.fromkeys(name for run in runs for name in run["point"] if name != "seed")]
    rows = []
    for run in runs:
        settings, report = run["settings"], run["report"]
        point = {name: settings[name] for name in swept}
        rows.append({"folder": run["folder"], **settings, **report, **point, **_accuracy(report)})

    def place(row):
        values = [row[name] for name in (*swept, "seed")]
        return [(value is not None, isinstance(value, str), value or 0) for value in values]

    return sorted(rows, key=place), swept


def points(rows, swept):
    """Returns the accuracy of each point over its seeds, in the order of the rows.

    Args:
        rows: List of rows from `read_table`.
        swept: Names of the settings that define a point.

    Returns:
        List of dicts: the settings `swept`, and `mean`, `std` (the standard deviation over seeds,
        0 for one), `median`, `lowest`, `highest` and `runs`.
    """
    summaries = []
    for values, group in itertools.groupby(rows, key=lambda row: [row[name] for name in swept]):
        accuracies = [row["accuracy"] for row in group]
        measures = {
            "mean": statistics.mean(accuracies),
            "std": statistics.stdev(accuracies) if len(accuracies) > 1 else 0.0,
            "median": statistics.median(accuracies),
            "lowest": min(accuracies),
            "highest": max(accuracies),
            "runs": len(accuracies),
        }
        summaries.append(dict(zip(swept, values, strict=True)) | measures)
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
    measures = ("mean", "std", "median", "lowest", "highest")
    shown = [
        [point[name] for name in swept]
        + [f"{100 * point[name]:.1f}" for name in measures]
        + [point["runs"]]
        for point in summaries
    ]
    print_rows((*swept, *measures, "runs"), shown, f"{measured_on} accuracy, %")
    return {
        "runs": len(rows),
        "points": len(summaries),
        "measured_on": measured_on,
        "best": {name: best[name] for name in swept},
        **{f"best_{name}_accuracy": best[name] for name in measures},
        "table": str(path),
        "workdir": str(workdir),
    }


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main, flags_parser=parse_flags)
