"""Placeholder."""

from tfdpx.checks.proof import rules

__all__ = ["rules"]
