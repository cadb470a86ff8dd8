"""Computes facts about a ledger for the texts in `tfdpx.report.words`."""

from __future__ import annotations

import decimal
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Ledger


def words() -> types.ModuleType:
    """Returns the module `tfdpx.report.words`.

    The function imports this module only when it is called, because `tfdpx.report.words` imports
    `tfdpx.accounting`.
    """
    from tfdpx.report import words

    return words


def rounded_up(number: float, digits: int = 4) -> str:
    """Returns a number >= 0 as text. It is rounded up: a guarantee must not promise too much.

    Args:
        number: Float >= 0.
        digits: Int, the number of significant digits.
    """
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{context.create_decimal(repr(float(number))):f}"


def undrawn_updates(ledger: Ledger) -> int:
    """Returns the number of updates with batches that were not drawn by a `PrivacyPlan`.

    Args:
        ledger: `Ledger`.
    """
    return sum(e.steps for e in ledger.entries if not (e.poisson_sampled or e.shuffled))


def is_unknown(ledger: Ledger) -> bool:
    """Returns whether the epsilon of a ledger is not an upper bound on the privacy spent.

    Args:
        ledger: `Ledger`.
    """
    return not ledger.is_complete or undrawn_updates(ledger) > 0
