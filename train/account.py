r"""Says what private training costs, or what a budget buys, without training.

    python -m tfdpx.train.account --num_examples=50000 --batch_size=4096 --steps=2468 \
        --delta=1e-5 --epsilon=8

Of the noise, the rate, the length, delta and epsilon the one that is left out is solved from the
others: the least noise, the largest batch, the most steps or the least delta that keep within
epsilon. The rate is --batch_size of --num_examples, or --sampling_probability; the length --steps
or --epochs. With it comes what tensorflow-privacy says, and why it says something else.

--sampling and --neighbours ask for what is not Poisson sampling; what no accountant knows is
refused. --workdir=PATH,PATH is the statement of finished runs on one data set together: working
folders, or a folder of them, `.keras` files, and files of `Ledger.save`. What several of them tell
of counts once; runs on different data are refused without --same_data. --plot draws epsilon
against steps, and noise against batch size. The last line is one JSON object.

--rows_per_user=k adds what protects a person with up to k examples, if updates draw examples, and
if they draw people (`PrivacyPlan(unit="user")`) at the same noise on the mean gradient.

--compare=PATH,PATH is a table of finished runs: the settings that differ, accuracy and epsilon.
--plot draws them, accuracy against epsilon.
"""

import pathlib
import sys

from absl import app, flags

from tfdpx.accounting import groups
from tfdpx.train import pictures
from tfdpx.train.accounts import combined, comparison, recorded_runs, tf_privacy_note
from tfdpx.train.accounts.people import people_of
from tfdpx.train.accounts.question import NAMES, answer
from tfdpx.train.errors import UserError, checking_flags, in_one_line
from tfdpx.train.output import print_table, to_json


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_float("noise_multiplier", None, "Noise deviation over l2_norm_clip.", **common)
    flags.DEFINE_integer("batch_size", None, "Expected examples a model update.", **common)
    flags.DEFINE_float(
        "sampling_probability", None, "In place of batch_size / num_examples.", **common
    )
    flags.DEFINE_integer("num_examples", None, "Training examples.", **common)
    flags.DEFINE_integer("steps", None, "Model updates.", **common)
    flags.DEFINE_float("epochs", None, "In place of --steps: passes over the data.", **common)
    flags.DEFINE_float("delta", None, "Delta; well below 1/num_examples.", **common)
    flags.DEFINE_float("epsilon", None, "Privacy budget.", **common)
    flags.DEFINE_enum(
        "sampling", "poisson", list(groups.SAMPLINGS), "How batches are drawn.", **common
    )
    flags.DEFINE_enum(
        "neighbours",
        None,
        list(groups.NEIGHBOURS),
        "Which data sets are neighbours. Default: what fits --sampling.",
        **common,
    )
    flags.DEFINE_enum("accountant", None, ["pld", "rdp"], "Who solves. Default: pld.", **common)
    flags.DEFINE_integer(
        "rows_per_user",
        None,
        "The most examples that a person has: what epsilon protects all of them together.",
        lower_bound=1,
        **common,
    )
    flags.DEFINE_list("workdir", None, "Finished runs, for one statement of all.", **common)
    flags.DEFINE_bool(
        "same_data", False, "Add up runs on different data of the same people.", **common
    )
    flags.DEFINE_list("compare", None, "Finished runs, for a table of what differs.", **common)
    flags.DEFINE_string("plot", None, "PNG file for a picture of the answer.", **common)


def main(argv, values=flags.FLAGS):
    """Answers what the flags ask; errors of the user become one line."""
    with in_one_line("tfdpx.train.account", argv):
        if values.plot and not values.plot.lower().endswith(".png"):
            raise UserError(f"Flag --plot takes a .png file. Received: --plot={values.plot}.")
        report = _of_runs if values.workdir else _of_comparison if values.compare else _of_question
        record = report(values)
    print(to_json(record), flush=True)


def _of_runs(values):
    """Prints the statement of the runs in --workdir, and returns the record."""
    also = [
        f"--{name}"
        for name in (*NAMES, "rows_per_user", "plot", "compare")
        if name != "delta" and values[name].value
    ]
    if also:
        raise UserError(
            f"Flag --workdir reads what runs have recorded, and takes --delta only. Received also: "
            f"{' '.join(also)}."
        )
    with checking_flags():
        recorded = tuple(run for path in values.workdir for run in recorded_runs.read(path))
        total = combined.CombinedRuns(recorded, values.delta, values.same_data)
        record = total.record()
    print(f"{total.statement()}\n")
    print_table(record, title="what was spent")
    return record


def _of_question(values):
    """Prints the answer to what the flags ask, and returns the record."""
    with checking_flags():
        sampling = groups.Sampling(values.sampling, values.neighbours)
    given = {name: values[name].value for name in NAMES}
    found = answer(given, sampling, values.accountant)
    record = found.record()
    people = values.rows_per_user and people_of(found, values.rows_per_user)
    if people:
        record |= people.record()
    print_table(record, title=f"{found.solved} solved")
    print(f"Epsilon is {sampling.about}.\n")
    if people:
        print(f"{people.about()}\n")
    print(tf_privacy_note.lines(found))
    for warning in found.warnings:
        print(f"Warning: {warning}", file=sys.stderr)
    if values.plot:
        from tfdpx.train.accounts import tradeoff  # Matplotlib takes as long as all else.

        if not found.noise_multiplier:
            raise UserError("Flag --plot needs noise: epsilon is infinite after any steps.")
        _plot("The trade-off is", values.plot, lambda path: tradeoff.draw(found, path))
    return record


def _of_comparison(values):
    """Prints the runs in --compare side by side, and returns the record."""
    also = [f"--{name}" for name in NAMES if name != "delta" and values[name].value]
    if also:
        raise UserError(
            "Flag --compare reads what runs have recorded, and takes --delta and --plot only. "
            f"Received also: {' '.join(also)}. Leave them out."
        )
    with checking_flags():
        compared = comparison.read(values.compare, values.delta)
        record = comparison.as_record(compared)
    comparison.print_tables(compared)
    if values.plot:
        points, measured_on = comparison.points(compared)
        if not points:
            raise UserError("Flag --plot needs an accuracy, and no run has recorded one.")
        _plot(
            "The runs are",
            values.plot,
            lambda path: pictures.comparison(points, path, measured_on),
        )
        if left_out := len(compared) - len(points):
            print(f"Runs without an accuracy are left out of the picture: {left_out}.")
    return record


def _plot(what, path, draw):
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        draw(path)
    except OSError as error:
        raise UserError(f"Cannot write --plot={path}: {error}.") from error
    print(f"{what} drawn in {path}.")


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
