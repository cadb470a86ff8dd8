"""Measures time and memory of each kind of step, and of whole epochs.

Memory is measured in a separate process for each kind. The kernel counts the resident memory of
this process: the baseline is read after importing TensorFlow, Keras and tfdpx, and the peak after
tracing the step and running it a few times. The difference contains everything that a user needs
memory for: the data, the weights, the traced graph, the allocator's reserve and, for a private
step, the checks of its first call. A ratio of peaks that include the baseline would look too good,
because the libraries need the same memory for each kind.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import traceback

import keras
import numpy as np
import tensorflow as tf
from rich import console

import tfdpx
from experiments.benchmark import steps
from experiments.comparison.worker import resident_mib
from tfdpx.train.errors import UserError
from tfdpx.training import microbatches

# Keeps the standard output free for results.
PROGRESS = console.Console(stderr=True)


def measure_memory(kinds, settings, failures):
    """Returns `{kind: Peak}`. If a kind fails, the dict `failures` gets the reason."""
    peaks = {}
    for kind in kinds:
        PROGRESS.print(f"memory: {steps.KINDS[kind]}")
        try:
            peaks[kind] = measure_peak(kind, settings)
        except StepFailed as failure:
            failures[kind] = str(failure)
    return peaks


def measure_time(kinds, settings, repeats, failures):
    """Returns two dicts `{kind: median seconds}`: clock time, and CPU time of all cores together.

    If a kind fails, the dict `failures` gets the reason.
    """
    traced = {}
    for kind in kinds:
        PROGRESS.print(f"tracing: {steps.KINDS[kind]}")
        with noting(failures, kind):
            traced[kind] = steps.make_step(kind, settings)
    PROGRESS.print(f"timing {repeats} times")
    seconds = steps.interleaved(traced, repeats, _clocks)
    medians = {kind: np.median(values, axis=0).tolist() for kind, values in seconds.items()}
    return tuple({kind: values[clock] for kind, values in medians.items()} for clock in (0, 1))


def _clocks():
    return np.array([time.perf_counter(), time.process_time()])


def ratios(values):
    """Returns `{kind: ratio to the first kind}`; the ratio is None unless both were measured."""
    first = next(iter(values.values()))
    return {kind: first and value and value / first for kind, value in values.items()}


def summary(kinds, medians, cpu_medians, peaks):
    """Returns a dict of medians, peaks and ratios, with None for values that were not measured.

    Args:
        kinds: List of kinds. Ratios compare a kind with the first kind.
        medians: `{kind: seconds}`.
        cpu_medians: `{kind: CPU seconds of all cores together}`.
        peaks: `{kind: Peak}`.
    """
    values = {
        "seconds": {kind: medians.get(kind) for kind in kinds},
        "cpu_seconds": {kind: cpu_medians.get(kind) for kind in kinds},
    }
    for name in ("peak_mib", "step_mib", "baseline_mib", "traced_mib"):
        values[name] = {kind: getattr(peaks.get(kind), name, None) for kind in kinds}
    record = {f"{kind}_{name}": of[kind] for name, of in values.items() for kind in kinds}
    for name, of in (
        ("ratio", "seconds"), ("cpu_ratio", "cpu_seconds"), ("step_memory_ratio", "step_mib"),
        ("process_memory_ratio", "peak_mib"),
    ):  # fmt: skip
        for kind in kinds[1:]:
            prefix = {"private": "step_" if name == "ratio" else ""}.get(kind, f"{kind}_")
            record[prefix + name] = ratios(values[of])[kind]
    return record


@contextlib.contextmanager
def noting(failures, part):
    """Catches an error of `part` and adds it to `failures`, so the other parts still run."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        failures[part] = f"{type(error).__name__}: {first}"
        PROGRESS.print(f"[red]{part} failed[/red]")


_PAIR = ("ordinary", "private")
# The number of updates of one `fit`, and the number of new models with a timed first step.
_UPDATES, _FIRST = 2, 3
# The least number of repeats. After the number of seconds no further repeat begins.
_FEWEST, _ENOUGH = 3, 240.0


class Stopwatch(keras.callbacks.Callback):
    """Measures the seconds of each update, and of the start until the end of the first update.

    Attributes:
        first: Array of two floats: clock seconds from the call of `fit` to the end of the first
            update, and the CPU seconds of all cores in that time.
        updates: List of floats, the clock seconds of each update.
    """

    def __init__(self):
        super().__init__()
        self.first, self.updates = None, []
        self._made = _clocks()

    def on_train_batch_begin(self, batch, logs=None):
        """Notes the time at the start of an update."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Notes the seconds that the update took."""
        now = time.perf_counter()
        self.first = _clocks() - self._made if self.first is None else self.first
        self.updates.append(now - self._begin)


def measure_first(kind, settings, num_examples):
    """Returns the seconds of the first update of a `fit`: of the clock, and of all CPUs together.

    Args:
        kind: One of `steps.KINDS`.
        settings: `steps.Settings`.
        num_examples: Int, N.
    """
    x, y = steps.make_arrays(settings.model, settings.image_size, num_examples)
    model = steps.make_model(kind, settings, _plan(settings, num_examples, 1))
    return _fit(_data(kind, model, settings, x, y), model, 1).first.tolist()


def _plan(settings, num_examples, updates):
    sizes = num_examples, settings.images, updates
    return tfdpx.PrivacyPlan(*sizes, noise_multiplier=1.0, delta=1e-5)


def _data(kind, model, settings, x, y):
    """Returns the arguments of `fit` that are the data."""
    if kind == "ordinary":
        return {"x": x, "y": y, "batch_size": settings.images}
    return {"x": model.optimizer.plan.batches(x, y, optimizer=model.optimizer, seed=0)}


def _fit(arguments, model, steps_per_epoch):
    watch = Stopwatch()
    model.fit(**arguments, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=[watch])
    return watch


def measure_epoch(settings, num_examples, repeats):
    """Returns the figures of the JSON object: ratios, medians in seconds, and rows.

    First updates are measured in new processes, because the first one of a process takes longer.

    Args:
        settings: `steps.Settings`; its `images` are the batch size B.
        num_examples: Int, N.
        repeats: Int, how often each kind is fitted for a few updates; fewer if they take long.
    """
    first = {kind: [] for kind in _PAIR}
    for _ in range(_FIRST):
        for kind in _PAIR:
            PROGRESS.print(f"first update: {steps.KINDS[kind]}")
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                first[kind].append(pool.apply(measure_first, (kind, settings, num_examples)))
    x, y = steps.make_arrays(settings.model, settings.image_size, num_examples)
    plan = _plan(settings, num_examples, _UPDATES * (repeats + 1))
    models = {kind: steps.make_model(kind, settings, plan) for kind in _PAIR}
    fit_arguments = {kind: _data(kind, model, settings, x, y) for kind, model in models.items()}
    seconds = {kind: [] for kind in _PAIR}
    began = time.perf_counter()
    for repeat in range(repeats + 1):
        if repeat > _FEWEST and time.perf_counter() - began > _ENOUGH:
            break
        for kind in _PAIR if repeat % 2 else _PAIR[::-1]:
            PROGRESS.print(f"{repeat} of {repeats}: {steps.KINDS[kind]}")
            times = _fit(fit_arguments[kind], models[kind], _UPDATES).updates
            seconds[kind] += times if repeat else []  # The first repeat is a warm-up.
    drawn = _drawn(plan)
    [size] = microbatches.chosen_sizes(models["private"])
    computed = [size.rows(n) for n in drawn]
    median = {kind: statistics.median(values) for kind, values in seconds.items()}
    first = {kind: np.median(values, axis=0).tolist() for kind, values in first.items()}
    return {
        "end_to_end_ratio": median["private"] / median["ordinary"],
        "first_step_ratio": first["private"][0] / first["ordinary"][0],
        "first_step_cpu_ratio": first["private"][1] / first["ordinary"][1],
        "padding_rows": float(np.mean(computed) - np.mean(drawn)),
        "drawn_rows": float(np.mean(drawn)),
        "capacity": plan.capacity,
        "pass_size": size.examples,
        **{f"{kind}_seconds": value for kind, value in median.items()},
        **{f"first_{kind}_seconds": seconds for kind, (seconds, _) in first.items()},
        **{f"first_{kind}_cpu_seconds": seconds for kind, (_, seconds) in first.items()},
    }


def _drawn(plan):
    """Returns the number of examples in each update, if the plan draws them with seed 0."""
    batches = plan.batches(np.zeros(plan.num_examples, "uint8"), seed=0)
    return [int(np.count_nonzero(weights)) for _, _, weights in batches]


STEPS = 3
# In this folder `python -m` finds this module.
ROOT = pathlib.Path(__file__).parents[2]


class StepFailed(Exception):
    """Raised when a step fails. The message is one line."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Resident memory of a process in MiB.

    Attributes:
        baseline_mib: After the libraries were imported, before data and model were made.
        traced_mib: After tracing, before the first step ran.
        peak_mib: The highest value, after a few steps.
    """

    baseline_mib: float
    traced_mib: float
    peak_mib: float

    @property
    def step_mib(self):
        """Float, the memory of the step beyond the imported libraries in MiB."""
        return self.peak_mib - self.baseline_mib


def measure_peak(kind, settings):
    """Returns the `Peak` of a new process that runs a few steps.

    Args:
        kind: One of `steps.KINDS`.
        settings: `steps.Settings`.

    Raises:
        StepFailed: If the step fails or the process is killed.
    """
    command = [sys.executable, "-m", __name__, kind, json.dumps(dataclasses.asdict(settings))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise StepFailed(f"killed by {name}: most likely out of memory")
    if done.returncode:
        raise StepFailed(done.stderr.strip().splitlines()[-1])
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def check_platform():
    """Raises UserError if this machine does not show the memory of a step as resident memory."""
    if not pathlib.Path("/proc/self/status").exists():
        raise UserError(
            "Flag --memory needs Linux, whose /proc has a process's peak. Received: --memory. "
            "Use --nomemory."
        )
    if tf.config.list_physical_devices("GPU"):
        raise UserError(
            "Flag --memory measures host memory, but TensorFlow sees a GPU. Received: --memory. "
            "Use --nomemory, or hide the GPU with CUDA_VISIBLE_DEVICES=-1."
        )


def _main(kind, settings):
    baseline = resident_mib("VmRSS")
    step = steps.make_step(kind, settings)
    traced = resident_mib("VmRSS")
    for _ in range(STEPS):
        step()
    print(json.dumps(dataclasses.asdict(Peak(baseline, traced, resident_mib("VmHWM")))))


if __name__ == "__main__":
    _main(sys.argv[1], steps.Settings(**json.loads(sys.argv[2])))
