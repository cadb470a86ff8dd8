"""Shows the noise and the number of updates for each privacy budget, before anything is spent.

    tfdpx plan --num_examples=4000 --batch_size=400

Each row is for an epsilon from 0.5 to 20: the noise multiplier, the updates, a learning rate to
test first, the largest share of right guesses of an attacker, and the epsilon of a person with 2 or
4 examples. Set --steps or --epochs to solve for the noise, or --noise_multiplier to solve for the
updates. No data are read, and no row promises an accuracy. The last line is one JSON object.
"""

import tfdpx.train.quiet_start  # noqa: F401 - before TensorFlow is imported.

# isort: split

import math
import sys
import textwrap
import warnings

from absl import app, flags
from rich import console, table

from tfdpx.accounting import PrivacyPlan, accountants, group_epsilon
from tfdpx.accounting.statement import rounded_up
from tfdpx.suggestion import suggest
from tfdpx.train import defaults
from tfdpx.train.errors import UserError, in_one_line
from tfdpx.train.output import to_json

EPSILONS = (0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0)
GROUPS = (2, 4)
_LARGEST_DELTA = 1e-5  # The largest delta that this program chooses.
_NOTES = (
    "Right guesses: someone who knows everything but whether one example was in the data finds it "
    "out at most so often (50% is tossing a coin; above 75% the protection is weak).",
    "A person with several examples is protected less: the last columns are the epsilon of {both} "
    'examples of one person together. With PrivacyPlan(unit="user") and fit(x, y, user_ids=ids) '
    "epsilon is of all examples of a person (docs/users.md).",
    "The learning rate is for DPSGD with l2_norm_clip=0.1 and no momentum, of networks of so many "
    "weights (--weights) on inputs around zero: test half and twice of it on public data.",
    "Outlook (with --weights): hopeless where the noise hides what so many weights learn, hard "
    "where it hides a part. No row promises an accuracy. How much a model learns depends on the "
    "data, and a larger batch or more examples allow a smaller epsilon.",
)


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    real, whole = flags.DEFINE_float, flags.DEFINE_integer
    for define, name, text in (
        (whole, "num_examples", "Training examples; public."),
        (whole, "batch_size", "Expected examples in an update. Default: up to 4,096."),
        (whole, "steps", "Model updates. Default: 200, or more for more than 80,000 examples."),
        (whole, "weights", "Trained weights of the network; shows how well it can learn."),
        (real, "epochs", "In place of --steps: passes over the data."),
        (real, "noise_multiplier", "In place of --steps: the updates are solved for."),
        (real, "delta", "Delta. Default: at most a tenth of 1/num_examples, and at most 1e-5."),
    ):
        define(name, None, text, flag_values=values)
    choices = ["pld", "rdp"]
    flags.DEFINE_enum("accountant", "pld", choices, "Privacy accountant.", flag_values=values)


def main(argv, values=flags.FLAGS):
    """Prints the table that the flags ask for; errors of the user become one line."""
    with in_one_line("tfdpx.train.plan", argv):
        if problems := list(_problems(values)):
            raise UserError(" ".join(problems))
        record = plans(
            values.num_examples,
            values.batch_size,
            values.steps,
            values.epochs,
            values.noise_multiplier,
            values.delta,
            values.accountant,
            values.weights,
        )
    _print(record, values.delta is not None)
    print(to_json(record), flush=True)


def plans(
    num_examples,
    batch_size=None,
    steps=None,
    epochs=None,
    noise_multiplier=None,
    delta=None,
    accountant="pld",
    weights=None,
):
    """Plans a training at each of `EPSILONS`.

    Args:
        num_examples: Int.
        batch_size: Int; None, as for `steps`, uses `defaults.for_networks`.
        steps: Int, or None.
        epochs: Float, in place of `steps`, or None.
        noise_multiplier: Float, in place of both, to solve for the steps.
        delta: Float in (0, 1), or None to choose one.
        accountant: "pld" or "rdp".
        weights: Int, the trained weights of the network; None, for learning rates, uses
            `defaults.WEIGHTS`.

    Returns:
        Dict of JSON values with `plans`, a dict for each epsilon. Its other values are None if no
        plan keeps within that epsilon.
    """
    delta = _delta(num_examples) if delta is None else delta
    usual, _ = defaults.for_networks(num_examples)
    size = batch_size or usual["batch_size"]
    rows, cautions = [], {}
    for epsilon in EPSILONS:
        length = {"steps": steps, "epochs": epochs, "noise_multiplier": noise_multiplier}
        length = {name: value for name, value in length.items() if value is not None}
        about = {"delta": delta, "accountant": accountant, "epsilon": epsilon}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                length = length or {"steps": usual["steps"]}
                plan = PrivacyPlan(num_examples, size, **length, **about)
            cautions |= dict.fromkeys(str(caution.message) for caution in caught)
        except ValueError:  # No plan keeps within so small an epsilon, or it is too large.
            plan = None
        rows.append({"epsilon": epsilon, **_row(plan, weights)})
    return {
        "num_examples": num_examples,
        "batch_size": size,
        "sampling_probability": size / num_examples,
        "delta": delta,
        "accountant": accountant,
        "weights": weights,
        "plans": rows,
        "warnings": list(cautions),
    }


def _row(plan, weights):
    """Returns the values of a plan for the table, a dict; all are None without a plan."""
    names = ("noise_multiplier", "steps", "epochs", "learning_rate", "right_guesses")
    names += ("epsilon_of_examples_of_one_person", "outlook")
    if plan is None:
        return dict.fromkeys(names)
    groups = {str(k): group_epsilon(plan, k) for k in GROUPS if k <= plan.num_examples}
    suggestion = suggest(plan, weights or defaults.WEIGHTS)
    values = (plan.noise_multiplier, plan.steps, plan.epochs, suggestion.learning_rate)
    values += (plan.attack_bounds().right_guesses, groups, suggestion.outlook if weights else None)
    return dict(zip(names, values, strict=True))


def _delta(num_examples):
    """Returns the delta for so many examples, a power of ten."""
    return min(_LARGEST_DELTA, 10.0 ** math.floor(math.log10(0.1 / num_examples) + 1e-9))


def _problems(values):
    """Yields a sentence for each flag that is out of range, and each conflict of two flags."""
    count, size = values.num_examples, values.batch_size
    if count is None or count < 1:
        yield f"Flag --num_examples must be at least 1. Received: --num_examples={count}."
    if size is not None and not 1 <= size <= max(count or 0, 1):
        yield (
            "Flag --batch_size must lie between 1 and --num_examples. Received: "
            f"--batch_size={size}."
        )
    lengths = ("steps", "epochs", "noise_multiplier")
    received = {name: values[name].value for name in lengths if values[name].value is not None}
    listed = " ".join(f"--{name}={value:g}" for name, value in received.items())
    if len(received) > 1:
        yield f"Give one of --steps, --epochs and --noise_multiplier. Received: {listed}."
    for name, value in received.items():
        if not 0 < value < math.inf:
            yield f"Flag --{name} must be positive and finite. Received: --{name}={value:g}."
    if values.weights is not None and values.weights < 1:
        yield f"Flag --weights must be at least 1. Received: --weights={values.weights}."
    if values.delta is not None:
        try:
            accountants.check_delta(values.delta)
        except ValueError as error:
            yield str(error)


def _print(record, is_delta_asked):
    """Prints the table and the meaning of its columns."""
    count, size, delta = (record[name] for name in ("num_examples", "batch_size", "delta"))
    rows = table.Table(title=f"{count:,} examples, {size:,} an update, delta {delta:g}")
    titles = ("epsilon", "noise", "updates", "learning rate", "right guesses")
    for title in (*titles, *(f"epsilon of {k} examples" for k in GROUPS)):
        rows.add_column(title, justify="right")
    if record["weights"]:
        rows.add_column("outlook")
    for plan in record["plans"]:
        cells = ["-"] * len(rows.columns)
        if plan["steps"] is not None:
            groups = plan["epsilon_of_examples_of_one_person"]
            cells[1:5] = (
                f"{plan['noise_multiplier']:.3f}",
                f"{plan['steps']:,}",
                f"{plan['learning_rate']:g}",
                f"{rounded_up(100 * plan['right_guesses'], 3)}%",
            )
            people = (rounded_up(groups[str(k)], 3) if str(k) in groups else "-" for k in GROUPS)
            cells[5:] = (*people, plan["outlook"]) if record["weights"] else people
        rows.add_row(f"{plan['epsilon']:g}", *cells[1:])
    console.Console().print(rows)
    chosen = "as asked for" if is_delta_asked else "at most a tenth of 1/num_examples"
    notes = [
        f"Delta is {delta:g}, {chosen}, because publishing one example in full, chosen at random, "
        f"would satisfy a delta of 1/num_examples = {1 / count:.3g}.",
        "Noise is the noise multiplier: its standard deviation over the clip.",
        *_NOTES,
    ]
    both = " and of ".join(map(str, GROUPS))
    for note in notes:
        print(textwrap.fill(note.replace("{both}", both), 88, subsequent_indent="  "))
    for caution in record["warnings"]:
        print(f"Warning: {caution}", file=sys.stderr)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
