r"""What private training on many chips would take, on paper: computed from a model and a plan.

    python -m experiments.high_accuracy.scaling --model=nf_resnet_50 --image_size=224 \
        --batch_size=16384 --augmult=4 --chips=8,64,256,1024

Nothing is measured here. Per update and replica (one a chip) it gives the arithmetic of the
private step, the bytes that are all-reduced, the noise, the memory, and what the hosts must
deliver; then which of these limits first. The last line is one JSON object. docs/scaling.md
discusses the figures.
"""

import argparse
import dataclasses
import json

from rich import console, table

import tfdpx
from experiments.high_accuracy import scaling_model
from tfdpx.train.config.errors import checking_flags, in_one_line
from tfdpx.train.run import classifiers


def main(arguments=None):
    """Prints the table and the JSON line; errors of the user become one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--model", default="nf_resnet_50", help=f"One of: {classifiers.NAMES}.")
    add("--image_size", type=int, default=224, help="Height and width of an image.")
    add("--num_classes", type=int, default=1000)
    add("--num_examples", type=int, default=1_271_167, help="Training examples.")
    add("--batch_size", type=int, default=16_384, help="Expected examples an update.")
    add("--steps", type=int, default=71_589, help="Updates.")
    add("--noise_multiplier", type=float, default=2.5)
    add("--delta", type=float, default=8e-7)
    add("--augmult", type=int, default=4, help="Views of each example; 0: none.")
    add("--chips", default="8,32,128,256,512,1024,4096")
    add("--utilization", type=float, default=0.3, help="Assumed share of the peak arithmetic.")
    add("--decode_rate", type=float, default=400.0, help="JPEG images a core decodes a second.")
    add("--draw_rate", type=float, default=1e8, help="Examples a core draws from a second.")
    values = parser.parse_args(arguments)
    with in_one_line("experiments.high_accuracy.scaling"):
        plan, workload = _workload(values)
    rates = values.utilization, values.decode_rate, values.draw_rate
    rows = [
        scaling_model.per_update(workload, chips, scaling_model.V4, *rates)
        for chips in sorted(map(int, values.chips.split(",")))
    ]
    print_table(rows, f"{values.model}, {plan.batch_size:,} examples an update, on paper")
    for row in rows:
        row["limits"] = scaling_model.limits(row, scaling_model.V4)
        print(f"{row['chips']:>5,} chips:", *row["limits"] or ["Arithmetic alone limits."])
    record = {
        "model": values.model,
        "image_size": values.image_size,
        "epsilon": plan.epsilon,
        "padding": plan.capacity / plan.batch_size - 1,
        "steps": plan.steps,
        **dataclasses.asdict(workload),
        "private_over_ordinary_flops": workload.example_flops / workload.ordinary_flops,
        "spread": rows,
    }
    print(json.dumps(record))


def _workload(values):
    """The plan and the workload that the flags describe."""
    image_shape = (values.image_size, values.image_size, 3)
    with checking_flags():
        plan = tfdpx.PrivacyPlan(
            num_examples=values.num_examples,
            batch_size=values.batch_size,
            steps=values.steps,
            noise_multiplier=values.noise_multiplier,
            delta=values.delta,
            accountant="rdp",
        )
    model = classifiers.build(values.model, image_shape, values.num_classes, centre=127.5)
    return plan, scaling_model.workload_of(model, plan, values.augmult, image_shape)


def print_table(rows, title):
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
    printed = table.Table(title=title)
    for heading in headings:
        printed.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        printed.add_row(*(how.format(row[key]) for key, how in headings.items()))
    console.Console(width=140).print(printed)


if __name__ == "__main__":
    main()
