"""The error of everything that is unfit for private training, and the one place that raises it."""

import contextlib


class UnfitForPrivacy(ValueError):
    """A model, loss or option with which the privacy guarantee would not hold."""


@contextlib.contextmanager
def refusing(error=UnfitForPrivacy):
    """Yields a list for texts of problems; afterwards raises one `error` with all of them, if any.

    What fails after a problem was found is a consequence of it, and does not hide it.

    Args:
        error: Class of exception. Its text is the problem, or a numbered list of several.
    """
    problems, failure = [], None
    try:
        yield problems
    except Exception as raised:
        if not problems:
            raise
        failure = raised
    problems = list(dict.fromkeys(problems))
    if len(problems) == 1:
        raise error(problems[0]) from failure
    if problems:
        numbered = [f"{number}. {problem}" for number, problem in enumerate(problems, 1)]
        raise error("\n".join([f"There are {len(problems)} problems:", *numbered])) from failure
