"""`fit` on several devices and hosts, also where the `fit` of Keras does not support them."""

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.
from tfdpx.training.distributed import fit

__all__ = ["fit"]
