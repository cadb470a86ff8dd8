"""Privacy accounting: what training spends, and what a budget buys."""

from tfdpx.accounting.accountants import epsilon
from tfdpx.accounting.individual import IndividualAccountant, individual_epsilon
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.accounting.statistics import Statistics, release_statistics

__all__ = [
    "Entry",
    "IndividualAccountant",
    "Ledger",
    "PrivacyPlan",
    "Statistics",
    "epsilon",
    "individual_epsilon",
    "release_statistics",
]
