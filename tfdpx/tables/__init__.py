"""Statistics of the columns of private tables, for Keras's preprocessing layers."""

from tfdpx.tables.private_adapt import private_adapt

__all__ = ["private_adapt"]
