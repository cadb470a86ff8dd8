"""Keras callbacks: end at a budget, save a run, log what the guarantee covers."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.spending.budget import BudgetExceeded
from tfdpx.training.callbacks import PrivacyBudget, TensorBoard
from tfdpx.training.checkpoint import Checkpoint

__all__ = ["BudgetExceeded", "Checkpoint", "PrivacyBudget", "TensorBoard"]
