"""Privacy accounting: plan a training within a privacy budget, and compute the epsilon spent."""

from tfdpx.accounting.accountants import epsilon
from tfdpx.accounting.attack import AttackBounds
from tfdpx.accounting.groups import group_epsilon
from tfdpx.accounting.individual import IndividualAccountant
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan

__all__ = [
    "AttackBounds",
    "IndividualAccountant",
    "Ledger",
    "PrivacyPlan",
    "epsilon",
    "group_epsilon",
]
