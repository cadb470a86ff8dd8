"""Checks that refuse a model, a loss or an augmentation that is unfit for private training.

Checks return the texts of problems, and only `errors.refusing` raises: one error lists every
problem with its layer, if known, and its remedy. No check reads a private example.
"""

from tfdpx import _keras as _keras  # Refuses other backends of Keras first.
from tfdpx.checks.adapted import mark_public
from tfdpx.checks.adapted import mark_public as public
from tfdpx.checks.errors import UnfitForPrivacy

__all__ = ["UnfitForPrivacy", "mark_public", "public"]
