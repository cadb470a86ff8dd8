r"""Measures the cost of privacy: time and memory of a training step against an ordinary Keras step.

    python -m experiments.benchmark --model=wrn_16_4 --images=32 --augmult=1

All kinds of step in --kinds are timed in one process. In each round every kind has a turn, in
random order:

    ordinary    keras.optimizers.SGD; with --augmult=K on a batch of K * images
    private     tfdpx.DPSGD, noise_multiplier=1, on the same images
    mapped      private, with the model wrapped in a user's class, so tfdpx maps it over examples
    individual  private, with individual accounting of --num_examples
    users       private, with the K views as the examples of one person

A step contains everything: forward and backward pass, norms, clipped sums, noise and update. Its
batch is in memory already. Ratios divide a kind's median by the median of the first kind. Peak
memory is measured in a separate process for each kind: `process_memory_ratio` compares the peaks,
and `step_memory_ratio` compares the memory beyond the imported libraries (see `measures.py`). These
processes run first. If the machine has too little memory for a step, its process is killed, and the
step is not timed.

The last line of the standard output is one JSON object: `step_ratio` (private / ordinary),
`mapped_ratio` (mapped / ordinary), `cpu_ratio`, both ratios of memory, medians in seconds, peaks in
MiB, and every flag. `cpu_ratio` compares the CPU time of all cores together, which depends less on
other programs; to measure one thread, begin the command with `taskset -c 0`. A value that could not
be measured is null, and `failures` gives the reason.
"""

import argparse
import dataclasses
import os
import pathlib
import sys

import keras
import tensorflow as tf

import tfdpx
from experiments.benchmark import measures, steps
from tfdpx.layers.few_weights import WHAT
from tfdpx.train.errors import UserError, in_one_line
from tfdpx.train.output import print_table, to_json


def parse(arguments=None):
    """Returns the flags, a namespace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "--model",
        default="wrn_16_4",
        help="wrn_<depth>_<width>, lenet, small_cnn, scatter_linear, "
        "scatter_cnn; dense_head: one layer, 2048 -> 1000; transformer: 4 encoder blocks of width "
        "256 on 64 tokens; mobilenet: MobileNetV2 on 64x64 images; lstm: 128 units "
        "on 100 time steps; vit_base, bert_base: 12 blocks of "
        "width 768; billion: 19 of width 2048.",
    )
    add("--images", type=int, default=32, help="Examples per step.")
    add("--trainable", default="all", choices=("all", *WHAT), help="Weights to train.")
    add("--augmult", type=int, default=1, help="Views of each example.")
    add("--image_size", type=int, help="Height and width; default: 32 for models of images.")
    add(
        "--end_to_end",
        action="store_true",
        help="Time updates of fit(plan.batches(...)) against "
        "fit on shuffled batches, and nothing else.",
    )
    add("--batch_size", type=int, help="Expected examples of an update of --end_to_end.")
    add("--num_examples", type=int, default=50_000, help="For --end_to_end, individual.")
    add("--microbatch_size", type=int, help="Examples per pass; default: the predicted fastest.")
    add("--jit", action="store_true", help="Compile the steps with XLA.")
    add("--precision", default="float32", choices=steps.PRECISIONS, help="Dtype of the model.")
    add("--norms", default="auto", choices=steps.NORMS, help="How per-example norms are computed.")
    add("--repeats", type=int, default=10, help="Runs of each step, from which medians are taken.")
    add("--nomemory", dest="memory", action="store_false", help="Leave peak memory out.")
    add("--kinds", default="ordinary,private,mapped", help=f"Of {', '.join(steps.KINDS)}.")
    add("--explain", action="store_true", help="Print which rule, norm and sum each layer uses.")
    add("--workdir", type=pathlib.Path, help="Folder for benchmark.json, if any.")
    return parser.parse_args(arguments)  # fmt: skip


def main(arguments=None):
    """Runs the benchmark of the flags. A `UserError` is printed as one line."""
    values = parse(arguments)
    with in_one_line("experiments.benchmark"):
        settings = read_settings(values)
        if values.workdir is not None:
            values.workdir.mkdir(parents=True, exist_ok=True)
        record = _end_to_end(settings, values) if values.end_to_end else benchmark(settings, values)
    text = to_json(record)
    if values.workdir is not None:
        (values.workdir / "benchmark.json").write_text(text + "\n")
    print(text, flush=True)
    if record.get("step_ratio", 0) is None:
        sys.exit(1)


def read_settings(values):
    """Returns the `steps.Settings` of the flags, checked as far as possible without measuring."""
    if values.repeats < 1:
        raise UserError(f"Flag --repeats must be at least 1. Received: --repeats={values.repeats}.")
    if unknown := [kind for kind in values.kinds.split(",") if kind not in steps.KINDS]:
        raise UserError(f"Flag --kinds takes {', '.join(steps.KINDS)}. Received: {unknown[0]}.")
    if values.end_to_end and not 1 <= (values.batch_size or 0) <= values.num_examples:
        raise UserError(
            "Flag --end_to_end needs --batch_size between 1 and --num_examples. Received: "
            f"--batch_size={values.batch_size} --num_examples={values.num_examples}."
        )
    if values.memory and not values.end_to_end:
        measures.check_platform()
    names = {field.name for field in dataclasses.fields(steps.Settings)}
    arguments = {name: getattr(values, name) for name in names}
    if values.end_to_end:
        arguments["images"] = values.batch_size
    settings = steps.Settings(**arguments)
    steps.make_model("private", settings)  # Model and optimizer check their arguments.
    return settings


def benchmark(settings, values):
    """Measures, prints tables, and returns the content of the last line of output.

    Args:
        settings: `steps.Settings`.
        values: The parsed flags.
    """
    kinds = values.kinds.split(",")
    failures, extras = {}, {}

    peaks = measures.measure_memory(kinds, settings, failures) if values.memory else {}
    # A step that had its own process killed would have this process killed, too.
    timed = [kind for kind in kinds if kind not in failures]
    medians = measures.measure_time(timed, settings, values.repeats, failures)
    summary = measures.summary(kinds, *medians, peaks)
    print(_title(settings))
    for kind in kinds:
        print(f"  {steps.KINDS[kind]}: {summary[f'{kind}_seconds']} s", failures.get(kind, ""))

    if values.explain:
        with measures.noting(failures, "explain"):
            choices = steps.layer_choices(settings)
            print(choices)
            extras["layers"] = [dataclasses.asdict(choice) for choice in choices]

    return {
        **_given(values),
        **summary,
        **extras,
        "failures": failures,
    }


def _end_to_end(settings, values):
    """Times the updates of whole fits, prints the figures as a table and returns them."""
    figures = measures.measure_epoch(settings, values.num_examples, values.repeats)
    print_table(figures, title=f"{settings.model}, {values.num_examples} examples")
    return {**_given(values), **figures}


def _given(values):
    """Returns a dict of the flags and other conditions, for example versions of libraries."""
    return {
        **vars(values),
        "workdir": values.workdir and str(values.workdir),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfdpx": tfdpx.__version__,
        "cpus": os.cpu_count(),
    }


def _title(settings):
    size = "" if settings.image_size is None else f" of {settings.image_size} pixels squared"
    description = f"{settings.model}, {settings.images} examples{size}, augmult {settings.augmult}"
    passes = settings.microbatch_size and f", microbatch_size {settings.microbatch_size}"
    description += f", trains {settings.trainable}{passes or ''}{', XLA' if settings.jit else ''}"
    return f"{description}, norms {settings.norms}"


if __name__ == "__main__":
    main()
