"""Compiles the training step for a TPU on a machine that has no TPU."""
