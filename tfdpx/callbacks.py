"""Keras callbacks: end at a budget, save a run, log what the guarantee covers."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.training.callbacks import BudgetExceeded, PrivacyBudget, TensorBoard
from tfdpx.training.checkpoint import Checkpoint

__all__ = ["BudgetExceeded", "Checkpoint", "PrivacyBudget", "TensorBoard"]
