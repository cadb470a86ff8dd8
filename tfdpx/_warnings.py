"""Warnings that point to the user's line, at any depth of calls."""

import inspect
import warnings

# Packages with frames that are not the user's. `contextlib` is one because of context managers.
_NOT_THE_USERS = {"tfdpx", "keras", "tensorflow", "sklearn", "joblib"}
_NOT_THE_USERS |= {"contextlib", "threading", "concurrent", "weakref"}


def warn(message):
    """Warns with the line of the innermost frame outside of tfdpx and the packages that it calls.

    Args:
        message: String.
    """
    frame, level = inspect.currentframe().f_back, 2  # 2: the caller of this function.
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    # If no frame is left (in a thread of ours), use the caller's line.
    warnings.warn(message, stacklevel=2 if frame is None else level)
