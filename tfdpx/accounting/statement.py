"""The common needs of all texts on a ledger: numbers rounded up, and why nothing is known."""

from __future__ import annotations

import decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Ledger


def text(ledger: Ledger, *about: Any, **options: Any) -> str:
    """Returns the statement of a ledger: see `tfdpx.report.words.of_ledger`."""
    from tfdpx.report import words

    return words.of_ledger(ledger, *about, **options)


def rounded_up(number: float, digits: int = 4) -> str:
    """Returns a number >= 0 as text, rounded up because a guarantee must not promise too much.

    Args:
        number: Float.
        digits: Int, significant digits.
    """
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{context.create_decimal(repr(float(number))):f}"


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
