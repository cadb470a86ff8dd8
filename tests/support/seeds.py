"""Seeds of Python and NumPy, from which Keras draws weights.

To set TensorFlow's too makes it forget its kernels, which takes a fifth of a private step's trace.
"""

import random

import numpy as np


def fix(seed):
    """Sets both seeds to an int."""
    random.seed(seed)
    np.random.seed(seed)
