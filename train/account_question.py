"""Answers the questions of `account`: solves for one quantity of a run, and compares runs."""

import dataclasses
import math
import pathlib
import re
import sys
import textwrap
from typing import Any

import numpy as np
from rich import console, table

from tfdpx._arguments import exactly_one_missing
from tfdpx.accounting import accountants, attack, calibration
from tfdpx.accounting import record as records
from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.accounting.groups import Sampling, group_epsilon
from tfdpx.accounting.ledger import EXAMPLE, USER, Entry, Ledger
from tfdpx.accounting.statement import rounded_up
from tfdpx.report import pictures
from tfdpx.train.output import cell, print_table

# Skips the other parts of tensorflow_privacy, because they fail to import on TensorFlow >= 2.16.
sys.skip_tf_privacy_import = True
try:
    from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
except ImportError:
    compute_dp_sgd_privacy_lib = None

# There are two ways to give the rate, and two for the length.
_RATE, _LENGTH = ("batch_size", "num_examples", "sampling_probability"), ("steps", "epochs")
NAMES = ("noise_multiplier", *_RATE, *_LENGTH, "delta", "epsilon")
_COMPARED = (
    *("accuracy", "measured_on", "epsilon", "delta", "accountant", "noise_multiplier", "steps"),
    *("epsilon_is_approximate", "epsilon_is_lower_bound", "releasable"),
)

_NO_BOUNDS = (
    "No bound on attacks is known: it needs a privacy loss distribution, and none is known for "
    "batches of a fixed size or of unknown sampling, and for an unknown past."
)
# The neighbours with the same number of examples.
_ABSENT = {
    "zero_out": " Absent means that an empty example is in its place.",
    "replace_one": " Absent means that any other example is in its place.",
}

_WHY = (
    "Why these differ from the figures above: `assuming Poisson sampling` is as tfdpx draws, which "
    "keeps 0.01% of delta back; `once per epoch` is without amplification, as for shuffled batches "
    "(--sampling=shuffle). Its default `used_microbatching=True` would halve the noise, because "
    "its microbatches average before they are clipped: tfdpx clips every example."
)


def answer(
    quantities: dict[str, Any], sampling: Sampling, accountant: str | None = None
) -> dict[str, Any]:
    """Solves for the quantity that was left out, like `tfdpx.PrivacyPlan`.

    One of the noise, the rate, the length, delta and epsilon is left out. The solution is the least
    noise, the highest rate, the most steps or the least delta within epsilon, or epsilon itself.
    The rate is `batch_size` of `num_examples`, or a `sampling_probability`; if only one of the
    former is given, the other is solved for. The length is `steps` or `epochs`.

    Args:
        quantities: Dict with some of `NAMES`; None means unknown.
        sampling: `Sampling`.
        accountant: The privacy accountant; by default the tightest one for the sampling.

    Returns:
        Dict of JSON values: `solved`, the name of the quantity; all of `NAMES`, with `batch_size`
        and `num_examples` None if neither is known; epsilon by each accountant, or None if it has
        none; and the sampling of batches.

    Raises:
        ValueError: If a value is out of range, not exactly one quantity is unknown, nothing keeps
            within `epsilon`, or the accountant cannot resolve the loss.
    """
    accountant = accountant or sampling.accountants[0]
    values = {name: quantities[name] for name in NAMES if quantities.get(name) is not None}
    sampling.check_accountant(accountant)
    calibration.check(values)
    solved = _left_out(values)
    if solved == "epsilon":
        value = sampling.epsilon(*calibration.run_of(values), values["delta"], accountant)
    elif solved == "delta":
        calibration.check_target(values["epsilon"])
        value = sampling.delta(*calibration.run_of(values), values["epsilon"], accountant)
        if not 0 < value < 1:
            raise ValueError(
                f"No delta between 0 and 1 belongs to --epsilon={values['epsilon']}: it would "
                f"be {value:g}. Give another --epsilon, or --delta and no --epsilon."
            )
    else:
        value = calibration.solve(solved, values, accountant, sampling.epsilon)
    values[solved] = value
    run = _, rate, steps = calibration.run_of(values)
    size, count = values.get("batch_size"), values.get("num_examples")
    if count is None and size is not None:
        count = round(size / rate)
    elif size is None and count is not None:
        size = max(1, round(count * rate))
    values |= {"sampling_probability": rate, "batch_size": size, "num_examples": count}
    values |= {"steps": steps, "epochs": steps * rate}
    by_each = {by: _epsilon(sampling, run, values["delta"], by) for by in ("pld", "rdp", "gdp")}
    return {
        "solved": solved,
        **{name: values[name] for name in NAMES},
        **{f"epsilon_{name}": epsilon for name, epsilon in by_each.items()},
        "accountant": accountant,
        "sampling": sampling.name,
        "neighbours": sampling.neighbours,
        "is_exact": sampling.name == "poisson",
    }


def _epsilon(sampling, run, delta, accountant):
    """Returns epsilon by "pld", "rdp" or, exactly, "gdp"; None if the accountant has none."""
    try:
        if accountant != "gdp":
            return sampling.epsilon(*run, delta, accountant)
        noise_multiplier, probability, steps = sampling.run(*run)
    except ValueError:  # The accountant lacks the sampling, or cannot resolve so small a loss.
        return None
    is_gaussian = probability == 1 and noise_multiplier and sampling.name != "without_replacement"
    return exact_epsilon(math.sqrt(steps) / noise_multiplier, delta) if is_gaussian else None


def _run(answer):
    return answer["noise_multiplier"], answer["sampling_probability"], answer["steps"]


def _left_out(quantities):
    """Returns the name of the quantity to solve for."""
    for names in (_LENGTH, _RATE):
        if all(name in quantities for name in names):
            listed = " ".join(f"--{name}={quantities[name]}" for name in names)
            raise ValueError(f"Each of {listed} follows from the rest: leave one of them out.")
    rate = [name for name in _RATE[:2] if name in quantities]
    needed = _RATE[2:] if "sampling_probability" in quantities or not rate else _RATE[:2]
    values = {
        name: quantities.get(name) for name in ("noise_multiplier", "delta", "epsilon", *needed)
    }
    return exactly_one_missing(
        {**values, "steps": quantities.get("steps", quantities.get("epochs"))}, "--{}"
    )


def people(answer: dict[str, Any], rows: int) -> tuple[dict[str, Any], str]:
    """Computes the epsilon of a person with several examples, if updates draw examples, or people.

    If each person has k examples, an update of B examples has B / k people. The mean gradient of
    each person is clipped at C. Noise of C sigma / k on the sum of these has the same ratio to the
    signal as noise of C sigma on the sum of B gradients.

    Args:
        answer: Dict returned by `answer`.
        rows: Int, k, the most examples of a person.

    Returns:
        Pair of a dict of JSON values and sentences. `epsilon_of_user_drawing_people` is None if the
        noise is below the range of the accountants.

    Raises:
        ValueError: If batches are not Poisson samples.
    """
    if answer["sampling"] != "poisson":
        raise ValueError(
            "Flag --rows_per_user needs --sampling=poisson. Received: "
            f"--sampling={answer['sampling']}."
        )
    (noise, *drawn), delta, accountant = _run(answer), answer["delta"], answer["accountant"]
    ledger = Ledger((Entry(noise, *drawn),))
    by_rows = group_epsilon(ledger, rows, delta=delta, accountant=accountant)
    by_people = None
    if not noise or noise / rows >= calibration.MIN_NOISE_MULTIPLIER:
        by_people = accountants.epsilon(noise / rows, *drawn, delta, accountant)
    text = (
        f"A person with {rows} examples has epsilon {_rounded(by_rows)} as examples are drawn, and "
        f'{_rounded(by_people)} if updates draw people (PrivacyPlan(unit="user")), with the same '
        "noise on the mean gradient. docs/users.md has what each learns."
    )
    record = {"rows_per_user": rows, "epsilon_of_user": by_rows}
    return record | {"epsilon_of_user_drawing_people": by_people}, textwrap.fill(text, 88)


def attack_bounds(answer: dict[str, Any], sampling: Sampling) -> attack.AttackBounds | None:
    """Returns bounds on attacks on one example.

    Args:
        answer: Dict returned by `answer`.
        sampling: `Sampling`.

    Returns:
        `AttackBounds` under the neighbours of the sampling, or under those of full batches if it is
        "shuffle". None for batches of a fixed size.
    """
    if sampling.name == "without_replacement":
        return None
    return attack.attack_bounds((sampling.run(*_run(answer)),), answer["delta"], EXAMPLE)


def print_attack_bounds(
    bounds: attack.AttackBounds | None, neighbours: str, rows_per_user: int | None = None
) -> dict[str, Any]:
    """Prints bounds on attacks, rounded up, as a table and a sentence.

    Args:
        bounds: `AttackBounds`, or None if no bounds are known.
        neighbours: String, the neighbours for which they hold.
        rows_per_user: Optional int, the most examples of a person. The bounds do not cover all of
            these together.

    Returns:
        Dict of JSON values: `attack_bounds`, None if no bounds are known.
    """
    if bounds is None:
        print(f"{textwrap.fill(_NO_BOUNDS, 88)}\n")
        return {"attack_bounds": None}
    values, who = bounds.to_dict(), "person" if bounds.unit == USER else EXAMPLE
    rows = {
        f"recognised, if {100 * float(rate):g}% of absent ones are taken for present": _percent(one)
        for rate, one in values["true_positive_rate"].items()
    }
    rows["right guesses (50% by guessing)"] = _percent(values["right_guesses"])
    rows["AUC (0.5 by guessing)"] = rounded_up(values["auc"], 3)
    rows["advantage"] = rounded_up(values["advantage"], 3)
    rows[f"mu, at every delta from {values['mu_from_delta']:g}"] = _rounded(values["mu"])
    print_table(rows, title=f"attacks on one {who}, at most")
    sentence = bounds.sentence(who) + _ABSENT.get(neighbours, "")
    if rows_per_user:
        sentence += " All examples of a person together are easier to find."
    print(f"{textwrap.fill(sentence, 88)}\n")
    return {"attack_bounds": values}


def _percent(share):
    return f"{rounded_up(100 * share, 3)}%"


def _rounded(epsilon):
    if epsilon is None:
        return "one too large to count"
    return rounded_up(epsilon) if epsilon < math.inf else "infinite"


def tf_privacy(answer: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the statement of tensorflow-privacy for the same numbers.

    Args:
        answer: Dict returned by `answer`.

    Returns:
        Pair of a dict of JSON values, the two epsilons of tensorflow-privacy, and a text: the
        statement and the reason why it differs, or the reason why it is missing. The epsilons are
        then None.
    """
    names = [f"epsilon_tensorflow_privacy_{name}" for name in ("once_per_epoch", "poisson")]
    why_missing, count, size = None, answer["num_examples"], answer["batch_size"]
    if not answer["noise_multiplier"]:
        why_missing = "Without noise there is no differential privacy: epsilon is infinite."
    elif compute_dp_sgd_privacy_lib is None:
        why_missing = (
            "tensorflow-privacy is not installed (it refuses Python 3.12 and later), so its "
            "statement is missing here; the other figures need none of it."
        )
    elif count is None:
        why_missing = "tensorflow-privacy's statement needs --num_examples and --batch_size."
    if why_missing:
        return dict.fromkeys(names), why_missing
    accountant = answer["accountant"].upper()
    statement = compute_dp_sgd_privacy_lib.compute_dp_sgd_privacy_statement(
        number_of_examples=count,
        batch_size=size,
        # tensorflow-privacy rounds up to whole steps, and a whole number could become one more.
        num_epochs=(answer["steps"] - 1e-6) * size / count,
        noise_multiplier=answer["noise_multiplier"],
        delta=answer["delta"],
        used_microbatching=False,
        accountant_type=compute_dp_sgd_privacy_lib.AccountantType[accountant],
    )
    epsilons = map(float, re.findall(r"^ +Epsilon .*: +(\S+)$", statement, re.MULTILINE))
    why = textwrap.fill(_WHY, 100)
    return dict(zip(names, epsilons, strict=True)), f"tensorflow-privacy:\n\n{statement}\n{why}"


def draw_trade_off(answer: dict[str, Any], sampling: Sampling, path: str) -> None:
    """Draws the trade-off around an answer: epsilon against steps, and noise against batch size.

    Args:
        answer: Dict returned by `answer`, for a run with noise.
        sampling: `Sampling`.
        path: PNG file to write.
    """
    from matplotlib import figure  # The import takes as long as everything else.

    (noise, rate, steps), delta, accountant = _run(answer), answer["delta"], answer["accountant"]
    fig = figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = fig.subplots(1, 2)
    marked = dict(marker="o", color="black", linestyle="", label=f"answer, by {accountant}")
    numbers = np.unique(np.geomspace(max(1, steps / 10), 4 * steps, 9).astype(int))
    epsilons = [_epsilon(sampling, (noise, rate, int(n)), delta, accountant) for n in numbers]
    left.plot(numbers, epsilons, marker=".", label=accountant)
    left.plot(steps, answer["epsilon"], **marked)
    left.set(xlabel="model updates", ylabel=r"$\varepsilon$")
    left.set_title(f"noise multiplier {noise:.4g}")

    rates, size = np.geomspace(rate / 10, min(1.0, 4 * rate), 9), answer["num_examples"] or 1
    noises = [_noise(answer, sampling, float(one)) for one in rates]
    right.plot(size * rates, noises, marker=".", label="rdp")
    right.plot(size * rate, noise, **marked)
    label = "expected batch size" if answer["num_examples"] else "sampling probability"
    right.set(xlabel=label, ylabel="noise multiplier")
    right.set_title(rf"$\varepsilon$ = {answer['epsilon']:.4g} after {steps} updates")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    fig.suptitle(rf"$\delta$ = {delta:g}, {sampling.name} sampling")
    fig.savefig(path, dpi=120)


def _noise(around, sampling, rate):
    """Returns the least noise within epsilon by RDP, the fastest accountant, or NaN."""
    values = {name: around[name] for name in ("steps", "delta", "epsilon")}
    values["sampling_probability"] = rate
    try:
        return calibration.solve("noise_multiplier", values, "rdp", sampling.epsilon)
    except ValueError:  # The noise is below the range of the accountants.
        return math.nan


def compare(runs: dict[pathlib.Path, records.Record], delta: float | None = None) -> dict[str, Any]:
    """Compares runs: the settings that differ, accuracy and epsilon.

    Args:
        runs: Dict from files to the `Record`s in them.
        delta: Optional float in (0, 1), the delta of all epsilons.

    Returns:
        Dict of JSON values: the names of the settings that differ, and a dict for each run. The
        name of a run is the end of its path, as long as needed to differ from the others.

    Raises:
        ValueError: If `delta` is out of its range, or a record needs one.
    """
    parts = [(file.parent if file.name == records.FILE else file).parts for file in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    settings = [
        {"program": record.program, "dataset": record.data and record.data.name, **record.settings}
        for record in runs.values()
    ]
    names = dict.fromkeys(name for one in settings for name in one)
    rows = {name: [one.get(name) for one in settings] for name in names}
    differing = [name for name, row in rows.items() if any(value != row[0] for value in row)]
    columns = [
        {"name": "/".join(part[-depth:])}
        | _results(record, delta)
        | {"settings": {name: one.get(name) for name in differing}}
        for part, record, one in zip(parts, runs.values(), settings, strict=True)
    ]
    return records.plain({"differing": differing, "runs": columns})


def _results(record, delta):
    view = dataclasses.replace(record, delta=record.delta if delta is None else delta).view()
    measured_on = "test" if view.get("test_accuracy") is not None else "validation"
    accuracy = view.get(f"{measured_on}_accuracy")
    view |= {"accuracy": accuracy, "measured_on": None if accuracy is None else measured_on}
    view["epsilon_is_lower_bound"] = not record.ledger.is_complete
    return {name: view.get(name) for name in _COMPARED}


def print_comparison(compared: dict[str, Any]) -> None:
    """Prints a table with a column for each run.

    Args:
        compared: Dict that `compare` returned.
    """
    runs, columns = compared["runs"], table.Table(title="settings that differ, and results")
    for name in ("", *(run["name"] for run in runs)):
        columns.add_column(cell(name), overflow="fold")
    rows = {name: [run["settings"][name] for run in runs] for name in compared["differing"]}
    for name in _COMPARED:
        label = {"epsilon": "epsilon spent", "steps": "updates made"}.get(name, name)
        rows[label] = [run[name] for run in runs]
    for name, row in rows.items():
        columns.add_row(*map(cell, (name.replace("_", " "), *row)))
    console.Console().print(columns)
    if not compared["differing"]:
        print("No recorded setting differs: seeds and noise are in no record.")
    if len({run["delta"] for run in runs} - {None}) > 1:
        print("The epsilons are at different deltas: --delta=D compares all at one.")
    print(
        "Each epsilon is of its run alone. Choosing among runs on the same data spends what all of "
        "them spent: --workdir=A,B,... adds it up."
    )


def draw_comparison(
    compared: dict[str, Any], curves: dict[str, attack.AttackBounds], path: str
) -> None:
    """Draws the accuracy of each run against its epsilon, and beside it the bounds on attacks.

    Runs without privacy are at the right end of the first picture.

    Args:
        compared: Dict that `compare` returned. Runs without an accuracy are left out.
        curves: Dict from names of runs to their `AttackBounds`.
        path: PNG file to write.
    """
    from matplotlib import figure  # The import takes as long as everything else.

    runs = [run for run in compared["runs"] if run["accuracy"] is not None]
    epsilons = [float(run["epsilon"]) for run in runs]
    right = 1.25 * max((e for e in epsilons if e < math.inf), default=1.0) or 1.0
    fig = figure.Figure(figsize=(12, 5), layout="constrained", dpi=120)
    axes, right_axes = fig.subplots(1, 2, width_ratios=(7, 5))
    for run, epsilon in zip(runs, epsilons, strict=True):
        place = min(epsilon, right), 100 * run["accuracy"]
        axes.plot(*place, marker="o" if epsilon < math.inf else "s")
        # Escaped, because a pair of dollar signs in a folder's name is not a formula.
        offset = dict(xytext=(5, 4), textcoords="offset points", parse_math=False)
        axes.annotate(run["name"], place, fontsize=8, **offset)
    if math.inf in epsilons:
        axes.axvline(right, color="grey", linestyle=":", zorder=0, label="without privacy")
        axes.legend()
    measured_on = " and ".join(sorted({run["measured_on"] for run in runs}))
    axes.set(xlabel="privacy spent, epsilon", ylabel=f"{measured_on} accuracy, %")
    axes.margins(0.15)
    axes.grid(alpha=0.3)
    pictures.attack_curve(curves, path, axes=right_axes)
