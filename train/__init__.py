"""Binaries that train image classifiers with differential privacy, and what they are made of."""

import os

# Hides TensorFlow's log, because its line on a missing GPU reads like a failure. `quiet_start`
# hides the lines that are written before this setting is read.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
