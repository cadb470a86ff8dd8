"""Compares tfdpx, Opacus, jax-privacy and tensorflow-privacy on one machine, one after another."""
