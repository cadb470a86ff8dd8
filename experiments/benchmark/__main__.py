r"""Measures the cost of privacy: time and memory of a training step against an ordinary Keras step.

    python -m experiments.benchmark --model=wrn_16_4 --images=32 --augmult=1

Three steps are timed in turn, in one process and in a random order each time:

    ordinary    keras.optimizers.SGD; with --augmult=K it sees the K * images rows
    private     tfdpx.DPSGD, noise_multiplier=1, on the same rows
    mapped      the same with the model inside of a user's class, so that examples are mapped

A step is a whole one: forward, backward, norms, clipped sums, noise and update, on a batch that is
in memory already. Ratios are of medians, to the ordinary step. Peak memory is measured in a
separate process for each step; `memory_ratio` compares the memory of the steps beyond the imported
libraries, and the raw peaks are reported too (`measures.py` tells exactly what is counted).
These processes run first, so a step that is too large for the machine is killed there and not
timed here.

The last line of the standard output is one JSON object: `step_ratio` (private / ordinary),
`mapped_ratio` (mapped / ordinary), `memory_ratio`, medians in seconds, peaks in MiB, and every
flag. A value that could not be measured is null, and `failures` gives the reason.
"""

import argparse
import dataclasses
import os
import pathlib
import sys

import keras
import tensorflow as tf

import tfdpx
from experiments.benchmark import gpu_table, measures, steps
from tfdpx.layers.few_weights import WHAT
from tfdpx.train.errors import UserError, in_one_line
from tfdpx.train.output import print_table, to_json


def print_results(medians, peaks, failures, title):
    """Prints time and memory of each step, each with its ratio to the ordinary one.

    Args:
        medians: `{kind: seconds}`, kinds as in `steps.KINDS`.
        peaks: `{kind: measures.Peak}`.
        failures: `{kind: text}`, why a step could not be measured.
        title: Heading.
    """
    print(title)
    needs = {kind: peak.step_mib for kind, peak in peaks.items()}
    for kind, name in steps.KINDS.items():
        parts = []
        for values, unit in ((medians, "s"), (needs, "MiB")):
            ratio = measures.ratio(values, kind)
            parts += [f"{values[kind]:.4g} {unit}"] if kind in values else []
            parts += [] if ratio is None else [f"{ratio:.2f} of ordinary"]
        parts += [f"failed: {failures[kind]}"] if kind in failures else []
        print(f"  {name}: {', '.join(parts)}")


def print_layers(choices):
    """Prints how each layer's norm and clipped sum are computed, with the cost of each way.

    Args:
        choices: List of `tfdpx.per_example.cost_model.LayerChoice`.
    """
    print("layer: rule, norm/clipped sum, GFLOP, MiB moved, predicted ms of each way")
    for choice in choices:
        ways = (f"{way} {1e3 * seconds:.3g}" for way, seconds in choice.alternatives.items())
        cost = f"{choice.flops / 1e9:.3g}, {choice.bytes / 2**20:.3g}"
        print(f"  {choice.layer}: {choice.rule}, {choice.norm}/{choice.sum}, {cost},", *ways)


def parse(arguments=None):
    """Returns the flags, a namespace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "--model",
        default="wrn_16_4",
        help="wrn_<depth>_<width>, lenet, small_cnn, scatter_linear, "
        "scatter_cnn; dense_head: one layer, 2048 -> 1000; transformer: 4 encoder blocks of width "
        "256 on 64 tokens; lstm: 128 units on 100 time steps; vit_base, bert_base: 12 blocks of "
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
    add(
        "--individual",
        action="store_true",
        help="Time a private step of --images with and "
        "without individual accounting of --num_examples, and nothing else.",
    )
    add(
        "--users",
        type=int,
        help="Time a private step of --images people with this number of examples each "
        "against one of --images examples with as many views, and nothing else.",
    )
    add("--batch_size", type=int, help="Expected examples of an update of --end_to_end.")
    add("--num_examples", type=int, default=50_000, help="For --end_to_end and --individual.")
    add("--microbatch_size", type=int, help="Examples per pass; default: the predicted fastest.")
    add("--jit", action="store_true", help="Compile the steps with XLA.")
    add("--precision", default="float32", choices=steps.PRECISIONS, help="Dtype of the model.")
    add(
        "--gpu_table",
        action="store_true",
        help="Fill the table of docs/devices.md on this machine's first GPU, and nothing else.",
    )
    add("--norms", default="auto", choices=steps.NORMS, help="How per-example norms are computed.")
    add("--repeats", type=int, default=10, help="Runs of each step, from which medians are taken.")
    add("--nomemory", dest="memory", action="store_false", help="Leave peak memory out.")
    add("--nomapped", dest="mapped", action="store_false", help="Leave the mapped model out.")
    add("--explain", action="store_true", help="Print which rule, norm and sum each layer uses.")
    add("--workdir", type=pathlib.Path, help="Folder for benchmark.json, if any.")
    return parser.parse_args(arguments)  # fmt: skip


def main(arguments=None):
    """Measures according to the flags; errors of the user become one line."""
    values = parse(arguments)
    with in_one_line("experiments.benchmark"):
        settings = read_settings(values)
        if values.workdir is not None:
            values.workdir.mkdir(parents=True, exist_ok=True)
        if values.gpu_table:
            record = {**_given(values), **gpu_table.measure(values.repeats)}
        elif values.end_to_end or values.individual or values.users:
            record = {**_given(values), **_one_comparison(settings, values)}
        else:
            record = benchmark(settings, values)
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
    if values.end_to_end:
        _check_end_to_end(values)
    elif values.individual or values.users:
        _check_individual(values)
    elif values.memory:
        measures.check_platform()
    names = {field.name for field in dataclasses.fields(steps.Settings)}
    arguments = {name: getattr(values, name) for name in names}
    if values.end_to_end:
        arguments["images"] = values.batch_size
    settings = steps.Settings(**arguments)
    steps.make_model("private", settings)  # Model and optimizer check their arguments.
    return settings


def _check_end_to_end(values):
    """Raises UserError unless --batch_size and --num_examples make a plan."""
    if values.batch_size is None or not 1 <= values.batch_size <= values.num_examples:
        raise UserError(
            "Flag --end_to_end needs --batch_size between 1 and --num_examples. Received: "
            f"--batch_size={values.batch_size} --num_examples={values.num_examples}."
        )
    if values.explain or values.individual or values.augmult != 1:
        raise UserError("Flag --end_to_end goes without --augmult, --explain and --individual.")


def _check_individual(values):
    """Raises UserError unless the step is one of a plan, and nothing else is measured."""
    if values.augmult != 1 or values.explain:
        raise UserError("Flags --individual and --users go without --augmult and --explain.")
    if values.images > values.num_examples:
        raise UserError(
            "Flags --individual and --users need --images up to --num_examples. Received: "
            f"--images={values.images} --num_examples={values.num_examples}."
        )


def benchmark(settings, values):
    """Measures, prints tables, and returns the content of the last line of output.

    Args:
        settings: `steps.Settings`.
        values: The parsed flags.
    """
    kinds = [kind for kind in steps.KINDS if values.mapped or kind != "mapped"]
    failures, extras = {}, {}

    peaks = measures.measure_memory(kinds, settings, failures) if values.memory else {}
    # A step that was killed in its process would kill this one.
    kinds = [kind for kind in kinds if kind not in failures]
    medians = measures.measure_time(kinds, settings, values.repeats, failures)
    print_results(medians, peaks, failures, _title(settings))

    if values.explain:
        with measures.noting(failures, "explain"):
            choices = steps.layer_choices(settings)
            print_layers(choices)
            extras["layers"] = [dataclasses.asdict(choice) for choice in choices]

    return {
        **_given(values),
        **measures.summary(medians, peaks),
        **extras,
        "failures": failures,
    }


def _one_comparison(settings, values):
    """Makes the comparison of a flag, prints it as a table and returns it."""
    measure = measures.measure_epoch if values.end_to_end else measures.measure_individual
    measure = measures.measure_users if values.users else measure
    record = measure(settings, values.num_examples, values.repeats)
    print_table(record, title=f"{settings.model}, {values.num_examples} examples")
    return record


def _given(values):
    """Returns the flags, and other conditions of the figures."""
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
