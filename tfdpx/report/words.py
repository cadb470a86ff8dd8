"""Writes all sentences about the privacy and the results of a run, from the run's record.

The sentences are in `templates/sentences.txt`, and this module computes the facts in them. The
statement is a text to cite. The page, the card and the answer of `verify` are for readers who do
not know machine learning. `VERSION` grows by one whenever a sentence, the page or the card changes.
`verify` compares texts word by word only if the version in the record is this `VERSION`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import textwrap
from collections.abc import Callable
from typing import Any

import jinja2

from tfdpx._arguments import require
from tfdpx.accounting.attack import AttackBounds, full_batch_epsilon
from tfdpx.accounting.groups import Sampling, group_epsilon
from tfdpx.accounting.ledger import EXAMPLE, MECHANISM, RELEASE, UPDATE, USER, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.accounting.statement import is_unknown, rounded_up, undrawn_updates

WORDS, VERSION = "words", "2"  # The key and the value of an entry in `Record.versions`.
NOT_PROTECTED = (
    "Results and pictures of private test examples are exact, not protected: do not publish them, "
    "or test on public examples."
)
# Right guesses in 100. Protection is strong below the first number, and weak from the second on.
STRONG, WEAK = 55, 75
RANGES = f"below {STRONG} is strong, {WEAK} and above is weak, and between them is moderate"
_WIDTH, _MOST_ENTRIES = 88, 20
_MEASURED = {"test": "test %ss", "validation": "%ss that were held out of the training"}


def worded(record: Record) -> Record:
    """Returns a copy of the record with the `VERSION` of the sentences added."""
    return dataclasses.replace(record, versions={**record.versions, WORDS: VERSION})


def in_one_line(value: Any) -> str:
    """Returns a value as text in one line. So a name with a line break cannot add a sentence."""
    return re.sub(r"\s+", " ", str(value))


@functools.cache
def template(
    name: str, finalize: Callable[[Any], str] | None = in_one_line, autoescape: bool = False
) -> Any:
    """Returns a jinja2 template.

    Args:
        name: String, a file in `templates/`.
        finalize: Optional function that converts each value before it is shown.
        autoescape: Bool, whether values are escaped for HTML.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdpx.report"),
        autoescape=autoescape,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.globals.update(_FACTS)
    return environment.get_template(name)


def say(name: str, *about: Any) -> str:
    """Returns the sentences of a jinja2 macro as one paragraph.

    Args:
        name: String, a macro of `templates/sentences.txt`.
        *about: Arguments of the macro, such as a record.
    """
    return " ".join(listed(name, *about))


def listed(name: str, *about: Any) -> list[str]:
    """Returns the sentences of a macro as a list. The arguments are as for `say`."""
    macro = getattr(template("sentences.txt").module, name)
    return [" ".join(line.split()) for line in macro(*about).split("\n") if line.strip()]


def version_of(record: Record) -> dict[str, str | None]:
    """Returns a dict of the versions that determine a record's texts: words and dp-accounting."""
    return {name: record.versions.get(name) for name in (WORDS, "dp-accounting")}


def data_name(record: Record) -> str:
    """Returns the name of the training data: `--data_name` or, if not set, `record.data.name`."""
    return record.settings.get("data_name") or (record.data.name if record.data else "unknown data")


def protected_one(record: Record) -> str:
    """Returns the unit that a guarantee protects: "person", or for example "row"."""
    return "person" if record.ledger.unit == USER else record.unit


def statement(
    record: Record,
    *,
    rows_per_user: int | None = None,
    goal: str | None = None,
    is_planned: bool = False,
) -> str:
    """Returns the guarantee as a text to cite, with the protected unit, the method and assumptions.

    Epsilon is rounded up, because the text must not promise more than the ledger.

    Args:
        record: `Record`.
        rows_per_user: Optional int, the largest number of examples of one person. If set, the text
            has a sentence on the epsilon of all these examples together. Must be None if updates
            draw people.
        goal: Optional string, a complete sentence: the result of `goal_of`.
        is_planned: Bool, whether the updates have not been made yet. Their seeds are then unknown.

    Returns:
        String with lines of at most 88 characters. It ends with a line break.

    Raises:
        ValueError: If an argument is out of range, or the sampling probability of an entry is
            unknown.
    """
    ledger, unit = record.ledger, record.unit
    people = _of_one_person(record, rows_per_user)
    if reason := say("without_guarantee", record):
        return _filled(reason) + "\n"
    bounds = None if record.is_approximate else record.attack_bounds()
    if bounds and (asked := record.settings.get("right_guesses")):
        goal = sentence_on_goal(asked / 100, bounds)
    one = protected_one(record)
    text = template("statement.txt").render(
        record=record,
        one=one,
        many="people" if ledger.unit == USER else f"{unit}s",
        number=record.data.num_examples if record.data else None,
        difference=f"all {unit}s of one person" if ledger.unit == USER else f"one {unit}",
        kind="releases" if all(entry.is_release for entry in ledger.entries) else "updates",
        is_full_batch=all(entry.sampling_probability == 1 for entry in ledger.entries),
        is_planned=is_planned,
        caution=people or say("caution", record),
        attack=bounds and say("guesses", bounds, one),
        goal=goal,
    )
    heading, empty, claim, *parts = text.split("\n")
    return "\n".join([heading, empty, _filled(claim), *(_filled(part, "  ") for part in parts), ""])


def of_ledger(
    ledger: Ledger,
    name: str,
    num_examples: int | None,
    delta: float,
    accountant: str,
    **options: Any,
) -> str:
    """Returns the `statement` for a ledger without a record.

    Args:
        ledger: `Ledger`.
        name: String, the name of the data.
        num_examples: Optional int, the number of examples, or of people. It is public.
        delta: Float in (0, 1), for `ledger.epsilon`.
        accountant: As for `Ledger.epsilon`.
        **options: Optional arguments of `statement`.
    """
    data = DatasetId(name, num_examples)
    record = Record("statement", data, ledger, delta, accountant, unit="example")
    return statement(record, **options)


def summary(plan: PrivacyPlan) -> str:
    """Returns a description of a plan in one line."""
    return say("plan", plan, goal_of(plan))


def goal_of(plan: PrivacyPlan) -> str | None:
    """Returns a sentence on a plan's argument `right_guesses`; None if the plan has none."""
    asked = plan.right_guesses
    return sentence_on_goal(asked, plan.attack_bounds()) if asked else None


def sentence_on_goal(right_guesses: float, bounds: AttackBounds) -> str:
    """Returns a sentence on a plan's argument `right_guesses`, and on the resulting epsilon.

    Args:
        right_guesses: Float, as passed to `PrivacyPlan`.
        bounds: `AttackBounds` of the plan.
    """
    return say("goal", right_guesses, bounds, full_batch_epsilon(right_guesses, bounds.delta))


def strength(bounds: AttackBounds | None) -> str | None:
    """Returns the strength of a protection: "strong", "moderate" or "weak"; None without bounds."""
    if bounds is None:
        return None
    right = _right(bounds)
    return "strong" if right < STRONG else "moderate" if right < WEAK else "weak"


def protected(record: Record) -> tuple[str, str]:
    """Returns a sentence on who is protected, and a caution about people with less protection."""
    first, *caution = listed("protected", record)
    return first, caution[0] if caution else statement(record)


def readable(value: Any) -> str:
    """Returns a JSON value as a string for a table."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(readable, value))
    if isinstance(value, dict):
        parts = [f"{name}: {readable(part)}" for name, part in value.items()]
        more = f", and {len(parts) - _MOST_ENTRIES} more" * (len(parts) > _MOST_ENTRIES)
        return ", ".join(parts[:_MOST_ENTRIES]) + more
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _of_one_person(record, rows):
    """Returns a sentence on the epsilon of a person with `rows` examples; None without `rows`."""
    if rows is None:
        return None
    hint = " Each is already all examples of one person."
    require(record.ledger.unit == EXAMPLE, "rows_per_user", rows, "be None for people", hint)
    about = {"delta": record.delta, "accountant": record.accountant}
    return say("of_one_person", record, rows, group_epsilon(record.ledger, rows, **about))


def _right(bounds):
    """Returns the largest share of right guesses in percent, rounded up.

    The percentage is a whole number, except above 99, where it has two decimals.
    """
    right = math.ceil(1e4 * bounds.right_guesses - 1e-6) / 100
    return right if right > 99 else math.ceil(right)


def _kinds(ledger):
    """Returns the set of the kinds of entries in a ledger."""

    def kind(entry):
        return MECHANISM if entry.epsilon is not None else RELEASE if entry.is_release else UPDATE

    return set(map(kind, ledger.entries))


def _spent_on(training):
    """Returns the epsilon of a training as text: rounded up, "infinite" or "unknown"."""
    limit = training.limit
    return "unknown" if limit is None else "infinite" if limit == math.inf else rounded_up(limit)


def _scores(results, split):
    """Returns the metrics of a split as a text, such as "loss 0.3, precision 0.9"."""
    scores = {n: v for n, v in results.items() if n.startswith(split) and isinstance(v, float)}
    return ", ".join(f"{name[len(split) + 1 :]} {value:.4g}" for name, value in scores.items())


def _delta(record):
    """Returns `total_delta` as text, rounded up. If it is None, templates do not show the text."""
    return f"{float(rounded_up(record.total_delta or 0.5, 6)):g}"


def _package(name, record):
    version = record.versions.get(name, "not installed")
    return name if version == "not installed" else f"{name} {version}"


def _search_epsilon(ledger, run):
    return dataclasses.replace(ledger, entries=run).composed_epsilon(None)


def _filled(paragraph, indent=""):
    return textwrap.fill(
        paragraph,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# The functions and numbers that the sentences use.
_FACTS: dict[str, Any] = {
    "ranges": RANGES,
    "measured_rows": _MEASURED,
    "inf": math.inf,
    "nan": math.nan,
    "data_name": data_name,
    "delta": _delta,
    "is_unknown": is_unknown,
    "kinds": _kinds,
    "listed": listed,
    "package": _package,
    "protected": protected,
    "protected_one": protected_one,
    "readable": readable,
    "right": _right,
    "recognised": lambda bounds: math.ceil(100 * bounds.true_positive_rate(0.01) - 1e-6),
    "rounded_up": rounded_up,
    "say": say,
    "shuffled": Sampling("shuffle").about,
    "scores_of": _scores,
    "search_epsilon": _search_epsilon,
    "spent_on": _spent_on,
    "statement": statement,
    "strength": strength,
    "undrawn_updates": undrawn_updates,
}
