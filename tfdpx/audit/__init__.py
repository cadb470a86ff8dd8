"""Attacks on what was trained, and what they prove about epsilon."""

from tfdpx.audit.lower_bound import (
    clopper_pearson_upper_bound,
    epsilon_lower_bound,
    gdp_epsilon_lower_bound,
    gdp_mu_lower_bound,
)
from tfdpx.audit.scores import (
    advantage,
    advantage_upper_bound,
    auc,
    best_threshold,
    errors,
    tpr_at_fpr,
)

__all__ = [
    "advantage",
    "advantage_upper_bound",
    "auc",
    "best_threshold",
    "clopper_pearson_upper_bound",
    "epsilon_lower_bound",
    "errors",
    "gdp_epsilon_lower_bound",
    "gdp_mu_lower_bound",
    "tpr_at_fpr",
]
