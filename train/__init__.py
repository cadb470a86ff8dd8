"""Binaries that train image classifiers with differential privacy, and what they are made of."""

import os

# TensorFlow's notices of processors and drivers, unless somebody asked for them.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
