"""The error for anything unfit for private training, and the context manager that raises it."""

import contextlib


class UnfitForPrivacy(ValueError):
    """Raised for a model, loss or option that would break the privacy guarantee."""


@contextlib.contextmanager
def refusing(error=UnfitForPrivacy):
    """Yields a list for texts of problems; afterwards raises one `error` with all of them, if any.

    An exception after the first problem is a consequence of it, and does not hide it.

    Args:
        error: Class of exception. Its text is the problem, or a numbered list of several.
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
