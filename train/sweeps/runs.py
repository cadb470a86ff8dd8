"""Runs the training runs of a sweep, each in a process of its own, and reads what they found."""

import contextlib
import dataclasses
import math
import pathlib
import signal
import subprocess
import sys
import time

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx.accounting import record as records
from tfdpx.train.errors import UserError, checking_flags

# What a run of the sweep is; `classify` adds its own files.
POINT = "point.json"
_REMEDY = "Choose another folder."
# The resolution of progress, in seconds.
_POLL = 0.2


def execute(runs, workdir, extra=(), jobs=1, say=print, on_result=lambda: None):
    """Takes every run that has not been finished yet.

    A run is a process of `tfdpx.train.classify` in `<workdir>/runs/<name>`, so that one which fails
    or is killed for its memory leaves the others alone. A run that was cut off resumes from its
    last checkpoint. A run that fails is reported, and the others continue; the next call retries.

    Args:
        runs: List of `grid.SweepRun`.
        workdir: Folder of the sweep, `pathlib.Path`.
        extra: Further flags of `classify`, where data are and the like.
        jobs: Int, runs at a time.
        say: Function that takes a line of progress.
        on_result: Function without arguments, called after every run.

    Returns:
        Dict from the names of failed runs to a line each.

    Raises:
        UserError: If the folder cannot be written, holds a sweep whose runs differ from these in
            more than what is swept, or is being written to by another sweep.
    """
    with _locked(workdir) as lock:
        _check_alike(runs, workdir)
        waiting = [run for run in runs if read(_claim(run, workdir)) is None]
        if done := len(runs) - len(waiting):
            say(f"{done} of {len(runs)} runs are done already.")
        progress = _Progress(len(runs), done, say)
        failures, running = {}, {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop(0)
                    running[run.name] = (_start(run, workdir, extra, lock), time.monotonic())
                for name, (process, began) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[name]
                    found = read(workdir / "runs" / name)
                    if found is None:
                        failures[name] = _why(process.returncode, _log(workdir, name))
                    text = failures.get(name) or f"{100 * accuracy(found['report']):.1f}%"
                    progress.step(name, text, time.monotonic() - began, jobs)
                    on_result()
                time.sleep(_POLL)
        finally:
            for process, _ in running.values():
                process.terminate()
            for process, _ in running.values():
                process.wait()
    return failures


def read(folder):
    """Returns `{"point": ..., "settings": ..., "report": ...}` of a finished run, else None."""
    if not (folder / records.FILE).exists():
        return None
    with checking_flags():
        settings = resumable.begun(folder / POINT)
        return {**settings, "report": records.read(folder / records.FILE).view()}


def read_all(workdir):
    """Returns what `read` does of all finished runs in the folder of a sweep."""
    found = [read(folder) for folder in sorted((workdir / "runs").glob("*"))]
    return [run for run in found if run is not None]


def accuracy(report):
    """The accuracy in a report, on whichever images it was measured."""
    on_test = report["test_accuracy"]
    return report["validation_accuracy"] if on_test is None else on_test


class _Progress:
    def __init__(self, total, done, say):
        self._total, self._done, self._say = total, done, say
        self._seconds = []

    def step(self, name, text, seconds, jobs):
        self._done += 1
        self._seconds.append(seconds)
        left = self._total - self._done
        rest = left * sum(self._seconds) / len(self._seconds) / jobs
        about = f"; {left} left, about {math.ceil(rest / 60)} min" if left else ""
        self._say(f"[{self._done}/{self._total}] {name}: {text} ({seconds:.0f} s{about})")


@contextlib.contextmanager
def _locked(workdir):
    """Holds a lock that the processes of the runs hold too, should they outlive this one."""
    with contextlib.ExitStack() as stack:
        try:
            (workdir / "runs").mkdir(parents=True, exist_ok=True)
            user = "Another sweep, or a run that one left behind, writes to the folder"
            lock = stack.enter_context(files.locked(workdir, user))
        except (OSError, RuntimeError) as error:
            raise UserError(f"Cannot write to --workdir={workdir}. {error}") from error
        yield lock


def _check_alike(runs, workdir):
    """Writes down what all runs of the folder share; raises UserError if earlier ones do not."""
    path, fixed, swept = workdir / "sweep.json", dict(runs[0].fixed), set(runs[0].point)
    with checking_flags():
        if earlier := resumable.begun(path):
            swept |= set(earlier["swept"])
            holder = f"The folder --workdir={workdir} holds a sweep"
            resumable.check_same(earlier["settings"], fixed, holder, _REMEDY, swept)
    resumable.save(path, fixed, swept=sorted(swept))


def _claim(run, workdir):
    """Makes the folder of a run, and writes down what the run is."""
    folder = workdir / "runs" / run.name
    settings = {"preset": run.preset, **dataclasses.asdict(run.settings)}
    holder = f"The folder --workdir={workdir} holds a run {run.name}"
    with checking_flags():
        resumable.begin(folder / POINT, settings, holder, _REMEDY, point=run.point)
    return folder


def _start(run, workdir, extra, lock):
    folder = workdir / "runs" / run.name
    command = [sys.executable, "-m", "tfdpx.train.classify", *run.arguments, *extra]
    with _log(workdir, run.name).open("w") as log:
        return subprocess.Popen(
            [*command, f"--workdir={folder}", "--resume"],
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[] if lock is None else [lock],
        )


def _log(workdir, name):
    return workdir / "runs" / name / "log.txt"


def _why(returncode, log):
    """A line that says why a run has no result."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        return f"killed by {name}: out of memory, unless you ended it"
    lines = [line for line in pathlib.Path(log).read_text().splitlines() if line.strip()]
    return f"failed: {lines[-1].strip() if lines else f'status {returncode}'}"
