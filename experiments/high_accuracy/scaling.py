r"""What private training on many chips would take, on paper: computed from a model and a plan.

    python -m experiments.high_accuracy.scaling --model=nf_resnet_50 --image_size=224 --batch_size=16384 \
        --augmult=4 --chips=8,64,256,1024

Nothing is measured here. Per update and replica (one a chip) it tells the arithmetic of the
private step, the bytes that are all-reduced, the noise, the memory, and what the hosts must
deliver; then which of these limits first. The last line is one JSON object. docs/scaling.md
discusses the figures.
"""

import dataclasses
import json
import sys

from absl import app, flags
from rich import console, table

import tfdpx
from experiments.high_accuracy import scaling_model
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.run import classifiers

_MODEL = flags.DEFINE_string("model", "nf_resnet_50", f"One of: {classifiers.NAMES}.")
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 224, "Height and width of an image.")
_CLASSES = flags.DEFINE_integer("num_classes", 1000, "Classes.")
_EXAMPLES = flags.DEFINE_integer("num_examples", 1_271_167, "Training examples.")
_BATCH = flags.DEFINE_integer("batch_size", 16_384, "Expected examples an update.")
_STEPS = flags.DEFINE_integer("steps", 71_589, "Updates.")
_SIGMA = flags.DEFINE_float("noise_multiplier", 2.5, "Noise multiplier.")
_DELTA = flags.DEFINE_float("delta", 8e-7, "The delta of the guarantee.")
_AUGMULT = flags.DEFINE_integer("augmult", 4, "Views of each example; 0: none.")
_CHIPS = flags.DEFINE_list("chips", ["8", "32", "128", "256", "512", "1024", "4096"], "Chips.")
_UTILIZATION = flags.DEFINE_float("utilization", 0.3, "Assumed share of the peak arithmetic.")
_DECODE_RATE = flags.DEFINE_float("decode_rate", 400.0, "JPEG images a core decodes a second.")
_DRAW_RATE = flags.DEFINE_float("draw_rate", 1e8, "Examples a core looks at a second, drawing.")


def main(argv):
    """Prints the table and the JSON line; errors of the user become one line."""
    del argv
    try:
        plan, workload = _ask()
    except UserError as error:
        sys.exit(f"experiments.high_accuracy.scaling: {error}")
    rows = [
        scaling_model.per_update(
            workload,
            chips,
            scaling_model.V4,
            _UTILIZATION.value,
            _DECODE_RATE.value,
            _DRAW_RATE.value,
        )
        for chips in sorted(map(int, _CHIPS.value))
    ]
    print_table(rows)
    for row in rows:
        row["limits"] = scaling_model.limits(row, scaling_model.V4)
        print(f"{row['chips']:>5,} chips:", *row["limits"] or ["Arithmetic alone limits."])
    record = {
        "model": _MODEL.value,
        "image_size": _IMAGE_SIZE.value,
        "epsilon": plan.epsilon,
        "padding": plan.capacity / plan.batch_size - 1,
        "steps": plan.steps,
        **dataclasses.asdict(workload),
        "private_over_ordinary_flops": workload.example_flops / workload.ordinary_flops,
        "spread": rows,
    }
    print(json.dumps(record))


def _ask():
    """The plan and the workload that the flags describe."""
    image_shape = (_IMAGE_SIZE.value, _IMAGE_SIZE.value, 3)
    with checking_flags():
        plan = tfdpx.PrivacyPlan(
            num_examples=_EXAMPLES.value,
            batch_size=_BATCH.value,
            steps=_STEPS.value,
            noise_multiplier=_SIGMA.value,
            delta=_DELTA.value,
            accountant="rdp",
        )
    model = classifiers.build(_MODEL.value, image_shape, _CLASSES.value, centre=127.5)
    return plan, scaling_model.workload_of(model, plan, _AUGMULT.value, image_shape)


def print_table(rows):
    """Prints a row for each number of chips."""
    headings = {
        "chips": "{:,}",
        "hosts": "{:,}",
        "rows_per_replica": "{:,}",
        "microbatch_size_that_fits": "{:,}",
        "compute": "{:.4f}",
        "all_reduce": "{:.5f}",
        "noise": "{:.5f}",
        "update": "{:.4f}",
        "efficiency": "{:.1%}",
        "examples_per_second": "{:,.0f}",
        "host_bytes_per_second": "{:.3g}",
        "host_cores_decoding": "{:.1f}",
        "drawing": "{:.4f}",
    }
    printed = table.Table(title=f"{_MODEL.value}, {_BATCH.value:,} examples an update, on paper")
    for heading in headings:
        printed.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        printed.add_row(*(how.format(row[key]) for key, how in headings.items()))
    console.Console(width=140).print(printed)


if __name__ == "__main__":
    app.run(main)
