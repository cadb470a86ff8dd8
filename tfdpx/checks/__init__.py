"""What makes a model, a loss or an augmentation unfit for private training, and the remedy.

One error lists every problem that was found: the layer, where it is known, and the remedy. Checks
give the texts of problems; only `errors.refusing` raises. No private example is read.
"""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.checks.adapted import mark_public
from tfdpx.checks.adapted import mark_public as public
from tfdpx.checks.errors import UnfitForPrivacy

__all__ = ["UnfitForPrivacy", "mark_public", "public"]
