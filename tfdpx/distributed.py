"""`fit` on many devices and many hosts, also where Keras's own cannot."""

from tfdpx import _keras as _keras  # Says first if Keras has another backend.
from tfdpx.training.distributed import fit

__all__ = ["fit"]
