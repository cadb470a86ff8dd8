"""Comparisons of private heads on features, and searches for their arguments."""
