"""Privacy accounting: what training spends, and what a budget buys."""

from tfdpx.accounting.accountants import epsilon
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan

__all__ = ["Ledger", "PrivacyPlan", "epsilon"]
