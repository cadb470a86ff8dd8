"""The privacy and the results of a run in plain words, for readers outside the field.

All sentences are made from the record alone. `report.html` and `model_card.md` consist of them.
"""

from __future__ import annotations

import math

from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import rounded_up

_SPLITS = {"test": "test {}s", "validation": "{}s that were held out of the training"}


def data_name(record: Record) -> str:
    """Returns the name of the data that a run trained on."""
    return record.data.name if record.data else "unknown data"


def reasons_against_release(record: Record) -> list[str]:
    """Returns a sentence on why the weights must not be released, in a list; else an empty one."""
    if record.epsilon == math.inf:
        return [f"Not private: the weights may tell everything about the {record.unit}s."]
    return [f"Do not release: {'; '.join(record.problems)}."] if record.problems else []


def protected(record: Record) -> tuple[str, str]:
    """Returns a sentence on who is protected, and a caution on those who are protected less."""
    name, unit = data_name(record), record.unit
    if record.epsilon == math.inf:
        return f"Nobody in {name} is protected.", record.statement()
    if not record.ledger.is_complete:
        return f"It is unknown how well anyone in {name} is protected.", record.statement()
    if not record.ledger.steps:
        return f"No training on {name} is recorded.", record.statement()
    is_so = "Would be protected" if record.problems else "Protected"
    if record.ledger.unit == "user":
        return (
            f"{is_so}: each person in {name}, with all their {unit}s.",
            f"Names or numbers given with the data tell which {unit}s belong to one person. A "
            "person under several of them is protected less.",
        )
    return (
        f"{is_so}: only each single {unit} of {name}, not a person with several {unit}s.",
        f"Caution: a person, such as a patient, with several {unit}s is protected less than the "
        f"numbers here say, because they are of single {unit}s.",
    )


def attack(record: Record) -> str:
    """Returns sentences on the best attack and on epsilon."""
    bounds = record.attack_bounds()
    if bounds is None or not record.ledger.steps:
        return "No limit is known to what someone can find out about the data from the weights."
    sentences = [bounds.sentence("person" if bounds.unit == "user" else record.unit)]
    if record.ledger.is_seeded:
        sentences.append("This does not hold against someone who knows the seed.")
    if record.epsilon < math.inf:
        epsilon, delta = rounded_up(record.epsilon), rounded_up(record.total_delta)
        about = "about " * record.is_approximate
        sentences.append(
            f"Specialists state the limit as epsilon, {about}{epsilon} here, and delta, "
            f"{float(delta):g} here: at 0 and 0 an attack is guessing, and the larger they are, "
            "the more an attack can find out."
        )
    if record.is_approximate:
        sentences.append(
            "Epsilon is an approximation, because batches were shuffled. The limit on right "
            f"guesses is none, if absent means that an empty {record.unit} is in its place."
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
                f"The 95% interval is {low:.1f} to {high:.1f}%. "
                f'The answer "{results[f"{split}_most_frequent_class"]}" for all of them would be '
                f"right for {results[f'{split}_base_rate']:.1%}."
            )
    if shown["auc"] is not None:
        sentences.append(f"The area under the ROC curve is {shown['auc']:.3f} (0.5 is guessing).")
    if shown["r2"] is not None:
        sentences.append(
            f"On {rows}, R² is {shown['r2']:.3f}: 1 is perfect, and 0 is no better than the mean "
            "of all as the answer for each."
        )
    return " ".join(sentences) or "Nothing was measured."


def limits(record: Record) -> list[str]:
    """Returns sentences on the causes that would void the claim, and on all that it leaves out."""
    unit, results = record.unit, record.results
    seed = "This run had one." if record.ledger.is_seeded else "None is recorded."
    names = "names of classes" + " and columns" * (unit == "row")
    search = f"Recorded: {record.searched}" if record.searched else "None is recorded"
    paid = ", which epsilon counts" * bool(record.searched and record.is_search_paid)
    texts = [
        f"A seed: someone who knows it can take the noise away. {seed}",
        f"Other trainings or statistics on the same {unit}s: what they tell adds up.",
        f"A search for good settings on the same {unit}s that is not counted. {search}{paid}.",
        "Edited files: nothing here is signed, so a forger can change all of them alike.",
        f"Not covered: {unit}s that results were measured on; results on {unit}s of the training; "
        f"{names}, sizes, and how many {unit}s or people there are.",
    ]
    if record.epsilon == math.inf:
        texts = [f"Nothing is left to void: no {unit} is protected."]
    for seen in record.seen:
        spent = (
            "without privacy" if seen.epsilon == math.inf else f"epsilon {rounded_up(seen.epsilon)}"
        )
        counted = ", which is counted here" * record.counts(seen)
        texts.append(f"The training began with weights of {seen.data.name}: {spent}{counted}.")
    if public := results.get("num_public"):
        texts.append(f"Not covered: {public:,} public {unit}s: the weights may tell all of them.")
    if results.get("individual_mean") is not None:
        texts.append("Not covered: the folder individual_PRIVATE, which must not be published.")
    return texts


def check(record: Record) -> str:
    """Returns sentences on how to find out whether files belong to the record."""
    return (
        "The command tfdpx verify FOLDER compares the model, the record, the statement and the "
        f"page with each other. The fingerprint of the record is {record.fingerprint}: have the "
        "sender read theirs to you by telephone."
    )
