"""Programs that train classifiers of images and tables with differential privacy."""

import os

# Hides TensorFlow's log, because its message about a missing GPU looks like a failure. `startup`
# hides the messages that TensorFlow writes before it reads this variable.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
