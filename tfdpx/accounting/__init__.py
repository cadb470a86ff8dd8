"""Privacy accounting: what training spends, and what a budget buys."""

from tfdpx.accounting.accountants import epsilon
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.plan import PrivacyPlan

__all__ = ["Entry", "Ledger", "PrivacyPlan", "epsilon"]
