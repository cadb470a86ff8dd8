"""Privacy accounting: what training spends, and what a budget buys."""

from tfdpx.accounting.accountants import epsilon
from tfdpx.accounting.group_privacy import group_epsilon
from tfdpx.accounting.individual import IndividualAccountant, individual_epsilon
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.accounting.record import Record
from tfdpx.accounting.statistics import Statistics, release_statistics

__all__ = [
    "Entry",
    "IndividualAccountant",
    "Ledger",
    "PrivacyPlan",
    "Record",
    "Statistics",
    "epsilon",
    "group_epsilon",
    "individual_epsilon",
    "release_statistics",
]
