"""Binaries that train image classifiers with differential privacy, and what they are made of."""
