"""The training step compiled for a TPU, without one."""
