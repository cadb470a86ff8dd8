"""Warnings that show the user's own line, however deep they were found."""

import inspect
import warnings

# Whose frames are not the user's. `contextlib`: its managers stand between.
_NOT_THE_USERS = {"tfdpx", "keras", "tensorflow", "sklearn", "joblib"}
_NOT_THE_USERS |= {"contextlib", "threading", "concurrent"}


def warn(message):
    """Warns with the line of the innermost frame that is neither of tfdpx nor of what it calls.

    Args:
        message: String.
    """
    frame, level = inspect.currentframe().f_back, 2  # 2: the caller of this function.
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    # Where nobody is left (a thread of ours), the caller's line has to do.
    warnings.warn(message, stacklevel=2 if frame is None else level)
