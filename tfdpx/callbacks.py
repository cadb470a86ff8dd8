"""Keras callbacks that stop at a budget, save a run, and log values that the guarantee covers."""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.training.callbacks import BudgetExceeded, PrivacyBudget, TensorBoard
from tfdpx.training.checkpoint import Checkpoint

__all__ = ["BudgetExceeded", "Checkpoint", "PrivacyBudget", "TensorBoard"]
