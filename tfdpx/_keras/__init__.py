"""The hook into Keras, and the private names of Keras and TensorFlow, which only this folder uses.

Importing this package raises an error in one sentence if Keras runs on another backend.
"""

import os
import sys


def _check_backend(name):
    """Raises ImportError unless `name` is the TensorFlow backend of Keras."""
    if name != "tensorflow":
        raise ImportError(
            f"tfdpx needs the TensorFlow backend of Keras. Received: backend={name!r}. "
            "Set the environment variable KERAS_BACKEND=tensorflow before importing keras."
        )


# The import of keras may fail for another backend, for example without jax, and hide the cause.
if "keras" not in sys.modules:
    _check_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")

import keras

_check_backend(keras.backend.backend())
