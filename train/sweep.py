r"""Trains at every point of a grid at a fixed budget, and writes a table of what came out.

    python -m tfdpx.train.sweep --preset=digits --epsilon=8 --seeds=0,1,2 --workdir=runs/sweep \
        --grid="learning_rate=1,2,4;batch_size=256,512,1024"

Any setting of `tfdpx.train.classify` can be swept, and so can presets (`--grid="preset=a,b"`). Any
of its flags holds for all runs. Of
noise_multiplier, epsilon, steps and batch_size one is solved for, as there: sweeping the batch size
at one epsilon and number of steps changes the noise. A grid that would change epsilon silently
is refused. A sweep chooses, so accuracy is that on training images held out (a quarter, unless
preset or flags say otherwise) and not on test images, unless --final or --eval_split=test asks for
them.

The working directory receives:

    table.csv  one row a run: swept settings, seed, accuracy, and its report
    runs/      the folder of each run, with its log

A sweep that was interrupted resumes when it is started again with the same --workdir, also with
more values or seeds; runs that failed are run again. --table_only writes the table of the runs that
have finished. The last line of the standard output is one JSON object.

The guarantee that a run states is for that run alone: choosing among runs on the private data, or
releasing several, is not covered by it. --private_tuning=M covers it (Papernot and Steinke 2021): a
random number of runs, M on average, each at a point of the grid drawn at random. The best by a
noisy score is kept in `best/` of the working directory, the others are deleted, and all together
keep to --epsilon:

    python -m tfdpx.train.sweep --preset=digits --epsilon=3 --private_tuning=5 \
        --grid="learning_rate=4,8,16" --workdir=runs/tuned
"""

import pathlib
import signal
import sys
import time

from absl import app, flags

from tfdpx.train.config import preset_lookup, run_flags
from tfdpx.train.errors import UserError, in_one_line
from tfdpx.train.output import to_json
from tfdpx.train.run import devices
from tfdpx.train.sweeps import grid, private_tuning, runs, table

# Where flags stand that are no settings and that every run is given too.
_HANDED_ON = (run_flags, devices)
_OF_A_RUN = (run_flags.WORKDIR.name, run_flags.RESUME.name)


def define_flags(values):
    """Defines the flags of this binary in `values`, an `absl.flags.FlagValues`.

    A function, since other binaries of this package have flags of the same names.
    """
    common = {"flag_values": values}
    flags.DEFINE_string(
        "preset",
        "digits",
        f"Settings to start from, one of: {preset_lookup.summary()}.",
        **common,
    )
    flags.DEFINE_string(
        "grid", None, 'What to sweep, such as "learning_rate=1,2,4;batch_size=256,512".', **common
    )
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; every point is run with each.", **common)
    flags.DEFINE_integer("jobs", 1, "Runs at a time.", lower_bound=1, **common)
    flags.DEFINE_bool("table_only", False, "Train nothing: write the table of --workdir.", **common)
    flags.DEFINE_float(
        "private_tuning", None, "Mean number of runs, of which the best is paid for.", **common
    )


def main(argv, values=flags.FLAGS):
    """Runs the sweep that the flags describe; errors of the user become one line."""
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with in_one_line("tfdpx.train.sweep", argv):
            workdir = _workdir(values.table_only)
            if values.private_tuning is not None:
                print(to_json(_tune(values, workdir)), flush=True)
                return
            failures = {} if values.table_only else _sweep(values, workdir)
            record = summarize(workdir)
    except KeyboardInterrupt:
        sys.exit("tfdpx.train.sweep: stopped; the same command resumes it.")
    record |= {"failures": failures, "seconds": time.perf_counter() - began}
    print(to_json(record), flush=True)
    if failures:
        sys.exit(1)


def summarize(workdir):
    """Writes the table of all finished runs of a sweep.

    Args:
        workdir: Its folder, `pathlib.Path`.

    Returns:
        Dict, what the last line of the output says.

    Raises:
        UserError: If no run has finished.
    """
    results = runs.read_all(workdir)
    if not results:
        raise UserError(f"No run in --workdir={workdir} has finished.")
    rows, swept = table.rows(results), table.names(results)
    path = workdir / "table.csv"
    table.write(rows, path)
    points = table.summaries(rows, swept)
    for point in sorted(points, key=lambda point: point["median"]):
        where = " ".join(f"{name}={point[name]}" for name in swept)
        low, high = (f"{100 * point[end]:.1f}" for end in ("lowest", "highest"))
        print(f"{100 * point['median']:.1f}% ({low} to {high}, {point['runs']} runs)  {where}")
    top = table.best(points)
    return {
        "runs": len(rows),
        "points": len(points),
        "measured_on": rows[0]["measured_on"],
        "best": {name: top[name] for name in swept},
        "best_median_accuracy": top["median"],
        "best_lowest_accuracy": top["lowest"],
        "best_highest_accuracy": top["highest"],
        "table": str(path),
        "workdir": str(workdir),
    }


def _sweep(values, workdir):
    swept, given = _grid(values)
    wanted = grid.runs(values.preset, given, swept, parse_seeds(values.seeds))
    return runs.execute(
        wanted, workdir, handed_on(), values.jobs, say=lambda line: print(line, flush=True)
    )


def _tune(values, workdir):
    for name in ("seeds", "jobs", "table_only"):
        if values[name].present:
            raise UserError(
                f"Flags --private_tuning and --{name} exclude each other. Received: "
                f"--{name}={values[name].value}."
            )
    swept, given = _grid(values)
    mean = values.private_tuning
    return private_tuning.tune(values.preset, given, swept, mean, workdir, handed_on())


def _grid(values):
    """What is swept, and what the flags give for all runs."""
    if values.grid is None:
        raise UserError(
            "Flag --grid says what to sweep, such as "
            '--grid="learning_rate=1,2,4;batch_size=256,512". It is not set.'
        )
    swept = grid.parse(values.grid)
    if grid.PRESET in swept and values["preset"].present:
        raise UserError(
            f"The presets are swept, and one is given. Received: --preset={values.preset} "
            f"--grid={values.grid}. Leave one of them out."
        )
    return swept, grid.given_by_flags()


def parse_seeds(texts):
    """Returns the ints of --seeds.

    Raises:
        UserError: If there is none, or anything but different numbers from 0 on.
    """
    if not texts or not all(text.strip().isdecimal() for text in texts):
        raise UserError(
            "Flag --seeds lists numbers that are not negative, such as --seeds=0,1,2. Received: "
            f"--seeds={','.join(texts)}."
        )
    seeds = [int(text) for text in texts]
    if len(set(seeds)) < len(seeds):
        raise UserError(f"Flag --seeds has a seed twice. Received: --seeds={','.join(texts)}.")
    return seeds


def handed_on():
    """Returns the flags given to this process that every run is to be given too."""
    defined = flags.FLAGS.flags_by_module_dict()
    found = [flag for module in _HANDED_ON for flag in defined[module.__name__]]
    return [
        flag.serialize()
        for flag in found
        if flag.name not in _OF_A_RUN and not flag.using_default_value
    ]


def _workdir(must_exist):
    if run_flags.WORKDIR.value is None:
        raise UserError("Flag --workdir names the folder of the sweep. It is not set.")
    workdir = pathlib.Path(run_flags.WORKDIR.value)
    if must_exist and not workdir.is_dir():
        raise UserError(
            f"Flag --table_only needs a sweep. Received: --workdir={workdir}: no folder."
        )
    return workdir


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
