"""Attacks on what was trained, and what they prove about epsilon."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.audit.lower_bound import (
    clopper_pearson_upper_bound,
    epsilon_lower_bound,
    gdp_epsilon_lower_bound,
    gdp_mu_lower_bound,
)
from tfdpx.audit.membership import (
    MembershipReport,
    example_losses,
    likelihood_ratio,
    loss_threshold,
    membership_report,
    true_class_logits,
)
from tfdpx.audit.neighbours import RunReport, check_run
from tfdpx.audit.one_run import OneRunAudit, OneRunReport, one_run_report
from tfdpx.audit.one_run_bounds import (
    one_run_epsilon_lower_bound,
    one_run_gdp_epsilon_lower_bound,
    one_run_mu_lower_bound,
)
from tfdpx.audit.sampling_check import SamplingReport, check_sampling
from tfdpx.audit.scores import (
    advantage,
    advantage_upper_bound,
    auc,
    best_threshold,
    errors,
    tpr_at_fpr,
)
from tfdpx.audit.white_box import OptimizerReport, check_optimizer

__all__ = [
    "MembershipReport",
    "OneRunAudit",
    "OneRunReport",
    "OptimizerReport",
    "RunReport",
    "SamplingReport",
    "advantage",
    "advantage_upper_bound",
    "auc",
    "best_threshold",
    "check_optimizer",
    "check_run",
    "check_sampling",
    "clopper_pearson_upper_bound",
    "epsilon_lower_bound",
    "errors",
    "example_losses",
    "gdp_epsilon_lower_bound",
    "gdp_mu_lower_bound",
    "likelihood_ratio",
    "loss_threshold",
    "membership_report",
    "one_run_epsilon_lower_bound",
    "one_run_gdp_epsilon_lower_bound",
    "one_run_mu_lower_bound",
    "one_run_report",
    "tpr_at_fpr",
    "true_class_logits",
]
