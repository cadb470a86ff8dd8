"""Constant, automatic and adaptive clips, and DP-Adam without the noise's bias."""
