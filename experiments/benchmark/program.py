r"""Measures what privacy costs: time and memory of a training step against an ordinary Keras step.

    python -m experiments.benchmark --model=wrn_16_4 --images=32 --augmult=1

Three steps are timed in turn, in one process and in a random order each time:

    ordinary    keras.optimizers.SGD; with --augmult=K it sees the K * images rows
    private     tfdpx.DPSGD, noise_multiplier=1, on the same rows
    mapped      the same with the model in a class of a user's, so that examples are mapped

A step is a whole one: forward, backward, norms, clipped sums, noise and update, on a batch that is
in memory already. Ratios are of medians, to the ordinary step. Peak memory is of a process of
its own for each step; `memory_ratio` compares what the steps need beyond the imported libraries,
and the raw peaks are given too (experiments.benchmark.memory says exactly what is counted).
These processes come first, so a step that is too large for the machine is killed there and not
timed here.

The last line of the standard output is one JSON object: `step_ratio` (private / ordinary),
`mapped_ratio` (mapped / ordinary), `memory_ratio`, medians in seconds, peaks in MiB, and every
flag. A value that could not be measured is null, and `failures` says why.
"""

import dataclasses
import os
import pathlib
import sys

import keras
import tensorflow as tf
from absl import flags

import tfdpx
from experiments.benchmark import (
    comparison,
    end_to_end,
    growth,
    individual,
    memory,
    phases,
    steps,
    tables,
    users,
)
from tfdpx.layers.trainable import WHAT
from tfdpx.train.config.errors import UserError, in_one_line
from tfdpx.train.report.record import to_json


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`.

    A function, since other binaries of this package have flags of the same names.
    """
    common = {"flag_values": values}
    flags.DEFINE_string(
        "model",
        "wrn_16_4",
        "wrn_<depth>_<width>, lenet, small_cnn, scatter_linear, scatter_cnn; dense_head: one "
        "layer, 2048 -> 1000; transformer: 4 encoder blocks of width 256 on 64 tokens; vit_base, "
        "bert_base: 12 blocks of width 768; billion: 19 of width 2048.",
        **common,
    )
    flags.DEFINE_integer("images", 32, "Examples a step.", **common)
    words = ("all", *WHAT)
    flags.DEFINE_enum(
        "trainable", "all", words, "Weights to train, by tfdpx.layers.trainable.", **common
    )
    flags.DEFINE_integer("augmult", 1, "Views of each example.", **common)
    flags.DEFINE_integer(
        "image_size",
        None,
        "Height and width of an image. Default: 32 for models of images.",
        **common,
    )
    flags.DEFINE_bool(
        "end_to_end",
        False,
        "Time updates of fit(plan.batches(...)) against fit on shuffled batches, and nothing else.",
        **common,
    )
    flags.DEFINE_bool(
        "individual",
        False,
        "Time a private step of --images with and without individual accounting of --num_examples, "
        "and nothing else.",
        **common,
    )
    flags.DEFINE_integer(
        "users",
        None,
        "Time a private step of --images people of so many examples each against one of --images "
        "examples with as many views, and nothing else.",
        **common,
    )
    flags.DEFINE_integer(
        "batch_size", None, "Expected examples of an update of --end_to_end.", **common
    )
    flags.DEFINE_integer(
        "num_examples", 50_000, "Examples of --end_to_end and --individual.", **common
    )
    flags.DEFINE_integer(
        "microbatch_size",
        None,
        "Examples a pass of the private steps. Default: what is predicted to take least time.",
        **common,
    )
    flags.DEFINE_bool("jit", False, "Compile the steps with XLA.", **common)
    flags.DEFINE_enum("norms", "auto", steps.NORMS, "How tfdpx forms per-example norms.", **common)
    flags.DEFINE_integer("repeats", 10, "Runs of each step; medians are over them.", **common)
    flags.DEFINE_bool("memory", True, "Measure peak memory.", **common)
    flags.DEFINE_bool("mapped", True, "Measure a subclassed model too.", **common)
    flags.DEFINE_bool(
        "explain", False, "Print which rule, norm and sum each layer uses, and why.", **common
    )
    flags.DEFINE_bool("profile", False, "Print where the private step's time goes.", **common)
    sizes = ", ".join(map(str, growth.SIZES))
    flags.DEFINE_bool(
        "sweep", False, f"Also time {sizes} views, and batches of {sizes}, and draw it.", **common
    )
    flags.DEFINE_string(
        "plot",
        None,
        "PNG file for --sweep. Default: benchmark.png in --workdir, or here.",
        **common,
    )
    flags.DEFINE_string("workdir", None, "Folder that receives report.json, if given.", **common)


def main(argv, values=flags.FLAGS):
    """Measures what the flags ask for; errors of the user become one line."""
    with in_one_line("experiments.benchmark", argv):
        settings = read_settings(values)
        plot = prepare_output(values)
        if values.end_to_end or values.individual or values.users:
            record = {**_given(settings, values), **_one_comparison(settings, values)}
        else:
            record = benchmark(settings, values, plot)
    text = to_json(record)
    if values.workdir is not None:
        (pathlib.Path(values.workdir) / "benchmark.json").write_text(text + "\n")
    print(text, flush=True)
    if record.get("step_ratio", 0) is None:
        sys.exit(1)


def read_settings(values):
    """The `steps.Settings` of the flags, checked as far as it goes without measuring."""
    size = values.microbatch_size
    if values.repeats < 1:
        raise UserError(f"Flag --repeats must be at least 1. Received: --repeats={values.repeats}.")
    if values.profile and size is not None:
        raise UserError(
            "Flag --profile takes a step of one pass apart. Received: "
            f"--profile --microbatch_size={size}. Leave --microbatch_size out."
        )
    if values.plot is not None and not values.sweep:
        raise UserError(f"Flag --plot belongs to --sweep. Received: --plot={values.plot}.")
    if values.end_to_end:
        _check_end_to_end(values)
    elif values.individual or values.users:
        _check_individual(values)
    elif values.memory:
        memory.check_platform()
    names = {field.name for field in dataclasses.fields(steps.Settings)}
    given = {name: getattr(values, name) for name in names}
    if values.end_to_end:
        given["images"] = values.batch_size
    settings = steps.Settings(**given)
    steps.make_model("private", settings)  # Model and optimizer check their arguments.
    return settings


def _check_end_to_end(values):
    """Raises UserError unless --batch_size and --num_examples give a plan."""
    if values.batch_size is None or not 1 <= values.batch_size <= values.num_examples:
        raise UserError(
            "Flag --end_to_end needs --batch_size between 1 and --num_examples. Received: "
            f"--batch_size={values.batch_size} --num_examples={values.num_examples}."
        )
    wrong = [n for n in ("sweep", "profile", "explain", "individual") if getattr(values, n)]
    if wrong or values.augmult != 1:
        raise UserError(
            "Flag --end_to_end goes without --augmult, --sweep, --profile, --explain and "
            "--individual."
        )


def _check_individual(values):
    """Raises UserError unless the step is one of a plan, with nothing else to be measured."""
    if values.augmult != 1 or values.sweep or values.profile or values.explain:
        raise UserError(
            "Flags --individual and --users go without --augmult, --sweep, --profile and --explain."
        )
    if values.images > values.num_examples:
        raise UserError(
            "Flags --individual and --users need --images up to --num_examples. Received: "
            f"--images={values.images} --num_examples={values.num_examples}."
        )


def prepare_output(values):
    """Makes --workdir and returns where the sweep is to be drawn."""
    folder = pathlib.Path(values.workdir or ".")
    plot = folder / "benchmark.png" if values.plot is None else pathlib.Path(values.plot)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plot.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write to --workdir or --plot: {error}.") from error
    return plot


def benchmark(settings, values, plot):
    """Measures, prints tables, and returns what the last line of output says.

    Args:
        settings: `steps.Settings`.
        values: The parsed flags.
        plot: PNG file for the sweep.
    """
    kinds = [kind for kind in steps.KINDS if values.mapped or kind != "mapped"]
    failures, extras = {}, {}

    peaks = comparison.measure_memory(kinds, settings, failures) if values.memory else {}
    # A step that was killed there would kill this process.
    kinds = [kind for kind in kinds if kind not in failures]
    medians = comparison.measure_time(kinds, settings, values.repeats, failures)
    tables.results(medians, peaks, failures, _title(settings))

    if values.explain:
        with comparison.noting(failures, "explain"):
            choices = steps.layer_choices(settings)
            tables.layers(choices)
            extras["layers"] = [dataclasses.asdict(choice) for choice in choices]
    if values.profile:
        comparison.PROGRESS.print("profile")
        with comparison.noting(failures, "profile"):
            seconds, ordinary = phases.measure(settings, values.repeats)
            tables.phases(seconds, ordinary)
            extras["phases"] = seconds
    if values.sweep:
        with comparison.noting(failures, "sweep"):
            points = growth.measure(settings, values.repeats, comparison.PROGRESS.print)
            growth.draw(points, plot, f"{settings.model}{', XLA' if settings.jit else ''}")
            extras["sweep_points"] = points
            print(f"The sweep is drawn in {plot}.")

    return {
        **_given(settings, values),
        **comparison.summary(medians, peaks),
        **extras,
        "failures": failures,
    }


def _one_comparison(settings, values):
    """What `measure` of the module that a flag names finds, also as a table."""
    measure = end_to_end.measure if values.end_to_end else individual.measure
    measure = users.measure if values.users else measure
    record = measure(settings, values.num_examples, values.repeats)
    tables.figures(record, f"{settings.model}, {values.num_examples} examples")
    return record


def _given(settings, values):
    """The flags, and what else the figures depend on."""
    own_flags = flags.FlagValues()
    define_flags(own_flags)
    return {
        **{name: getattr(values, name) for name in own_flags},
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfdpx": tfdpx.__version__,
        "cpus": os.cpu_count(),
    }


def _title(settings):
    size = "" if settings.image_size is None else f" of {settings.image_size} pixels squared"
    given = f"{settings.model}, {settings.images} examples{size}, augmult {settings.augmult}"
    passes = settings.microbatch_size and f", microbatch_size {settings.microbatch_size}"
    given += f", trains {settings.trainable}{passes or ''}{', XLA' if settings.jit else ''}"
    return f"{given}, norms {settings.norms}"
