"""The table of docs/devices.md: private steps against ordinary ones on a GPU.

Each row runs in a separate process, because TensorFlow keeps a GPU's memory until its process ends.
"""

import itertools
import json
import subprocess
import sys

import tensorflow as tf

from experiments.benchmark import steps
from tfdpx.train.errors import UserError

# Model, trainable weights, and examples per step.
ROWS = (("wrn_16_4", "all", 256), ("vit_base", "lora", 64), ("bert_base", "all", 64))


def measure(repeats):
    """Prints the table in Markdown, and returns its rows.

    Args:
        repeats: Int, runs of each step.

    Returns:
        Dict with the name of the GPU and a list of rows, in the order of the table.

    Raises:
        UserError: If TensorFlow sees no GPU.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        raise UserError(
            "Flag --gpu_table needs a GPU, and TensorFlow sees none. Install "
            "`pip install 'tensorflow[and-cuda]'` on a machine with one (docs/devices.md)."
        )
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", gpus[0].name)
    print(f"| {name} | weights | batch | precision | XLA | ordinary, ms | private, ms | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for (model, trained, images), precision, jit in itertools.product(
        ROWS, steps.PRECISIONS, (False, True)
    ):
        row = _row(model, trained, images, precision, jit, repeats)
        milliseconds = [f"{1e3 * (row[f'{kind}_seconds'] or float('nan')):.3g}" for kind in _PAIR]
        ratio = f"{row['step_ratio'] or float('nan'):.2f}"
        about = (model, trained, str(images), precision, "yes" if jit else "no")
        print(f"| {' | '.join((*about, *milliseconds, ratio))} |", flush=True)
        rows.append(row)
    return {"gpu": name, "rows": rows}


_PAIR = ("ordinary", "private")


def _row(model, trained, images, precision, jit, repeats):
    """Returns the record of one benchmark, a dict; its figures are None if it failed."""
    settings = dict(model=model, trainable=trained, images=images, precision=precision)
    command = [sys.executable, "-m", "experiments.benchmark", f"--repeats={repeats}"]
    command += [f"--{name}={value}" for name, value in settings.items()]
    command += ["--nomemory", "--nomapped", *(["--jit"] if jit else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        return json.loads(lines[-1])
    error = (done.stderr.strip() or "no message").splitlines()[-1]
    empty = dict.fromkeys(("step_ratio", *(f"{kind}_seconds" for kind in _PAIR)))
    return {**settings, "jit": jit, **empty, "failures": {"process": error}}
