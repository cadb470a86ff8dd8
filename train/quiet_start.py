"""Imports TensorFlow without its messages about processors and drivers. Programs import it first.

TensorFlow writes these to the file descriptor of the standard error before it reads its log
settings. `TF_CPP_MIN_LOG_LEVEL=0` in the environment shows all of them.
"""

import logging
import os
import tempfile

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def _import_tensorflow():
    """Imports TensorFlow, and shows all of its messages if the import fails."""
    with tempfile.TemporaryFile() as notices:
        stderr = os.dup(2)
        os.dup2(notices.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            notices.seek(0)
            os.write(stderr, notices.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


if os.environ[_LEVEL] == "3":
    _import_tensorflow()
    # TensorFlow warns because programs trace a function for each of a few shapes.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
