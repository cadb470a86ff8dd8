"""Warnings that show the line of the user's code, however deep in tfdpx they are raised."""

import inspect
import warnings

# Packages with code that is not the user's. `contextlib` runs the context managers of tfdpx.
_NOT_THE_USERS = {"tfdpx", "keras", "tensorflow", "sklearn", "joblib"}
_NOT_THE_USERS |= {"contextlib", "threading", "concurrent", "weakref"}


def warn(message):
    """Warns at the innermost line of the user's code, rather than at a line of tfdpx or Keras.

    Args:
        message: String, the text of the warning.
    """
    frame, level = inspect.currentframe().f_back, 2  # 2: the caller of this function.
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    # A thread that tfdpx started has no line of the user's: show the caller of this function.
    warnings.warn(message, stacklevel=2 if frame is None else level)
