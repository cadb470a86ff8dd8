r"""Plans a training: computes epsilon, noise, batch size or updates before any data are used.

    tfdpx plan --num_examples=4000 --batch_size=400
    tfdpx plan --num_examples=50000 --batch_size=4096 --epochs=10 --right_guesses=60

Leave out one of --epsilon (or --right_guesses), --noise_multiplier, --batch_size and --steps (or
--epochs). The program computes the missing one: epsilon, the least noise, the largest batch, or the
largest number of updates. If you leave out more, it assumes the usual batch size and number of
updates.

If epsilon is missing, and the noise or the number of updates as well, the program prints a table.
The table has two groups of rows: for limits of 55 to 80 right guesses of an attacker in 100, and
for epsilons from 0.5 to 20. A row has the noise multiplier, the number of updates, a learning rate
to test first, and the epsilon of a person with 2 or 4 examples, or with as many as --rows_per_user.
No row promises an accuracy.

--sampling and --neighbours replace Poisson sampling and the usual neighbouring data sets; the
program refuses combinations that no accountant covers. If there is a single answer, the program
also prints the statement of tensorflow-privacy, and why its epsilon differs. The last line is one
JSON object.
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import math
import re
import sys
import textwrap
import warnings

from absl import flags

from tfdpx._arguments import check_positive_integer, exactly_one_missing, require
from tfdpx.accounting import PrivacyPlan, accountants, attack, calibration, group_epsilon, groups
from tfdpx.accounting.ledger import EXAMPLE
from tfdpx.accounting.plan import plan_warnings
from tfdpx.accounting.statement import rounded_up
from tfdpx.report import words
from tfdpx.suggestion import suggest
from tfdpx.train import defaults
from tfdpx.train.errors import checking_flags, in_one_line, start_program
from tfdpx.train.output import (
    print_attack_bounds,
    print_paragraphs,
    print_rows,
    print_table,
    to_json,
)

# Imports only the statement of tensorflow_privacy. Other parts fail to import on TensorFlow >=
# 2.16.
sys.skip_tf_privacy_import = True
try:
    from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
except ImportError:
    compute_dp_sgd_privacy_lib = None

RIGHT_GUESSES = (55, 60, 65, 70, 75, 80)
EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0)
GROUPS = (2, 4)
_QUANTITIES = ("noise_multiplier", "batch_size", "steps", "epochs", "delta", "epsilon")
_QUANTITIES += ("right_guesses",)
_LARGEST_DELTA = 1e-5  # The largest delta that this program chooses.
_COLUMNS = ("epsilon", "noise_multiplier", "steps", "epochs", "learning_rate", "right_guesses")
_COLUMNS += ("epsilon_of_examples_of_one_person", "outlook")


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    real, whole = flags.DEFINE_float, flags.DEFINE_integer
    for define, name, *about in (
        (whole, "num_examples", "Number of training examples; it counts as public."),
        (whole, "batch_size", "Expected number of examples in an update. Usual: up to 4,096."),
        (whole, "steps", "Number of updates. Usual: 200, or more above 80,000 examples."),
        (real, "epochs", "In place of --steps: passes over the data."),
        (real, "noise_multiplier", "Standard deviation of the noise, divided by l2_norm_clip."),
        (real, "epsilon", "Privacy budget."),
        (real, "right_guesses", "In place of --epsilon: limit on right guesses in 100.", 50, 100),
        (real, "delta", "Delta. Default: at most a tenth of 1/num_examples, and at most 1e-5."),
        (whole, "weights", "Number of trained weights of the network; adds an outlook."),
        (whole, "rows_per_user", "The most examples of one person; adds the epsilon of them all."),
    ):
        define(name, None, *about, flag_values=values)
    for name, default, choices, text in (
        ("sampling", "poisson", groups.SAMPLINGS, "How batches are drawn."),
        ("neighbours", None, groups.NEIGHBOURS, "Neighbouring data sets. Default: by --sampling."),
        ("accountant", None, ("pld", "rdp"), "Privacy accountant. Default: the tightest."),
    ):
        flags.DEFINE_enum(name, default, list(choices), text, flag_values=values)


def main(argv, values=flags.FLAGS):
    """Answers the question that the flags ask. A `UserError` is printed as one line."""
    with in_one_line("tfdpx.train.plan", argv), checking_flags():
        received = {name: values[name].value for name in ("num_examples", *_QUANTITIES)}
        about = groups.Sampling(values.sampling, values.neighbours), values.accountant
        record = plan(received, *about, values.weights, values.rows_per_user)
    for caution in record["warnings"]:
        print(f"Warning: {caution}", file=sys.stderr)
    print(to_json(record), flush=True)


def plan(received, sampling, accountant=None, weights=None, rows_per_user=None):
    """Prints the missing quantity of a plan, or a table of plans for several budgets.

    The function prints a table if epsilon and `right_guesses` are missing, and the noise or the
    number of updates is missing, too.

    Args:
        received: Dict with `num_examples`, `noise_multiplier`, `batch_size`, `steps`, `epochs`,
            `delta`, `epsilon` and `right_guesses` (in 100). Unknown values are None.
        sampling: `tfdpx.accounting.groups.Sampling`.
        accountant: "pld" or "rdp"; None chooses the tightest one for the sampling.
        weights: Int, the number of trained weights of the network, from which the learning rate
            follows. None means `defaults.WEIGHTS`.
        rows_per_user: Int, the largest number k of examples of one person. The answer then also has
            the epsilon that protects k examples together. With None, the answer has such an epsilon
            for each k in `GROUPS`.

    Returns:
        Dict of JSON values: the answer; or, for a table, the lists `plans_by_right_guesses` and
        `plans`, with a dict for each row. If no plan can stay within the limit of a row, the
        other values of this row are None.

    Raises:
        ValueError: If a value is out of range, if no value is left to compute, or if no plan stays
            within epsilon.
    """
    count = received["num_examples"]
    if count is None:
        raise ValueError("Flag --num_examples is the number of training examples. It is not set.")
    check_positive_integer("num_examples", count)
    if weights is not None:
        check_positive_integer("weights", weights)
    values = {name: value for name, value in received.items() if value is not None}
    if {"steps", "epochs"} <= values.keys():
        raise ValueError(
            "Flag --epochs takes the place of --steps: leave one of them out. Received: "
            f"--steps={values['steps']} --epochs={values['epochs']}."
        )
    if "right_guesses" in values and ("epsilon" in values or sampling.name != "poisson"):
        raise ValueError(
            "Flag --right_guesses takes the place of --epsilon, and needs --sampling=poisson, "
            "because no bound on attacks is known for other batches."
        )
    people = GROUPS
    if rows_per_user is not None:
        must = "be from 1 to --num_examples, with --sampling=poisson"
        is_valid = 1 <= rows_per_user <= count and sampling.name == "poisson"
        require(is_valid, "rows_per_user", rows_per_user, must)
        people = (rows_per_user,)
    has_length = bool({"steps", "epochs"} & values.keys())
    has_noise = "noise_multiplier" in values
    has_epsilon = bool({"epsilon", "right_guesses"} & values.keys())
    usual, _ = defaults.for_networks(count)
    usual["delta"] = min(_LARGEST_DELTA, 10.0 ** math.floor(math.log10(0.1 / count) + 1e-9))
    is_open = {
        "batch_size": "batch_size" not in values and not (has_length and has_noise and has_epsilon),
        "steps": not (has_length or has_noise),
        "delta": "delta" not in values,
    }
    chosen = [name for name, is_left_out in is_open.items() if is_left_out]
    values |= {name: usual[name] for name in chosen}
    calibration.check(values)
    about = sampling, accountant or sampling.accountants[0], weights, people
    sampling.check_accountant(about[1])
    if has_epsilon or (has_length and has_noise):
        return _print_answer(answer(values, *about) | {"chosen": chosen}, sampling)
    return _print_table(_table(values, *about), people, "delta" in chosen)


def answer(values, sampling, accountant, weights=None, people=GROUPS):
    """Computes the missing quantity of a plan.

    Args:
        values: Dict like `received` of `plan`. Exactly one of these four is missing: the noise, the
            batch size, the length (`steps` or `epochs`), and the limit (`epsilon` or
            `right_guesses`).
        sampling: `tfdpx.accounting.groups.Sampling`.
        accountant: "pld" or "rdp".
        weights: As for `plan`.
        people: Tuple of ints. For each int k, the answer also has the epsilon that protects k
            examples of one person together.

    Returns:
        Dict of JSON values. `solved` is the name of the computed quantity.

    Raises:
        ValueError: If a value is out of range, if none or several of the four are missing, if no
            value stays within `epsilon`, or if the privacy loss is too small for the precision of
            the accountant.
    """
    length = values.get("steps", values.get("epochs"))
    names, goal = ("noise_multiplier", "batch_size", "epsilon"), values.get("right_guesses")
    solvable = {name: values.get(name) for name in names} | {"steps": length}
    solvable["epsilon"] = solvable["epsilon"] or goal
    solved, delta = exactly_one_missing(solvable, "--{}"), values["delta"]
    if goal is not None:
        arguments = {name: value for name, value in values.items() if name != "right_guesses"}
        goal, arguments["accountant"] = goal / 100, accountant
        asked = PrivacyPlan(**arguments, right_guesses=goal)
        values, value = {**values, "epsilon": asked.epsilon}, getattr(asked, solved)
    elif solved == "epsilon":
        value = sampling.epsilon(*calibration.run_of(values), delta, accountant)
    else:
        value = calibration.solve(solved, values, accountant, sampling.epsilon)
    values = {**values, solved: value}
    count, size, epsilon = (values[name] for name in ("num_examples", "batch_size", "epsilon"))
    noise, rate, steps = run = calibration.run_of(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The warnings of a plan are about Poisson sampling.
        same = PrivacyPlan(count, size, steps, noise, delta=delta, accountant=accountant)
    is_poisson = sampling.name == "poisson"
    together = {str(k): group_epsilon(same, k) for k in people if is_poisson and k <= count}
    suggestion, bounds = suggest(same, weights or defaults.WEIGHTS), _bounds(run, delta, sampling)
    return {
        "solved": solved,
        "num_examples": count,
        "batch_size": size,
        "sampling_probability": rate,
        "noise_multiplier": noise,
        "steps": steps,
        "epochs": steps * rate,
        "delta": delta,
        "epsilon": epsilon,
        "accountant": accountant,
        "sampling": sampling.name,
        "neighbours": sampling.neighbours,
        "is_exact": is_poisson,
        "weights": weights,
        "learning_rate": suggestion.learning_rate,
        "outlook": suggestion.outlook if weights else None,
        "right_guesses": bounds and bounds.right_guesses,
        "goal": goal and words.sentence_on_goal(goal, bounds),
        "epsilon_of_examples_of_one_person": together,
        "warnings": list(plan_warnings(epsilon, delta, count, noise)),
    }


def _bounds(run, delta, sampling):
    """Returns `AttackBounds` for attacks on one example; None for batches of a fixed size."""
    if sampling.name == "without_replacement":
        return None
    return attack.attack_bounds((sampling.run(*run),), delta, EXAMPLE)


def _print_answer(record, sampling):
    """Prints an answer, epsilons by other accountants, and attack bounds; returns all as a dict."""
    run = tuple(record[name] for name in ("noise_multiplier", "sampling_probability", "steps"))
    for accountant in ("pld", "rdp", "gdp"):
        record[f"epsilon_{accountant}"] = _epsilon(sampling, run, record["delta"], accountant)
    theirs, text = tf_privacy(record)
    record |= theirs
    print_table(record, title=f"{record['solved']} solved")
    print(f"Epsilon is {sampling.about}.\n")
    record |= print_attack_bounds(_bounds(run, record["delta"], sampling), sampling.neighbours)
    print(text)
    return record


def _epsilon(sampling, run, delta, accountant):
    """Returns the epsilon of a run by one accountant. None if it cannot compute this epsilon.

    Args:
        sampling: `tfdpx.accounting.groups.Sampling`.
        run: Tuple of the noise multiplier, the sampling probability and the number of updates.
        delta: Float.
        accountant: "pld", "rdp" or "gdp". The result of "gdp" is exact.
    """
    try:
        if accountant == "gdp" and sampling.name != "without_replacement":
            return accountants.epsilon(*sampling.run(*run), delta, accountant)
        return sampling.epsilon(*run, delta, accountant)
    except ValueError:  # The accountant lacks this sampling, or its precision is too low.
        return None


def tf_privacy(record):
    """Returns the epsilons that tensorflow-privacy computes for a plan, and its statement.

    Args:
        record: Dict returned by `answer`.

    Returns:
        A pair: a dict with the two epsilons of tensorflow-privacy, and a string with its statement
        and the reason why its epsilons differ from ours. If it has no statement for this plan, the
        epsilons are None and the string tells why.
    """
    names = [f"epsilon_tensorflow_privacy_{name}" for name in ("once_per_epoch", "poisson")]
    if not record["noise_multiplier"]:
        why = "Without noise there is no differential privacy: epsilon is infinite."
        return dict.fromkeys(names), why
    if compute_dp_sgd_privacy_lib is None:
        why = (
            "tensorflow-privacy is not installed (it refuses Python 3.12 and later), so its "
            "statement is missing here; the other figures do not need it."
        )
        return dict.fromkeys(names), why
    statement = compute_dp_sgd_privacy_lib.compute_dp_sgd_privacy_statement(
        number_of_examples=record["num_examples"],
        batch_size=record["batch_size"],
        # tensorflow-privacy rounds the number of steps up. Because of rounding errors, an exact
        # number of steps could become one more.
        num_epochs=(record["steps"] - 1e-6) * record["sampling_probability"],
        noise_multiplier=record["noise_multiplier"],
        delta=record["delta"],
        used_microbatching=False,
        accountant_type=compute_dp_sgd_privacy_lib.AccountantType[record["accountant"].upper()],
    )
    epsilons = map(float, re.findall(r"^ +Epsilon .*: +(\S+)$", statement, re.MULTILINE))
    why = textwrap.fill(words.say("why_tf_privacy_differs"), 100)
    return dict(zip(names, epsilons, strict=True)), f"tensorflow-privacy:\n\n{statement}\n{why}"


def _table(values, sampling, accountant, weights, people):
    """Returns a dict with a plan for each of `RIGHT_GUESSES` and each of `EPSILONS`."""
    cautions = {}

    def row_at(**goal):
        try:
            row = answer({**values, **goal}, sampling, accountant, weights, people)
            cautions.update(dict.fromkeys(row["warnings"]))
        except ValueError:  # The epsilon is too small for any plan, or too large.
            row = goal
        return {column: row.get(column) for column in _COLUMNS}

    guesses = RIGHT_GUESSES if sampling.name == "poisson" else ()
    return {
        **{name: values[name] for name in ("num_examples", "batch_size", "delta")},
        "sampling_probability": values["batch_size"] / values["num_examples"],
        "sampling": sampling.name,
        "accountant": accountant,
        "weights": weights,
        "plans_by_right_guesses": [
            {"at_most": most, **row_at(right_guesses=most)} for most in guesses
        ],
        "plans": [row_at(epsilon=epsilon) for epsilon in EPSILONS],
        "warnings": list(cautions),
    }


def _print_table(record, people, is_delta_chosen):
    """Prints the table of plans and the meaning of its columns. Returns `record`."""
    count, size, delta = (record[name] for name in ("num_examples", "batch_size", "delta"))
    columns = ["right guesses", "epsilon", "noise", "steps", "rate"]
    columns += [f"epsilon of {k}" for k in people] + ["outlook"] * bool(record["weights"])
    rows = []
    for row in (*record["plans_by_right_guesses"], *record["plans"]):
        together, right = row["epsilon_of_examples_of_one_person"] or {}, row["right_guesses"]
        guesses = right and rounded_up(100 * right, 3)
        cells = [
            f"{row.get('at_most', guesses)}%" if right or "at_most" in row else None,
            row["epsilon"] and rounded_up(row["epsilon"], 3),
            *(row[name] for name in ("noise_multiplier", "steps", "learning_rate")),
            *(rounded_up(together[str(k)], 3) if str(k) in together else None for k in people),
            row["outlook"],
        ]
        rows.append(cells[: len(columns)])
    print_rows(columns, rows, f"{count:,} examples, {size:,} an update, delta {delta:g}")
    print_paragraphs(words.listed("table_of_plans", count, delta, is_delta_chosen, people))
    return record


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    start_program(main)
