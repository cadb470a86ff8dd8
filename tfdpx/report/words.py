"""Every sentence about the privacy and the results of a run: each is a function of its record.

The statement is a text to cite. Page, card and `verify` have the other sentences, for readers
outside the field. `VERSION` grows by one whenever a sentence, the page or the card changes:
`verify` knows the records that it can render.
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

from tfdpx._arguments import is_number, require
from tfdpx.accounting.attack import AttackBounds
from tfdpx.accounting.groups import group_epsilon
from tfdpx.accounting.ledger import EXAMPLE, USER, Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.accounting.statement import rounded_up, why_unknown

WORDS, VERSION = "words", "1"  # An entry of `Record.versions`.
NOT_PROTECTED = (
    "Results and pictures of private test examples are exact, not protected: do not publish them, "
    "or test on public examples."
)
# Protection is strong below the first number of right guesses in 100, and weak from the second on.
STRONG, WEAK = 55, 75
RANGES = f"below {STRONG} is strong, {WEAK} and above is weak, and between them is moderate"
_WIDTH, _MOST_ENTRIES = 88, 20
_SPLITS = {"test": "test {}s", "validation": "{}s that were held out of the training"}
_RELEASES = (
    "Gaussian releases of sums over all examples, after clipping each, with noise of "
    "noise_multiplier times the clip; the rest is computed from these."
)
_MECHANISMS = (
    "Releases of other mechanisms count as the worst mechanism of their epsilon and delta."
)


def worded(record: Record) -> Record:
    """Returns the record with the version of these words."""
    return dataclasses.replace(record, versions={**record.versions, WORDS: VERSION})


@functools.cache
def template(
    name: str, finalize: Callable[[Any], str] | None = None, autoescape: bool = False
) -> Any:
    """Returns a template of jinja2.

    Args:
        name: String, a file in `templates/`.
        finalize: Optional function of each value, before it is shown.
        autoescape: Bool, whether values are escaped for HTML.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tfdpx.report"),
        autoescape=autoescape,
        finalize=finalize,
        trim_blocks=True,
    )
    return environment.get_template(name)


def version_of(record: Record) -> dict[str, str | None]:
    """Returns the versions that determine the texts of a record: of the words, and of epsilon."""
    return {name: record.versions.get(name) for name in (WORDS, "dp-accounting")}


def data_name(record: Record) -> str:
    """Returns the name of the data that a run trained on."""
    return record.data.name if record.data else "unknown data"


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
    """Returns the guarantee as a text to cite: for whom it holds, how, and its assumptions.

    Epsilon is rounded up, because no text may promise more than the ledger.

    Args:
        record: `Record`.
        rows_per_user: Optional int, the most examples of one person, for a sentence on the epsilon
            of all of them together. Not if updates draw people.
        goal: Optional string, a whole sentence on the right guesses that a plan was made for.
        is_planned: Bool. Whether the updates are still to be made, with unknown seeds.

    Returns:
        String of lines of at most 88 characters; it ends with a line break.

    Raises:
        ValueError: If an argument is out of range, or the sampling probability of an entry is
            unknown.
    """
    ledger, unit = record.ledger, record.unit
    is_of_people = ledger.unit == USER
    many = "people" if is_of_people else f"{unit}s"
    number = record.data.num_examples if record.data else None
    caution = _group(record, rows_per_user) or _caution(record)
    if reason := _without_guarantee(record):
        return _filled(reason) + "\n"
    bounds = None if record.is_approximate else record.attack_bounds()
    if bounds and (asked := record.settings.get("right_guesses")):
        goal = bounds.goal_sentence(asked / 100)
    text = template("statement.txt", _in_one_line).render(
        record=record,
        ledger=ledger,
        unit=unit,
        name=data_name(record),
        one=protected_one(record),
        many=many,
        difference=f"all {unit}s of one person" if is_of_people else f"one {unit}",
        count=f"N = {number:,} {many}" if number else "",
        epsilon=rounded_up(record.epsilon),
        precise_epsilon=rounded_up(record.epsilon, 6),
        delta=_delta(record),
        kind="releases" if all(entry.is_release for entry in ledger.entries) else "updates",
        is_full_batch=all(entry.sampling_probability == 1 for entry in ledger.entries),
        is_planned=is_planned,
        accountant=record.accountant.upper(),
        dp_accounting=_package("dp-accounting", record),
        tfdpx=_package("tfdpx", record),
        caution=caution,
        attack=bounds and bounds.sentence(protected_one(record)),
        goal=goal,
        mechanism=_mechanism(record),
        steps=steps(ledger),
        exceptions=_exceptions(record),
        initial=_initial(record),
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
    """Returns the `statement` of a ledger outside of a record.

    Args:
        ledger: `Ledger`.
        name: String, the name of the data.
        num_examples: Optional int, the number of examples, or of people; public.
        delta: Float in (0, 1), for `ledger.epsilon`.
        accountant: As for `Ledger.epsilon`.
        **options: Of `statement`.
    """
    data = DatasetId(name, num_examples)
    record = Record("statement", data, ledger, delta, accountant, unit="example")
    return statement(record, **options)


def steps(ledger: Ledger) -> str:
    """Returns sentences on all updates, releases and paid searches of a ledger."""
    sentences = [f"{_entry(entry)}." for entry in ledger.entries if entry.mean_runs is None]
    for run in ledger.selections:
        search = dataclasses.replace(ledger, entries=run)
        sentences.append(
            f"The best of a random number of runs, {run[0].mean_runs:g} on average, each of "
            f"{' and '.join(map(_entry, run))}: epsilon {search.composed_epsilon(None):.6g} at "
            f"delta {run[0].delta:g} for all of them."
        )
    return " ".join(sentences)


def reasons_against_release(record: Record) -> list[str]:
    """Returns a list with a sentence on why not to release the weights; else an empty list."""
    if not record.is_private:
        return [f"Not private: the weights may tell everything about the {record.unit}s."]
    return [f"Do not release: {'; '.join(record.problems)}."] if record.problems else []


def strength(bounds: AttackBounds | None) -> str | None:
    """Returns the word for the protection that bounds on attacks give; None without bounds."""
    if bounds is None:
        return None
    right = math.ceil(100 * bounds.right_guesses - 1e-6)  # As in `AttackBounds.sentence`.
    return "strong" if right < STRONG else "moderate" if right < WEAK else "weak"


def protected(record: Record) -> tuple[str, str]:
    """Returns a sentence on who is protected, and a caution about people with less protection."""
    name, unit = data_name(record), record.unit
    if not record.is_private:
        return f"Not a single {unit} of {name} is protected.", statement(record)
    if why_unknown(record.ledger):
        return f"It is unknown how well anyone in {name} is protected.", statement(record)
    if not record.ledger.steps:
        return f"No training on {name} is recorded.", statement(record)
    is_weak = strength(record.attack_bounds()) == "weak"
    is_so = "Weakly protected" if is_weak else "Protected"
    is_so = "Would be protected" if record.problems else is_so
    if record.ledger.unit == USER:
        return f"{is_so}: each person in {name}, with all their {unit}s.", _caution(record)
    return (
        f"{is_so}: only each single {unit} of {name}, not a person with several {unit}s.",
        f"Caution: a person, such as a patient, with several {unit}s is protected less than the "
        f"numbers here say, because they count for one {unit} only.",
    )


def attack(record: Record) -> str:
    """Returns sentences on the best attack and on epsilon."""
    bounds = record.attack_bounds()
    if bounds is None or not record.ledger.steps:
        return "No limit is known to what someone can find out about the data from the weights."
    sentences = [
        bounds.sentence(protected_one(record)),
        f"This is {strength(bounds)} protection: {RANGES}.",
    ]
    if record.ledger.is_seeded:
        sentences.append("This does not hold against someone who knows the seed.")
    if record.is_private:
        about = "about " * record.is_approximate
        sentences.append(
            f"Specialists state this as epsilon, {about}{rounded_up(record.epsilon)} here, and "
            f"delta, {_delta(record)} here: the larger, the weaker."
        )
    if record.is_approximate:
        sentences.append(
            "Epsilon is an approximation, because batches were shuffled. The limit on right "
            f"guesses holds, if absent means that an empty {record.unit} is in its place."
        )
    return " ".join(sentences)


def measured(record: Record) -> str:
    """Returns sentences on the metrics, with the base rate."""
    results, sentences = record.results, []
    split = next((s for s in _SPLITS if results.get(f"{s}_accuracy") is not None), "test")
    shown = {name: results.get(f"{split}_{name}") for name in ("accuracy", "r2", "auc")}
    rows = _SPLITS[split].format(record.unit)
    if results.get("num_measured"):
        rows = f"{results['num_measured']:,} {rows}"
    if shown["accuracy"] is not None:
        sentences.append(f"Of {rows}, {shown['accuracy']:.1%} are classified correctly.")
        if interval := results.get(f"{split}_accuracy_interval"):
            low, high = (100 * end for end in interval)
            sentences.append(
                f"On many more of the same kind it may be {low:.1f} to {high:.1f}% (95% interval). "
                f'The answer "{results[f"{split}_most_frequent_class"]}" for all of them would be '
                f"right for {results[f'{split}_base_rate']:.1%}."
            )
    if shown["auc"] is not None:
        sentences.append(
            f"Of pairs of both classes, {shown['auc']:.1%} are ranked right (AUC; 50% is guessing)."
        )
    if shown["r2"] is not None:
        sentences.append(
            f"On {rows}, R² is {shown['r2']:.3f}: 1 is perfect, and 0 is no better than the mean "
            "of all as the answer for each."
        )
    if not sentences:
        scores = {n: v for n, v in results.items() if n.startswith(split) and isinstance(v, float)}
        listed = ", ".join(f"{n[len(split) + 1 :]} {v:.4g}" for n, v in scores.items())
        sentences += [f"On {rows}: {listed}."] * bool(scores)
    return " ".join(sentences) or "Nothing was measured."


def limits(record: Record) -> list[str]:
    """Returns sentences on the causes that would void the claim, and on its exceptions."""
    unit = record.unit
    seed = "This run had one." if record.ledger.is_seeded else "None is recorded."
    names = "names of classes" + " and columns" * (unit == "row")
    search = f"Recorded: {record.searched}" if record.searched else "None is recorded"
    paid = ", which epsilon counts" * bool(record.searched and record.is_search_paid)
    texts = [
        f"A seed: someone who knows it can repeat the random numbers that protect. {seed}",
        f"Other models or statistics from the same {unit}s: together they tell more.",
        f"Many settings tried on the same {unit}s, and not counted. {search}{paid}.",
        "Edited files: nothing here is signed, so a forger can change all of them alike.",
        f"Not protected: test {unit}s, on which results are measured; results on the {unit}s "
        f"trained on, such as in a log; {names}, sizes, and how many {unit}s or people there are.",
    ]
    if not record.is_private:
        texts = [f"Nothing is left to void: no {unit} is protected."]
    for training in record.seen:
        is_private = training.epsilon < math.inf
        spent = f"epsilon {training.epsilon_in_words}" if is_private else "without privacy"
        counted = ", which is counted here" * record.counts(training)
        texts.append(f"The training began with weights of {training.data.name}: {spent}{counted}.")
    texts += [f"Not protected: {exception}." for exception in _exceptions(record)]
    if exact := record.results.get("not_protected"):
        texts.append(f"{exact} Page, record and model.keras hold the results.")
    return texts


def check(record: Record) -> str:
    """Returns sentences on how to check that files belong to the record."""
    return (
        "The command tfdpx verify FOLDER checks that model, record, statement and page belong "
        f"together. The fingerprint of the record is {record.fingerprint}. Have the sender read "
        "theirs to you by telephone: it must be the same."
    )


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


def _caution(record):
    """Returns a sentence on people who are protected less, as the statement has it."""
    unit = record.unit
    if record.ledger.unit == USER:
        return (
            f"Names or numbers in the data tell which {unit}s belong to one person: a person with "
            "two names or numbers is protected less."
        )
    return (
        f"A person with several {unit}s is protected less than even the sum of their epsilons "
        "says: tfdpx.accounting.group_epsilon gives the epsilon of k of them."
    )


def _group(record, rows):
    """Returns a sentence on people with several examples; None if their number is None."""
    if rows is None:
        return None
    hint = " Each is already all examples of one person."
    require(record.ledger.unit == EXAMPLE, "rows_per_user", rows, "be None for people", hint)
    about = {"delta": record.delta, "accountant": record.accountant}
    together = group_epsilon(record.ledger, rows, **about)
    if together == math.inf:
        return f"For a person with {rows} {record.unit}s no epsilon is known."
    return (
        f"For data sets that differ in up to {rows} {record.unit}s, such as all of one person, "
        f"epsilon = {rounded_up(together, 6)} at the same delta."
    )


def _without_guarantee(record):
    """Returns why nothing is guaranteed or nothing was spent; None if there is a guarantee."""
    ledger, name = record.ledger, data_name(record)
    if not record.is_private:
        unprotected = sum(e.steps for e in ledger.entries if e.noise_multiplier == 0)
        plural = "s" * (unprotected != 1)
        why = f" {unprotected:,} update{plural} had no noise." if unprotected else ""
        if ledger.unit is None:
            why += " Some updates protect single examples and some people: nothing protects both."
        return f"There is no differential privacy for {name}: epsilon is infinite.{why}"
    if why := why_unknown(ledger):
        return (
            f"What was spent on {name} is unknown, so no differential privacy can be stated: "
            f"{why}. The updates that are known spend epsilon = {rounded_up(record.epsilon)} at "
            f"delta = {_delta(record)}, as if all batches were Poisson samples; that is no limit."
        )
    return None if ledger.entries else f"Nothing was spent on {name}: no noisy update is recorded."


def _mechanism(record):
    """Returns sentences on updates, on releases, or on both."""
    clip, unit = record.results.get("l2_norm_clip"), record.unit
    clipped = f"clipped to an L2 norm of {clip:g}" if is_number(clip) else "clipped"
    if clip == "automatic":
        clipped = "divided by its L2 norm plus a constant"
    gradient = f"the gradient of each {unit}"
    if record.ledger.unit == USER:
        gradient = f"the mean gradient of some {unit}s of each person drawn"
    updates = (
        f"DP-SGD: in each update {gradient} is {clipped}, and Gaussian noise is added to their "
        "sum, of noise_multiplier times what one of them can change."
    )
    entries = record.ledger.entries
    kinds = {entry.is_release for entry in entries if entry.epsilon is None}
    mechanisms = [_MECHANISMS] * any(entry.epsilon is not None for entry in entries)
    return " ".join([updates] * (False in kinds) + [_RELEASES] * (True in kinds) + mechanisms)


def _entry(entry):
    if entry.epsilon is not None:
        pair = f"epsilon = {entry.epsilon:.6g}, delta = {entry.delta:g}"
        return f"{entry.steps:,} of another mechanism, {entry.name}: {pair}"
    sampling = (
        "full batches"
        if entry.sampling_probability == 1
        else f"sampling_probability = {entry.sampling_probability or math.nan:.8g}"
    )
    return f"{entry.steps:,} at noise_multiplier = {entry.noise_multiplier:.8g}, {sampling}"


def _exceptions(record):
    """Returns a list of parts of a run that are not protected."""
    public, exceptions = record.results.get("num_public"), []
    if record.results.get("individual_mean") is not None:
        exceptions.append("the folder individual_PRIVATE, which nobody should publish")
    if public:
        exceptions.append(f"{public:,} public {record.unit}s: the weights may tell all of them")
    return exceptions


def _initial(record):
    """Returns sentences on the origin of the initial weights, and on the search behind the run."""
    sentences = []
    for training in record.seen:
        where = "other data, as far as names and identifiers tell"
        if record.counts(training):
            where = "these too, which epsilon covers"
        sentences.append(
            f"The initial weights or features were trained on {training.data.name} (epsilon "
            f"{training.epsilon_in_words}), on {where}."
        )
    if not sentences and record.initialized:
        sentences = ["The initial weights and fixed features know no data."]
    elif not sentences:
        sentences = [
            "The initial weights know no private data but those counted here: they were "
            "initialised, came with a ledger, or were declared to be public."
        ]
    if record.searched and record.is_search_paid:
        sentences.append(f"It was chosen among {record.searched}: epsilon covers the choice.")
    return " ".join(sentences)


def _delta(record):
    """Returns the delta of epsilon as text, rounded up. Without a delta no text promises any."""
    return f"{float(rounded_up(record.total_delta or 0.5, 6)):g}"


def _package(name, record):
    version = record.versions.get(name, "not installed")
    return name if version == "not installed" else f"{name} {version}"


def _in_one_line(value):
    """Returns a value as text without line breaks, by which a name could add to a statement."""
    return re.sub(r"\s+", " ", str(value))


def _filled(paragraph, indent=""):
    return textwrap.fill(
        paragraph,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
