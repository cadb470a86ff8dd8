"""Time and memory of the kinds of step, compared; what fails is noted and leaves the rest alone."""

import contextlib
import statistics
import traceback

from rich import console

from experiments.benchmark import memory, steps
from tfdpx.train.config.errors import UserError

# Keeps the standard output for results.
PROGRESS = console.Console(stderr=True)


def measure_memory(kinds, settings, failures):
    """`{kind: memory.Peak}`; a kind that fails is noted in the dict `failures`."""
    peaks = {}
    for kind in kinds:
        PROGRESS.print(f"memory: {steps.KINDS[kind]}")
        try:
            peaks[kind] = memory.measure(kind, settings)
        except memory.StepFailed as failure:
            failures[kind] = str(failure)
    return peaks


def measure_time(kinds, settings, repeats, failures):
    """`{kind: median seconds}`; a kind that fails is noted in the dict `failures`."""
    traced = {}
    for kind in kinds:
        PROGRESS.print(f"tracing: {steps.KINDS[kind]}")
        with noting(failures, kind):
            traced[kind] = steps.make_step(kind, settings)
    PROGRESS.print(f"timing {repeats} times")
    seconds = steps.interleaved(traced, repeats)
    return {kind: statistics.median(found) for kind, found in seconds.items()}


def ratio(values, kind):
    """`values[kind]` over the ordinary step's, None unless both were measured."""
    return values[kind] / values["ordinary"] if {kind, "ordinary"} <= values.keys() else None


def summary(medians, peaks):
    """Medians, peaks and their ratios, None for what was not measured.

    Args:
        medians: `{kind: seconds}`.
        peaks: `{kind: memory.Peak}`.
    """
    record = {}
    needs = {kind: peak.step_mib for kind, peak in peaks.items()}
    for kind in steps.KINDS:
        record[f"{kind}_seconds"] = medians.get(kind)
        for name in ("peak_mib", "baseline_mib", "traced_mib"):
            record[f"{kind}_{name}"] = getattr(peaks[kind], name) if kind in peaks else None
        record[f"{kind}_step_mib"] = needs.get(kind)
    return {
        "step_ratio": ratio(medians, "private"),
        "memory_ratio": ratio(needs, "private"),
        "mapped_ratio": ratio(medians, "mapped"),
        "mapped_memory_ratio": ratio(needs, "mapped"),
        **record,
    }


@contextlib.contextmanager
def noting(failures, part):
    """Notes why `part` could not be measured: the others are still worth it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip() or "no message").splitlines()[0]
        failures[part] = f"{type(error).__name__}: {first}"
        PROGRESS.print(f"[red]{part} failed[/red]")
