"""Keras callbacks: end at a budget, save a run, log what the guarantee covers."""

from tfdpx.spending.budget import BudgetExceeded
from tfdpx.training.callbacks import PrivacyBudget, TensorBoard
from tfdpx.training.checkpoint import Checkpoint

__all__ = ["BudgetExceeded", "Checkpoint", "PrivacyBudget", "TensorBoard"]
