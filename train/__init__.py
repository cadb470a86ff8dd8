"""Binaries that train image classifiers with differential privacy, and what they are made of."""

import os

# Hides TensorFlow's log, of which the line on a missing GPU reads like a failure. `quiet_start`
# hides what comes before this is read.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
