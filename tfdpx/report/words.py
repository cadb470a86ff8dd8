"""Describes the privacy and the results of a run in plain words, for readers outside the field.

All sentences follow from the record alone. `report.html` and `model_card.md` consist of them.
"""

from __future__ import annotations

import math

from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import rounded_up, why_unknown

# Texts call the protection weak from this share of right guesses.
_WEAK = 0.75
_MOST_ENTRIES = 20
_SPLITS = {"test": "test {}s", "validation": "{}s that were held out of the training"}


def data_name(record: Record) -> str:
    """Returns the name of the data that a run trained on."""
    return record.data.name if record.data else "unknown data"


def reasons_against_release(record: Record) -> list[str]:
    """Returns a list with a sentence on why not to release the weights; else an empty list."""
    if record.epsilon == math.inf:
        return [f"Not private: the weights may tell everything about the {record.unit}s."]
    return [f"Do not release: {'; '.join(record.problems)}."] if record.problems else []


def is_weak(record: Record) -> bool:
    """Returns whether an attack may be right more than 75 times in 100."""
    bounds = record.attack_bounds()
    return bounds is not None and bounds.right_guesses > _WEAK


def protected(record: Record) -> tuple[str, str]:
    """Returns a sentence on who is protected, and a caution about people with less protection."""
    name, unit = data_name(record), record.unit
    if record.epsilon == math.inf:
        return f"Not a single {unit} of {name} is protected.", record.statement()
    if why_unknown(record.ledger):
        return f"It is unknown how well anyone in {name} is protected.", record.statement()
    if not record.ledger.steps:
        return f"No training on {name} is recorded.", record.statement()
    is_so = "Weakly protected" if is_weak(record) else "Protected"
    is_so = "Would be protected" if record.problems else is_so
    if record.ledger.unit == "user":
        return (
            f"{is_so}: each person in {name}, with all their {unit}s.",
            f"Names or numbers in the data tell which {unit}s belong to one person. A person who "
            "has two of them is protected less.",
        )
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
    sentences = [bounds.sentence("person" if bounds.unit == "user" else record.unit)]
    as_here = ", as here" * is_weak(record)
    sentences.append(f"Up to about 55 the protection is strong; above 75 it is weak{as_here}.")
    if record.ledger.is_seeded:
        sentences.append("This does not hold against someone who knows the seed.")
    if record.epsilon < math.inf:
        epsilon, delta = rounded_up(record.epsilon), rounded_up(record.total_delta)
        about = "about " * record.is_approximate
        sentences.append(
            f"Specialists state this as epsilon, {about}{epsilon} here, and delta, "
            f"{float(delta):g} here: the larger, the weaker."
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
    unit, results = record.unit, record.results
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
    if record.epsilon == math.inf:
        texts = [f"Nothing is left to void: no {unit} is protected."]
    for training in record.seen:
        is_private = training.epsilon < math.inf
        spent = f"epsilon {training.epsilon_in_words}" if is_private else "without privacy"
        counted = ", which is counted here" * record.counts(training)
        texts.append(f"The training began with weights of {training.data.name}: {spent}{counted}.")
    if public := results.get("num_public"):
        texts.append(f"Not protected: {public:,} public {unit}s. The weights may tell all of them.")
    if exact := results.get("not_protected"):
        texts.append(f"{exact} Page, record and model.keras hold the results.")
    if results.get("individual_mean") is not None:
        texts.append("Not protected: the folder individual_PRIVATE. Do not publish it.")
    return texts


def check(record: Record) -> str:
    """Returns sentences on how to check that files belong to the record."""
    return (
        "The command tfdpx verify FOLDER checks that model, record, statement and page belong "
        f"together. The fingerprint of the record is {record.fingerprint}. Have the sender read "
        "theirs to you by telephone: it must be the same."
    )


def readable(value):
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
