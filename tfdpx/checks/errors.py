"""The error for anything unfit for private training, and the context manager that raises it."""

import contextlib


class UnfitForPrivacy(ValueError):
    """Raised for a model, loss or option that would break the privacy guarantee."""


@contextlib.contextmanager
def refusing(error=UnfitForPrivacy):
    """Yields an empty list for texts of problems. Raises one error at the end if there are any.

    If the block raises an exception after the first problem, that exception is a consequence of the
    problem. The exception becomes the cause of the error, and does not replace the error.

    Args:
        error: Class of the exception. Its message is the problem, or a numbered list if there are
            several.
    """
    problems, failure = [], None
    try:
        yield problems
    except Exception as exception:
        if not problems:
            raise
        failure = exception
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        raise error(problems[0]) from failure
    if problems:
        lines = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
        raise error("\n".join([f"There are {len(problems)} problems:", *lines])) from failure
