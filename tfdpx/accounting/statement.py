"""The guarantee of a training, in words that can be cited."""

from __future__ import annotations

import dataclasses
import decimal
import importlib.metadata
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfdpx._arguments import is_number, require
from tfdpx.accounting.groups import group_epsilon

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Ledger

_WIDTH = 88
_RELEASES = (
    "Gaussian releases of sums over all examples, after clipping each, with noise of "
    "noise_multiplier times the clip; the rest is computed from these."
)
_MECHANISMS = (
    "Releases of other mechanisms count as the worst mechanism of their epsilon and delta."
)


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts in a statement.

    Args:
        ledger: A `tfdpx.accounting.Ledger`.
        delta: Float in (0, 1), for `ledger.epsilon`.
        accountant: "pld" or "rdp"; for full batches also "gdp" or "zcdp".
        num_examples: Optional int, of the private data set, or of its people; public.
        dataset: String, the name of the data.
        unit: String, what an example is, such as "image". An s makes its plural.
        rows_per_user: Optional int, the most examples of one person, for a sentence on the epsilon
            of all of them together. Not if updates draw people.
        l2_norm_clip: Optional float, or "automatic".
        initial: Optional string of whole sentences on the data behind initial weights or features.
        independence: Optional string, a whole sentence: whether examples can influence each other.
        not_covered: Strings: other things that are not covered, such as the files of a run.
        goal: Optional string, a whole sentence on the right guesses that a plan was made for.
        is_planned: Bool. Whether the updates are still to be made, so that seeds are unknown.
        versions: Dict from packages to the versions that trained. Defaults to those installed.
    """

    ledger: Ledger
    delta: float
    accountant: str = "pld"
    num_examples: int | None = None
    dataset: str = "the training data"
    unit: str = "example"
    rows_per_user: int | None = None
    l2_norm_clip: float | str | None = None
    initial: str | None = None
    independence: str | None = None
    not_covered: Sequence[str] = ()
    goal: str | None = None
    is_planned: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def epsilon(self) -> float:
        """Float, at `total_delta`."""
        return self.ledger.composed_epsilon(self.delta, self.accountant)

    @property
    def total_delta(self) -> str:
        """The delta of `epsilon`, rounded up."""
        return f"{float(_ceiling(self.ledger.total_delta(self.delta), 6)):g}"

    @property
    def steps(self) -> str:
        """The word for all entries: "releases" if all are releases, otherwise "updates"."""
        return "releases" if all(e.is_release for e in self.ledger.entries) else "updates"


def text(facts: Facts) -> str:
    """Returns the text: the guarantee, for whom it holds, how, and under which assumptions.

    Epsilon is rounded up, because no text may promise more than the ledger.

    Args:
        facts: `Facts`.

    Returns:
        String of lines of at most 88 characters; it ends with a line break.

    Raises:
        ValueError: If an argument is out of range, or the sampling probability of an entry is
            unknown.
    """
    ledger, unit = facts.ledger, facts.unit
    epsilon, caution = facts.epsilon, _of_group(facts)
    if reason := _why_there_is_none(facts):
        return _filled(reason) + "\n"
    who = _Protected(ledger, unit)
    count = f", N = {facts.num_examples:,} {who.many}" if facts.num_examples else ""
    parts = {
        "Data": f"{facts.dataset}{count}. The number of {who.many} is public.",
        "Neighbours": f"two data sets that differ in {who.difference}, added or removed, at the "
        f"same sampling probability and expected batch size. {caution or who.caution}",
        "Epsilon, delta": f"epsilon = {rounded_up(epsilon, 6)}, delta = {facts.total_delta}.",
        **({"Attack": attack} if (attack := _attack(facts, who)) else {}),
        "Mechanism": _mechanism(facts, who),
        facts.steps.capitalize(): steps(ledger),
        "Accountant": f"{facts.accountant.upper()} of {_named('dp-accounting', facts)}, "
        f"{_named('tfdpx', facts)}.",
        "Sampling": _sampling(facts, who),
        "Covers": "the weights after every update, their averages, and everything computed from "
        f"these without the training {unit}s, such as predictions on other {unit}s.",
        "Does not cover": "; ".join(
            [
                f"loss and metrics on the training {unit}s, which `fit` shows",
                f"validation and test {unit}s",
                *facts.not_covered,
                "epsilons and gradient norms of single examples",
                "floating-point attacks on the noise",
                "how long the training took.",
            ]
        ),
        "Assumes": f"{facts.initial or f'The initial weights know nothing of these {unit}s.'} "
        f"Model, settings and preprocessing were not chosen by looking at these {unit}s, unless "
        "epsilon counts the search. Classes, shapes and constants of preprocessing are public. "
        f"Other trainings on the same {unit}s add up.",
        **({"Independence": facts.independence} if facts.independence else {}),
        "Release": _release(facts),
        "Signature": "none. Anyone can write such a text: only the owner of the data can confirm "
        "it.",
    }
    heading = "Statement of differential privacy"
    if ledger.is_seeded:
        heading += " (not releasable: see Release)"
    lines = [_filled(f"{name}: {part}", "  ") for name, part in parts.items()]
    return "\n".join([heading, "", _filled(_claim(facts, who)), "", *lines]) + "\n"


class _Protected:
    """The unit that a guarantee protects, in words.

    Attributes:
        one: The unit that is drawn and clipped, in the singular.
        many: The plural.
        difference: The difference of neighbours.
        gradient: The quantity that is clipped for each unit.
        caution: A sentence on people who are protected less.
    """

    def __init__(self, ledger, unit):
        if ledger.unit == "user":
            self.one, self.many = "person", "people"
            self.difference = f"all {unit}s of one person"
            self.gradient = f"the mean gradient of some {unit}s of each person drawn"
            self.caution = (
                f"The person of each {unit} was given with the data: a person with several ids is "
                "protected less."
            )
            return
        self.one, self.many, self.difference = unit, f"{unit}s", f"one {unit}"
        self.gradient = f"the gradient of each {unit}"
        self.caution = (
            f"A person with several {unit}s is protected less than even the sum of their epsilons "
            "says: tfdpx.accounting.group_epsilon gives the epsilon of k of them."
        )


def rounded_up(number: float, digits: int = 4) -> str:
    """Returns a number >= 0 as text, rounded up because a guarantee must not promise too much.

    Args:
        number: Float.
        digits: Int, significant digits.
    """
    return f"{_ceiling(number, digits):f}"


def _ceiling(number, digits):
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return context.create_decimal(repr(float(number)))


def why_unknown(ledger: Ledger) -> str | None:
    """Returns why no limit to what was spent is known, as part of a sentence; None if one is.

    Args:
        ledger: `Ledger`.
    """
    reasons = []
    if not ledger.is_complete:
        reasons.append("at some time the weights came from a source without a ledger")
    drawn_by_none = (e.steps for e in ledger.entries if not (e.poisson_sampled or e.shuffled))
    if steps := sum(drawn_by_none):
        reasons.append(f"no plan drew the batches of {steps:,} of {ledger.steps:,} updates")
    return ", and ".join(reasons) or None


def _why_there_is_none(facts):
    """Returns why nothing is guaranteed or nothing was spent; None if there is a guarantee."""
    ledger, dataset = facts.ledger, facts.dataset
    if facts.epsilon == math.inf:
        unprotected = sum(e.steps for e in ledger.entries if e.noise_multiplier == 0)
        plural = "s" * (unprotected != 1)
        why = f" {unprotected:,} update{plural} had no noise." if unprotected else ""
        if ledger.unit is None:
            why += " Some updates protect single examples and some people: nothing protects both."
        return f"There is no differential privacy for {dataset}: epsilon is infinite.{why}"
    if why := why_unknown(ledger):
        return (
            f"What was spent on {dataset} is unknown, so no differential privacy can be stated: "
            f"{why}. The updates that are known spend epsilon = {rounded_up(facts.epsilon)} at "
            f"delta = {facts.total_delta}, as if all batches were Poisson samples; that is no "
            "limit."
        )
    if not ledger.entries:
        return f"Nothing was spent on {dataset}: no noisy update is in the ledger."
    return None


def _claim(facts, who):
    size = f" (N = {facts.num_examples:,} {who.many})" if facts.num_examples else ""
    claim = (
        f"The weights trained on {facts.dataset}{size} "
        f"{'will have' if facts.is_planned else 'have'} ({rounded_up(facts.epsilon)}, "
        f"{facts.total_delta})-differential privacy after {facts.ledger.steps:,} noisy "
        f"{facts.steps}, for data sets that differ in {who.difference}, added or removed "
        f"({facts.accountant.upper()} accountant of {_named('dp-accounting', facts)}; "
        f"{_named('tfdpx', facts)})."
    )
    if facts.ledger.is_approximate:
        claim += (
            " This epsilon is an approximation: the batches were not drawn as the accountant "
            "assumes."
        )
    return claim


def _attack(facts, who):
    """Returns a sentence on the largest success of an attack; None if no bound is known."""
    if facts.ledger.is_approximate:
        return None
    bounds = facts.ledger.attack_bounds(facts.delta)
    goal = f" {facts.goal}" if facts.goal else ""
    return f"{bounds.sentence(who.one)} By privacy loss distributions.{goal}"


def _of_group(facts):
    """Returns a sentence on people with `rows_per_user` examples; None if that is None."""
    rows, unit = facts.rows_per_user, facts.unit
    if rows is None:
        return None
    hint = " Each is already all examples of one person."
    require(facts.ledger.unit == "example", "rows_per_user", rows, "be None for people", hint)
    together = group_epsilon(facts.ledger, rows, delta=facts.delta, accountant=facts.accountant)
    if together == math.inf:
        return f"For a person with {rows} {unit}s no epsilon is known."
    return (
        f"For data sets that differ in up to {rows} {unit}s, such as all of one person, "
        f"epsilon = {rounded_up(together, 6)} at the same delta."
    )


def _mechanism(facts, who):
    """Returns sentences on updates, on releases, or on both."""
    clip = facts.l2_norm_clip
    clipped = f"clipped to an L2 norm of {clip:g}" if is_number(clip) else "clipped"
    if clip == "automatic":
        clipped = "divided by its L2 norm plus a constant"
    updates = (
        f"DP-SGD: in each update {who.gradient} is {clipped}, and Gaussian noise is added to their "
        "sum, of noise_multiplier times what one of them can change."
    )
    kinds = {e.is_release for e in facts.ledger.entries if e.epsilon is None}
    mechanisms = [_MECHANISMS] * any(entry.epsilon is not None for entry in facts.ledger.entries)
    return " ".join([updates] * (False in kinds) + [_RELEASES] * (True in kinds) + mechanisms)


def steps(ledger: Ledger) -> str:
    """Returns sentences on all updates, releases and paid searches.

    Args:
        ledger: `Ledger`.
    """
    sentences = [f"{_entry(entry)}." for entry in ledger.entries if entry.mean_runs is None]
    for run in ledger.selections:
        search = dataclasses.replace(ledger, entries=run)
        sentences.append(
            f"The best of a random number of runs, {run[0].mean_runs:g} on average, each of "
            f"{' and '.join(map(_entry, run))}: epsilon {search.composed_epsilon(None):.6g} at "
            f"delta {run[0].delta:g} for all of them."
        )
    return " ".join(sentences)


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


def _sampling(facts, who):
    ledger = facts.ledger
    if ledger.is_approximate:
        return (
            "batches that are not Poisson samples, such as parts of a permutation. Epsilon is that "
            "of Poisson sampling."
        )
    if all(entry.sampling_probability == 1 for entry in ledger.entries):
        return f"full batches: every {facts.steps[:-1]} takes all {who.many}."
    return (
        f"Poisson sampling: every update draws each {who.one} with the sampling probability, "
        "independently of all others."
    )


def _release(facts):
    """Returns whether the weights may be released, and the reason."""
    if facts.ledger.is_seeded:
        return (
            "NOT RELEASABLE. Somebody gave the seed of draws or noise, and anyone who knows it can "
            "remove the noise. Train without a seed before a release."
        )
    if facts.is_planned:
        return "only if draws and noise get no seed."
    return "noise and draws came from the operating system's random numbers, not kept."


def _named(package, facts):
    try:
        version = facts.versions.get(package) or importlib.metadata.version(package)
        return f"{package} {version}"
    except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
        return package


def _filled(paragraph, indent=""):
    return textwrap.fill(
        paragraph,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
