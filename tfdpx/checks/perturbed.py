"""Other weights for a while: what starts at zero would hide what it multiplies."""

import contextlib
import math

import numpy as np

from tfdpx.per_example.layout import restored


@contextlib.contextmanager
def perturbed(variables):
    """Moves every entry of `variables` for a while; afterwards they are what they were, bit by bit.

    Entries keep their sign, and zeros get random values of the size that an initializer gives.

    Args:
        variables: List of `keras.Variable`s.
    """
    generator = np.random.default_rng(0)
    with restored(variables):
        for variable in variables:
            value = variable.numpy()
            if not np.issubdtype(value.dtype, np.integer):
                variable.assign(_moved(value.astype("float64"), generator).astype(value.dtype))
        yield


def _moved(value, generator):
    fan_in = math.prod(value.shape[:-1]) if value.ndim > 1 else 10
    fresh = generator.normal(size=value.shape) / math.sqrt(max(fan_in, 1))
    scaled = value * generator.uniform(0.5, 1.5, value.shape)
    return np.where(value == 0, fresh, scaled)
