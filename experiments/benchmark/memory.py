"""Peak memory of one kind of training step, in a process of its own.

What is measured is the resident memory of the process, as the kernel counts it: the baseline once
TensorFlow, Keras and tfdpx are imported, and the highest value since, after tracing the step and
taking a few. The difference so holds the data, the weights, the traced graph, for a private step
the checks of its first call, and what the allocator keeps; a user has to find memory for all that.
Without the baseline subtracted the ratio would flatter: the libraries weigh the same in each.
"""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys

import tensorflow as tf

from experiments.benchmark import steps
from tfdpx.train.config.errors import UserError

STEPS = 3
# Where `-m` finds this module, in whatever folder the program was started.
ROOT = pathlib.Path(__file__).parents[2]


class StepFailed(Exception):
    """A step that could not be taken; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Peak:
    """Resident memory of a process in MiB.

    Attributes:
        baseline_mib: Once the libraries were imported, before data and model were made.
        traced_mib: Before the first step ran: with data, model, graph, and what tracing left.
        peak_mib: The highest.
    """

    baseline_mib: float
    traced_mib: float
    peak_mib: float

    @property
    def step_mib(self):
        """What the step added to the imported libraries."""
        return self.peak_mib - self.baseline_mib


def measure(kind, settings):
    """The `Peak` of a new process that takes a few steps.

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
    """Raises UserError where resident memory cannot be read, or is not what a step needs."""
    if not pathlib.Path("/proc/self/status").exists():
        raise UserError(
            "Flag --memory needs Linux, whose /proc has a process's peak. Received: --memory. "
            "Use --nomemory."
        )
    if tf.config.list_physical_devices("GPU"):
        raise UserError(
            "Flag --memory measures host memory, and TensorFlow sees a GPU. Received: --memory. "
            "Use --nomemory, or hide the GPU with CUDA_VISIBLE_DEVICES=-1."
        )


def resident_mib(field):
    """A field of /proc/self/status in MiB: `VmRSS` is the resident memory, `VmHWM` its peak.

    The peak of `resource.getrusage` would not do: a process inherits it from the one it was forked
    from.
    """
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no field {field}.")


def _main(kind, settings):
    baseline = resident_mib("VmRSS")
    step = steps.make_step(kind, settings)
    traced = resident_mib("VmRSS")
    for _ in range(STEPS):
        step()
    print(json.dumps(dataclasses.asdict(Peak(baseline, traced, resident_mib("VmHWM")))))


if __name__ == "__main__":
    _main(sys.argv[1], steps.Settings(**json.loads(sys.argv[2])))
