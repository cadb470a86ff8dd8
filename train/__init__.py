"""Programs that train classifiers of images and tables with differential privacy."""

import os

# Hides TensorFlow's log: its message about a missing GPU reads like a failure.
# `startup` hides the messages that are written before this setting is read.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
