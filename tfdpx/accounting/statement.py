"""The facts that all texts on a ledger need. Their sentences are in `tfdpx.report.words`."""

from __future__ import annotations

import decimal
import types
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdpx.accounting.ledger import Ledger


def words() -> types.ModuleType:
    """Returns the module of the sentences. It is above this room, so it is imported on the call."""
    from tfdpx.report import words

    return words


def rounded_up(number: float, digits: int = 4) -> str:
    """Returns a number >= 0 as text, rounded up because a guarantee must not promise too much.

    Args:
        number: Float.
        digits: Int, significant digits.
    """
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{context.create_decimal(repr(float(number))):f}"


def undrawn_updates(ledger: Ledger) -> int:
    """Returns the number of updates with batches that no plan drew.

    Args:
        ledger: `Ledger`.
    """
    return sum(e.steps for e in ledger.entries if not (e.poisson_sampled or e.shuffled))


def is_unknown(ledger: Ledger) -> bool:
    """Returns whether no limit to what was spent is known.

    Args:
        ledger: `Ledger`.
    """
    return not ledger.is_complete or undrawn_updates(ledger) > 0
