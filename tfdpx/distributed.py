"""`fit` on many devices and many hosts, also where Keras's own cannot."""

from tfdpx.training.distributed import fit

__all__ = ["fit"]
