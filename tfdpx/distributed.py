"""`fit` on many devices and many hosts, including cases that Keras does not support."""

from tfdpx import _keras as _keras  # First: it reports a Keras with another backend.
from tfdpx.training.distributed import fit

__all__ = ["fit"]
