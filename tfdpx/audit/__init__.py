"""Attacks on trained models and on optimizers. Their success gives lower bounds on epsilon."""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.audit.bounds import epsilon_lower_bound, gdp_epsilon_lower_bound
from tfdpx.audit.membership import example_losses, membership_report
from tfdpx.audit.one_run import OneRunAudit
from tfdpx.audit.sampling_check import check_sampling
from tfdpx.audit.white_box import check_optimizer

__all__ = [
    "OneRunAudit",
    "check_optimizer",
    "check_sampling",
    "epsilon_lower_bound",
    "example_losses",
    "gdp_epsilon_lower_bound",
    "membership_report",
]
