"""The guarantee of a training, in words that can be cited."""

from __future__ import annotations

import decimal
import importlib.metadata
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdpx._arguments import check_positive_integer, is_number, require

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Ledger

_WIDTH = 88


def text(
    ledger: Ledger,
    delta: float,
    *,
    accountant: str = "pld",
    num_examples: int | None = None,
    dataset: str = "the training data",
    unit: str = "example",
    rows_per_user: int | None = None,
    epsilon: float | None = None,
    also_spent: Sequence[str] = (),
    l2_norm_clip: float | str | None = None,
    mechanism: str | None = None,
    initial: str | None = None,
    independence: str | None = None,
    not_covered: Sequence[str] = (),
    is_planned: bool = False,
) -> str:
    """Says what is guaranteed, to whom, how, and under which assumptions.

    Epsilon is rounded up: no text promises more than the ledger.

    Args:
        ledger: A `tfdpx.accounting.Ledger`.
        delta: Float in (0, 1): the one that goes with `epsilon`.
        accountant: "pld" or "rdp"; for full batches also "gdp" or "zcdp".
        num_examples: Optional int, of the private data set, or of its people; public.
        dataset: String, the name of the data.
        unit: String, what an example is, such as "image". An s makes its plural.
        rows_per_user: Optional int, the most examples that a person has: what protects all of them
            together is said too. Not with `epsilon`, or where updates draw people.
        epsilon: Optional float: the total, where more than the ledger was spent on these data, such
            as by a search. None: the ledger's.
        also_spent: Strings, a line for each thing that `epsilon` counts besides the ledger.
        l2_norm_clip: Optional float, or "automatic".
        mechanism: Optional string, whole sentences: what an update is. None: one of DP-SGD.
        initial: Optional string, whole sentences: what the initial weights or features had seen.
        independence: Optional string, a whole sentence: whether examples can influence each other.
        not_covered: Strings: what else the guarantee does not cover, such as the files of a run.
        is_planned: Bool. Whether the updates are still to be made: nobody knows of seeds yet.

    Returns:
        String of lines of at most 88 characters, the last of which ends with a line break.

    Raises:
        ValueError: If an argument is out of its range, `epsilon` is less than the ledger's, or the
            sampling probability of an entry is unknown.
    """
    if num_examples is not None:
        check_positive_integer("num_examples", num_examples)
    known = ledger.composed_epsilon(delta, accountant)
    epsilon = known if epsilon is None else epsilon
    if not epsilon >= known * (1 - 1e-6):
        raise ValueError(
            "Argument `epsilon` must not be less than the ledger's. Received: "
            f"epsilon={epsilon}, the ledger's at delta={delta}: {known}. Leave `epsilon` out."
        )
    caution = _of_group(ledger, delta, accountant, rows_per_user, unit)
    none = _why_there_is_none(ledger, epsilon, delta, dataset)
    if none:
        return _filled(none) + "\n"
    release, is_releasable = _release(ledger, is_planned)
    who = _Protected(ledger, unit)
    parts = {
        "Data": f"{dataset}{f', N = {num_examples:,} {who.many}' if num_examples else ''}. The "
        f"number of {who.many} is public.",
        "Neighbours": f"two data sets that differ in {who.difference}, added or removed, at the "
        f"same sampling probability and expected batch size. {caution or who.caution}",
        "Epsilon, delta": f"epsilon = {rounded_up(epsilon, 6)}, delta = {_delta(delta)}.",
        "Mechanism": mechanism or _dp_sgd(who, l2_norm_clip),
        "Updates": " ".join([*map(_entry, ledger.entries), *also_spent]),
        "Accountant": f"{accountant.upper()} of {_named('dp-accounting')}, {_named('tfdpx')}.",
        "Sampling": _sampling(ledger, who),
        "Covers": "the weights after every update, their averages, and whatever is computed from "
        f"these without the training {unit}s, such as predictions on other {unit}s.",
        "Does not cover": "; ".join(
            [
                f"loss and metrics on the training {unit}s, which `fit` shows",
                f"validation and test {unit}s",
                *not_covered,
                "epsilons and gradient norms of single examples",
                "floating-point attacks on the noise",
                "how long the training took.",
            ]
        ),
        "Assumes": f"{initial or f'The initial weights know nothing of these {unit}s.'} Model, "
        f"settings and preprocessing were not chosen by looking at these {unit}s, unless epsilon "
        "counts the search. Classes, shapes and constants of preprocessing are public. Other "
        f"trainings on the same {unit}s add up.",
        **({"Independence": independence} if independence else {}),
        "Release": release,
        "Signature": "none. Anybody can write such a text: only the owner of the data can vouch "
        "for it.",
    }
    heading = "Statement of differential privacy"
    if not is_releasable:
        heading += " (not releasable: see Release)"
    claim = _claim(ledger, epsilon, delta, accountant, num_examples, dataset, who, is_planned)
    lines = [_filled(f"{name}: {part}", "  ") for name, part in parts.items()]
    return "\n".join([heading, "", _filled(claim), "", *lines]) + "\n"


class _Protected:
    """Whom a guarantee protects, in words.

    Attributes:
        one: What is drawn and clipped, in the singular.
        many: The plural.
        difference: What neighbours differ in.
        gradient: What is clipped of each.
        caution: Who is protected less.
    """

    def __init__(self, ledger, unit):
        if ledger.unit == "user":
            self.one, self.many = "person", "people"
            self.difference = f"all {unit}s of one person"
            self.gradient = f"the mean gradient of some {unit}s of each person drawn"
            self.caution = (
                f"Whose each {unit} is was given with the data: a person under several ids is "
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
    """A number >= 0 as text, rounded up: a guarantee must not promise more than there is.

    Args:
        number: Float.
        digits: Int, significant digits.
    """
    return f"{_ceiling(number, digits):f}"


def _delta(delta):
    return f"{float(_ceiling(delta, 6)):g}"


def _ceiling(number, digits):
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return context.create_decimal(repr(float(number)))


def _why_there_is_none(ledger, epsilon, delta, dataset):
    """Why nothing is guaranteed, or nothing was spent; None where there is a guarantee to state."""
    if epsilon == math.inf:
        unprotected = sum(entry.steps for entry in ledger.entries if not entry.noise_multiplier)
        plural = "s" * (unprotected != 1)
        why = f" {unprotected:,} update{plural} had no noise." if unprotected else ""
        if ledger.unit is None:
            why += " Some updates protect single examples and some people: nothing protects both."
        return f"There is no differential privacy for {dataset}: epsilon is infinite.{why}"
    if not ledger.is_complete:
        return (
            f"What was spent on {dataset} is unknown, so no differential privacy can be stated: "
            "the weights came at some time from where no ledger could be seen. The updates that "
            f"are known spend epsilon = {rounded_up(epsilon)} at delta = {_delta(delta)}."
        )
    if not ledger.entries and epsilon == 0:
        return f"Nothing was spent on {dataset}: no noisy update is in the ledger."
    return None


def _claim(ledger, epsilon, delta, accountant, num_examples, dataset, who, is_planned):
    counted = f" (N = {num_examples:,} {who.many})" if num_examples else ""
    claim = (
        f"The weights trained on {dataset}{counted} {'will have' if is_planned else 'have'} "
        f"({rounded_up(epsilon)}, {_delta(delta)})-differential privacy after {ledger.steps:,} "
        f"noisy updates, for data sets that differ in {who.difference}, added or removed "
        f"({accountant.upper()} accountant of {_named('dp-accounting')}; {_named('tfdpx')})."
    )
    if ledger.is_approximate:
        claim += (
            " This epsilon is an approximation: the batches were not drawn as the accountant "
            "assumes."
        )
    return claim


def _of_group(ledger, delta, accountant, rows_per_user, unit):
    """A sentence on people with so many examples; None where nobody asks."""
    if rows_per_user is None:
        return None
    hint = " They are one person's already."
    require(ledger.unit == "example", "rows_per_user", rows_per_user, "be None for people", hint)
    from tfdpx.accounting.group_privacy import group_epsilon  # It takes ledgers.

    together = group_epsilon(ledger, rows_per_user, delta=delta, accountant=accountant)
    if together == math.inf:
        return f"For a person with {rows_per_user} {unit}s no epsilon is known."
    return (
        f"For data sets that differ in up to {rows_per_user} {unit}s, such as all of one person, "
        f"epsilon = {rounded_up(together, 6)} at the same delta."
    )


def _dp_sgd(who, l2_norm_clip):
    clip = f"clipped to an L2 norm of {l2_norm_clip:g}" if is_number(l2_norm_clip) else "clipped"
    if l2_norm_clip == "automatic":
        clip = "divided by its L2 norm plus a constant"
    return (
        f"DP-SGD: in each update {who.gradient} is {clip}, and Gaussian noise is added to their "
        "sum, of noise_multiplier times what one of them can change."
    )


def _entry(entry):
    sampling = (
        "full batches"
        if entry.sampling_probability == 1
        else f"sampling_probability = {entry.sampling_probability:.8g}"
    )
    return f"{entry.steps:,} at noise_multiplier = {entry.noise_multiplier:.8g}, {sampling}."


def _sampling(ledger, who):
    if ledger.is_approximate:
        return (
            "batches that are not Poisson samples, such as parts of a permutation. Epsilon is that "
            "of Poisson sampling."
        )
    if all(entry.sampling_probability == 1 for entry in ledger.entries):
        return f"full batches: every update takes all {who.many}."
    return (
        f"Poisson sampling: every update draws each {who.one} with the sampling probability, "
        "independently of all others."
    )


def _release(ledger, is_planned):
    """What makes the weights fit for release, or not; and whether they are."""
    if ledger.is_seeded:
        return (
            "NOT RELEASABLE. Somebody gave the seed of draws or noise, and who knows it can take "
            "the noise away. Train without a seed before a release."
        ), False
    if is_planned:
        return "only if draws and noise get no seed.", True
    return "noise and draws came from the operating system's random numbers, not kept.", True


def _named(package):
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:  # Of a checkout that is not installed.
        return package


def _filled(paragraph, indent=""):
    return textwrap.fill(
        paragraph,
        _WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
