"""The hook into Keras, and the private names of Keras and TensorFlow: nothing else uses them.

Importing this package says in one sentence if Keras runs on another backend.
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


if "keras" not in sys.modules:  # Importing keras with, say, no jax would hide the cause.
    _check_backend(os.environ.get("KERAS_BACKEND") or "tensorflow")

import keras

_check_backend(keras.backend.backend())
