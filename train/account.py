r"""Reads the privacy losses of finished runs on the same data from files, and adds them up.

    tfdpx account --workdir=runs,published/m.keras

--workdir takes a list of paths: working folders of runs or folders above them, `.keras` and
`.weights.h5` files, folders of `tfdpx.callbacks.Checkpoint`, and files of `Ledger.save`. The
program recognises the files in a folder by their content. If several files record the same update,
it counts once. If a file cannot be read, the program lists it and makes no statement for all runs
together. The program refuses runs on different data unless --same_data is set. It also refuses a
folder that holds the record of one run and the model of another. To compute epsilon from numbers
instead of files, use `tfdpx plan`. The last line of the output is one JSON object.
"""

import dataclasses
import itertools
import math
import pathlib
import re

from absl import flags

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import Record
from tfdpx.report import words
from tfdpx.report.spent import UNREADABLE, check_model, files_below, record_in
from tfdpx.train.errors import checking_flags, in_one_line, start_program
from tfdpx.train.output import print_attack_bounds, print_paragraphs, print_table, to_json


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    for define, name, text in (
        (flags.DEFINE_list, "workdir", "Finished runs: folders and files, separated by commas."),
        (flags.DEFINE_float, "delta", "Delta of the statement. Default: the delta of the runs."),
        (flags.DEFINE_bool, "same_data", "Also add up runs on different data of the same people."),
    ):
        define(name, None, text, flag_values=values)


def main(argv, values=flags.FLAGS):
    """Adds up the privacy losses of the runs in --workdir. Prints a `UserError` as one line."""
    with in_one_line("tfdpx.train.account", argv), checking_flags():
        if not values.workdir:
            raise ValueError(
                "Flag --workdir names finished runs: --workdir=RUN,RUN. It is not set. Questions "
                "in numbers are answered by `tfdpx plan`."
            )
        record = _of_runs(values)
    print(to_json(record), flush=True)


def _of_runs(values):
    """Prints one statement for all runs in --workdir. Returns a dict, the last line to print."""
    runs, unread = {}, {}
    for path in values.workdir:
        more, left_out = _read(path)
        runs, unread = runs | more, unread | left_out
    read = list(runs.values())
    spent = _together(read, values.delta, values.same_data)
    together = dataclasses.replace(spent, ledger=spent.ledger_as_drawn())
    ledger, data = together.ledger, [record.data for record in read if record.data]
    epsilons = {"epsilon": together.epsilon, "epsilon_pld": together.epsilon}
    try:
        epsilons["epsilon_rdp"] = ledger.composed_epsilon(together.delta, "rdp")
    except ValueError:  # The privacy loss is too small for the precision of RDP.
        epsilons["epsilon_rdp"] = None
    counts = sorted({one.num_examples for one in data} - {None})
    reasons = itertools.chain(*(words.listed("problems", record) for record in (*read, together)))
    problems = list(dict.fromkeys(reasons))
    if ledger.unit is None:
        epsilons, problems = dict.fromkeys(epsilons), ["no common statement is known"]
    problems += [f"{path} was not counted" for path in unread]
    answer = {
        "runs": len(runs),
        "dataset": data[0].name if data else None,
        "num_examples": counts if len(counts) > 1 else next(iter(counts), None),
        "steps": ledger.steps,
        "delta": together.total_delta,
        **epsilons,
        # For shuffled batches there is only a bound for replacing an example by an empty one. For
        # Poisson samples and full batches, this bound equals the one for removing an example.
        "neighbours": together.neighbours if ledger == spent.ledger else "zero_out",
        "epsilon_is_approximate": ledger.is_approximate,
        "epsilon_is_lower_bound": bool(unread) or not ledger.is_complete,
        "releasable": together.epsilon < math.inf and not problems,
        "not_read": list(map(str, unread)),
    }
    lines = ["Trainings and releases on these data:"]
    lines += [f"- {path}: {words.say('of_run', record)}" for path, record in runs.items()]
    lines += [f"- Not counted: {path}: {why}" for path, why in unread.items()]
    lines += ["", *words.listed("together", together, answer["neighbours"], runs, unread)]
    lines += [f"Not releasable: {problem}." for problem in problems]
    print_paragraphs([*lines, ""])
    print_table(answer, title="what was spent")
    bounds = None if unread or ledger.unit is None else together.attack_bounds()
    return answer | print_attack_bounds(bounds, answer["neighbours"])


def _together(read, delta, same_data):
    """Returns one `Record` of the privacy loss of several runs on the same data.

    The Gaussian updates of all runs compose. If a run was chosen as the best of a random number of
    runs, the epsilon and delta of this choice are added. An update that is in several records
    counts once. Earlier trainings of the weights count, too, if their data may contain the same
    examples.

    Args:
        read: List of the `Record`s of the runs.
        delta: Float in (0, 1). None takes the delta of the runs, which must be the same for all.
        same_data: Bool, whether to add up runs even if their data sets have different names.

    Raises:
        ValueError: If the data sets differ and `same_data` is False, or the runs have no common
            delta.
    """
    data = [record.data for record in read if record.data]
    other = next((one for one in data if not _is_same(one, data[0])), None)
    if other is not None and not same_data:
        raise ValueError(
            f"These runs are not on the same data: {data[0].name} and {other.name} have different "
            "identifiers. Make a statement for each. If the same people are in both, add "
            "--same_data: then all runs are added up."
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
        raise ValueError(f"Give --delta: the runs do not share one delta. Found: {listed}.")
    delta = next(iter(deltas), None) if delta is None else delta
    return Record("account", None, ledger, delta)


def _is_same(one, other):
    """Returns whether two `DatasetId`s have the same name. Versions and classes may differ."""
    if one.identifier is not None or other.identifier is not None:
        return one.identifier == other.identifier
    first, second = (re.split("[:/]", data.name)[0] for data in (one, other))
    return first == second


def _overlap(one, other):
    """Returns whether the data sets of two `DatasetId`s may share examples.

    For example, "digits:0-4" and "digits:5-9" share none, as their classes differ.
    """
    parts = [re.fullmatch(r".+:(\d+)-(\d+)", data.name) for data in (one, other)]
    first, second = ((int(part[1]), int(part[2])) if part else (0, math.inf) for part in parts)
    return _is_same(one, other) and first[0] <= second[1] and second[0] <= first[1]


def _read(path):
    """Reads a file, or all ledgers, records and models in a folder and its subfolders.

    Returns:
        Two dicts. The first maps files to their `Record`s. The second maps every other file or
        folder to the reason why its privacy loss is unknown, for example an unfinished run.
    """
    received = f"Received: --workdir={path}."
    path = pathlib.Path(path).expanduser()
    runs, unread = {}, {}
    try:
        files, unfinished = ([path], []) if path.is_file() else files_below(path)
        for file in files:
            try:
                runs[file] = record_in(file)
            except UNREADABLE as error:
                if path.is_file():
                    raise
                unread[file] = error
        finished = {file.parent for file in runs if file.name == records.FILE}
        for folder in finished:
            check_model(folder, runs)
    except UNREADABLE as error:
        raise ValueError(f"{received} {error}") from error
    unread |= {
        folder: "unfinished work. Finish it with --resume, or delete it; what it has spent counts."
        for folder in unfinished
        if folder.parent not in finished
    }
    if not runs:
        found = " ".join(f"{file}: {why}" for file, why in unread.items())
        raise ValueError(
            f"Nothing in {path} says what was spent: it holds no {records.FILE}, no .keras file "
            f"and no ledger that can be read. {received} Name the folder of a finished run. {found}"
        )
    return runs, unread


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    start_program(main)
