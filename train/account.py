r"""Computes the cost of private training, or the training that a budget allows, without training.

    python -m tfdpx.train.account --num_examples=50000 --batch_size=4096 --steps=2468 \
        --delta=1e-5 --epsilon=8

Leave out one of the noise, the rate, the length, delta and epsilon: it is solved from the others,
as the least noise, the largest batch, the most steps or the least delta within epsilon. The rate is
--batch_size of --num_examples, or --sampling_probability; the length is --steps or --epochs. The
output also has the statement of tensorflow-privacy, and the reason why it differs.

--sampling and --neighbours choose another sampling than Poisson sampling; combinations without an
accountant are refused. --workdir=PATH,PATH prints one statement for several finished runs on the
same data set: working folders, or a folder of them, `.keras` and `.weights.h5` files, and files of
`Ledger.save`. Updates that are in several of these files count once. Runs on different data are
refused without --same_data, and so is a folder with the record of one run and the model of another.
--plot draws epsilon against steps, and noise against batch size. The last line is one JSON object.

--rows_per_user=k adds the epsilon of a person with up to k examples, if updates draw examples, and
if they draw people (`PrivacyPlan(unit="user")`) with the same noise on the mean gradient.

--compare=PATH,PATH prints a table of finished runs: the settings that differ, accuracy and epsilon.
--plot draws accuracy against epsilon, and the bounds on attacks.
"""

import tfdpx.train.quiet_start  # noqa: F401 - before TensorFlow is imported.

# isort: split

import dataclasses
import math
import pathlib
import re
import sys

from absl import app, flags

from tfdpx.accounting import groups
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import plan_warnings
from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import rounded_up, why_unknown
from tfdpx.accounting.statement import steps as describe_steps
from tfdpx.train import account_question as question
from tfdpx.train.errors import checking_flags, in_one_line
from tfdpx.train.output import print_paragraphs, print_table, to_json
from tfdpx.train.spent import (
    MODEL,
    UNFINISHED,
    UNREADABLE,
    check_model,
    files_below,
    record_in,
)

_NEIGHBOURS = {
    "add_or_remove_one": "adding or removing one example",
    "add_or_remove_user": "adding or removing all examples of one person",
    "zero_out": "emptying the place of one example",
}


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    real, whole = flags.DEFINE_float, flags.DEFINE_integer
    for define, name, text in (
        (real, "noise_multiplier", "Standard deviation of the noise, divided by l2_norm_clip."),
        (whole, "batch_size", "Expected number of examples in an update."),
        (real, "sampling_probability", "In place of --batch_size / --num_examples."),
        (whole, "num_examples", "Training examples."),
        (whole, "steps", "Model updates."),
        (real, "epochs", "In place of --steps: passes over the data."),
        (real, "delta", "Delta, well below 1/num_examples."),
        (real, "epsilon", "Privacy budget."),
        (flags.DEFINE_list, "workdir", "Finished runs: print one statement for all of them."),
        (flags.DEFINE_bool, "same_data", "Add up runs on different data of the same people."),
        (flags.DEFINE_list, "compare", "Finished runs: print a table of their differences."),
        (flags.DEFINE_string, "plot", "PNG file to draw the answer to."),
    ):
        define(name, None, text, flag_values=values)
    text = "The most examples of a person: adds the epsilon that protects all of them together."
    whole("rows_per_user", None, text, lower_bound=1, flag_values=values)
    for name, default, choices, text in (
        ("sampling", "poisson", groups.SAMPLINGS, "The sampling of batches."),
        ("neighbours", None, groups.NEIGHBOURS, "Neighbouring data. Default: those of --sampling."),
        ("accountant", None, ("pld", "rdp"), "Privacy accountant. Default: pld."),
    ):
        flags.DEFINE_enum(name, default, list(choices), text, flag_values=values)


def main(argv, values=flags.FLAGS):
    """Answers the question of the flags; errors of the user become one line."""
    with in_one_line("tfdpx.train.account", argv), checking_flags():
        if values.plot and not values.plot.lower().endswith(".png"):
            raise ValueError(f"Flag --plot takes a .png file. Received: --plot={values.plot}.")
        report = _of_runs if values.workdir else _of_comparison if values.compare else _of_question
        record = report(values)
    print(to_json(record), flush=True)


def _of_question(values):
    """Prints the answer to the question of the flags, and returns the record."""
    sampling = groups.Sampling(values.sampling, values.neighbours)
    quantities = {name: values[name].value for name in question.NAMES}
    answer = question.answer(quantities, sampling, values.accountant)
    theirs, text = question.tf_privacy(answer)
    record = answer | theirs
    if values.rows_per_user:
        of_people, about_people = question.people(answer, values.rows_per_user)
        record, text = record | of_people, f"{about_people}\n\n{text}"
    print_table(record, title=f"{answer['solved']} solved")
    print(f"Epsilon is {sampling.about}.\n")
    bounds = question.attack_bounds(answer, sampling)
    record |= question.print_attack_bounds(bounds, sampling.neighbours, values.rows_per_user)
    print(text)
    about = ("epsilon", "delta", "num_examples", "noise_multiplier")
    for warning in plan_warnings(*(answer[name] for name in about)):
        print(f"Warning: {warning}", file=sys.stderr)
    if values.plot:
        if not answer["noise_multiplier"]:
            raise ValueError("Flag --plot needs noise: epsilon is infinite after any steps.")
        _plot(
            "The trade-off is",
            values.plot,
            lambda path: question.draw_trade_off(answer, sampling, path),
        )
    return record


def _of_runs(values):
    """Prints the statement of the runs in --workdir together, and returns the record."""
    _refuse_others(values, "workdir", ("delta",))
    runs = [run for path in values.workdir for run in _read(path, "workdir").items()]
    read = [record for _, record in runs]
    spent = _together(read, values.delta, values.same_data)
    together = dataclasses.replace(spent, ledger=spent.ledger_as_drawn())
    ledger, data = together.ledger, [record.data for record in read if record.data]
    try:
        by_rdp = ledger.composed_epsilon(together.delta, "rdp")
    except ValueError:  # RDP cannot resolve so small a privacy loss.
        by_rdp = None
    counts = sorted({one.num_examples for one in data} - {None})
    # With Poisson samples or full batches, emptying an example costs the same as removing it.
    problems = list(dict.fromkeys(why for record in (*read, together) for why in record.problems))
    answer = {
        "solved": "epsilon",
        "runs": len(runs),
        "dataset": data[0].name if data else None,
        "num_examples": counts if len(counts) > 1 else next(iter(counts), None),
        "steps": ledger.steps,
        "delta": together.total_delta,
        "epsilon": together.epsilon,
        "epsilon_pld": together.epsilon,
        "epsilon_rdp": by_rdp,
        "neighbours": together.neighbours if ledger == spent.ledger else "zero_out",
        "epsilon_is_approximate": ledger.is_approximate,
        "epsilon_is_lower_bound": not ledger.is_complete,
        "releasable": together.epsilon < math.inf and not problems,
    }
    lines = ["What was done to the data:"]
    lines += [f"- {path}: {_about(record)}." for path, record in runs]
    lines += ["", *_claims(runs, together, answer["neighbours"])]
    lines += [f"Not releasable: {problem}." for problem in problems]
    print_paragraphs([*lines, ""])
    print_table(answer, title="what was spent")
    return answer | question.print_attack_bounds(together.attack_bounds(), answer["neighbours"])


def _together(read, delta, same_data):
    """Returns one `Record` of the privacy loss of several runs on the same data.

    Gaussian updates compose, and the best of a random number of runs adds its own epsilon and
    delta. Steps that are in several records count once. Earlier trainings behind the weights count
    if they may have used the same examples.
    """
    data = [record.data for record in read if record.data]
    other = next((one for one in data if not _is_same(one, data[0])), None)
    if other is not None and not same_data:
        raise ValueError(
            f"These runs are not of one data set: {data[0].name} and {other.name} have different "
            "identifiers. Give a statement for each; or, if the same people are in both, "
            "--same_data, which adds up what all have spent."
        )
    ledgers = [record.ledger for record in read]
    for record in read:
        behind = [training for training in record.seen if not record.counts(training)]
        ledgers += [b.ledger for b in behind if any(_overlap(b.data, one) for one in data)]
    ledger = sum(ledgers, Ledger())
    deltas = sorted({record.delta for record in read} - {None})
    is_needed = ledger.has_noise and any(entry.is_gaussian for entry in ledger.entries)
    if delta is None and (len(deltas) > 1 or (is_needed and not deltas)):
        listed = ", ".join(f"{value:g}" for value in deltas) or "none"
        raise ValueError(f"Give --delta: the runs have no one delta. Found: {listed}.")
    delta = next(iter(deltas), None) if delta is None else delta
    return Record("account", None, ledger, delta)


def _is_same(one, other):
    """Returns whether two `DatasetId` may share examples; a part of a public set counts as all."""
    if one.identifier is not None or other.identifier is not None:
        return one.identifier == other.identifier
    first, second = (re.split("[:/]", data.name)[0] for data in (one, other))
    return first == second


def _overlap(one, other):
    """Returns whether two `DatasetId` may share examples, for example two parts of one data set."""
    parts = [re.fullmatch(r".+:(\d+)-(\d+)", data.name) for data in (one, other)]
    first, second = ((int(part[1]), int(part[2])) if part else (0, math.inf) for part in parts)
    return _is_same(one, other) and first[0] <= second[1] and second[0] <= first[1]


def _about(record):
    """Returns a line about one run."""
    data = record.data.name if record.data else "data that the file does not name"
    what = record.results.get("model") or record.results.get("method") or "weights"
    spent = describe_steps(record.ledger).rstrip(".")
    return f"{record.program}, {what} on {data}, {record.sampling} sampling: {spent}"


def _claims(runs, together, neighbours):
    """Returns sentences on the guarantee of all runs together, or on why there is none."""
    ledger, spent, delta = together.ledger, together.epsilon, together.total_delta
    if spent == math.inf:
        return ["There is no differential privacy: epsilon is infinite."]
    if why := why_unknown(ledger):
        unknown = [str(path) for path, record in runs if why_unknown(record.ledger)]
        return [
            f"No differential privacy can be stated. Of {', '.join(unknown) or 'earlier trainings'}"
            f": {why}. The updates that are known spend epsilon = {rounded_up(spent)} at delta = "
            f"{delta or 0:.6g}, as if all batches were Poisson samples; that is no limit."
        ]
    if not ledger.steps:
        return ["No record has an update on these data."]
    claims = [
        f"All together are ({rounded_up(spent)}, {delta:.6g})-differentially private under "
        f"{_NEIGHBOURS[neighbours]}: by privacy loss distributions of dp_accounting. The number of "
        "examples is public. What several of these files tell of counts once. Their digests find "
        "accidents and are no signature."
    ]
    if neighbours == "zero_out":
        claims.append(f"For shuffled batches this is {groups.Sampling('shuffle').about}.")
    if ledger.selections:
        claims.append("The best of several runs adds its own epsilon and delta (RDP).")
    if any(record.data is None for _, record in runs):
        claims.append("A file names no data: its updates count as if on the same data.")
    return claims


def _of_comparison(values):
    """Prints the runs in --compare side by side, and returns the record."""
    _refuse_others(values, "compare", ("delta", "plot"))
    runs = {}
    for path in values.compare:
        runs |= {file.resolve(): record for file, record in _read(path, "compare").items()}
    if len(runs) < 2:
        raise ValueError(
            "Flag --compare takes two runs at least. Received: "
            f"--compare={','.join(values.compare)}, which is one. Name another run: --compare=A,B."
        )
    compared = question.compare(runs, values.delta)
    question.print_comparison(compared)
    if values.plot:
        left_out = [run for run in compared["runs"] if run["accuracy"] is None]
        if len(left_out) == len(runs):
            raise ValueError("Flag --plot needs an accuracy, and no run has recorded one.")
        drawn = [
            (run["name"], record.attack_bounds())
            for run, record in zip(compared["runs"], runs.values(), strict=True)
            if run["accuracy"] is not None
        ]
        curves = {name: bounds for name, bounds in drawn if bounds is not None}
        _plot("The runs are", values.plot, lambda p: question.draw_comparison(compared, curves, p))
        if left_out:
            print(f"Runs without an accuracy are left out of the picture: {len(left_out)}.")
    return compared


def _refuse_others(values, flag, allowed):
    names = (*question.NAMES, "rows_per_user", "plot", "compare")
    conflicting = [name for name in names if name not in (flag, *allowed) and values[name].value]
    if conflicting:
        raise ValueError(
            f"Flag --{flag} reads what runs have recorded, and takes "
            f"{' and '.join(f'--{name}' for name in allowed)} only. Received also: "
            f"{' '.join(f'--{name}' for name in conflicting)}. Leave them out."
        )


def _plot(what, path, draw):
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        draw(path)
    except OSError as error:
        raise ValueError(f"Cannot write --plot={path}: {error}.") from error
    print(f"{what} drawn in {path}.")


def _read(path, flag):
    """Returns a dict from files to their `Record`s, for a file, or a folder and all folders in it.

    Every record, model and ledger in a folder counts, and an unfinished run is refused. --compare
    uses only runs with a record, and their models.
    """
    received = f"Received: --{flag}={path}."
    try:
        path = pathlib.Path(path).expanduser()
        files, unfinished = ([path], []) if path.is_file() else files_below(path)
        finished = {file.parent for file in files if file.name == records.FILE}
        if flag == "compare" and path.is_dir():
            of_run = (records.FILE, MODEL)
            files = [file for file in files if file.name in of_run and file.parent in finished]
            unfinished = [] if files else unfinished
        records_by_file = {file: record_in(file) for file in files}
        for folder in finished:
            check_model(folder, records_by_file)
    except UNREADABLE as error:
        raise ValueError(f"{received} {error}") from error
    for folder in unfinished:
        remedy = f"finish it with --resume, or name {folder} for what it has spent so far"
        if folder.name != UNFINISHED:
            remedy = f"no file says what its tuning has spent, so delete {folder}"
        elif folder.parent in finished:
            continue
        raise ValueError(f"The run in {folder.parent} is not finished: {remedy}. {received}")
    if not records_by_file:
        raise ValueError(
            f"Nothing in {path} says what was spent: it holds no {records.FILE}, no .keras file "
            f"and no ledger. {received} Name the folder of a finished run."
        )
    return records_by_file


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
