"""How many examples a model gets right, with noise: the score by which a paid search chooses."""

import numpy as np

from tfdpx.heads.releases import Releases


def noisy_count(right, noise_multiplier):
    """`right` with Gaussian noise, a float.

    Guarantee: one Gaussian release; adding or removing one example changes the count by at most 1.

    Args:
        right: Number of examples that the model classifies correctly; rounded to a whole one.
        noise_multiplier: Float, standard deviation of the noise.
    """
    released = Releases({"right": (noise_multiplier, 1)})
    return float(released.gaussian("right", np.array([round(right)], "float64"), 1.0)[0])
