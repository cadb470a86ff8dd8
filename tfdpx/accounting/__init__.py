"""Privacy accounting: what training spends, and what a budget buys."""

from tfdpx.accounting.accountants import epsilon
from tfdpx.accounting.groups import group_epsilon
from tfdpx.accounting.individual import IndividualAccountant
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan

__all__ = ["IndividualAccountant", "Ledger", "PrivacyPlan", "epsilon", "group_epsilon"]
