"""The one exception that the binaries show to their user as a line of text."""

import contextlib
import difflib
import sys

from absl import flags, logging


class UserError(Exception):
    """Something that the user of a binary can fix: a flag, a path, data that is not there.

    The binaries print it as one line and exit with a status other than zero; any other exception is
    a defect and keeps its stack trace.
    """


@contextlib.contextmanager
def checking_flags():
    """Turns the ValueErrors of a block into UserErrors, where values come straight from flags."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def in_one_line(program, argv=()):
    """Within it an error of the user ends the program, with one line.

    Args:
        program: String, such as "tfdpx.train.classify".
        argv: List of strings: the name of the program, and arguments that are no flags.
    """
    # `absl.app` sets INFO, at which TensorFlow Datasets prints each file that it opens.
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    try:
        if len(argv) > 1:
            raise UserError(f"Only flags are understood. Received: {' '.join(argv[1:])}.")
        yield
    except UserError as error:
        sys.exit(printable(f"{program}: {' '.join(str(error).split())}"))


def did_you_mean(name, names):
    """The end of an error, such as: Did you mean 'table12/eps8'? Empty where no name is near.

    Args:
        name: String, what was received.
        names: Strings, all that there are.
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(path):
    """Returns a path as text that can be printed anywhere; the rest is written as escapes."""
    text = str(path)
    # Persian, Indic scripts and emoji join or part letters by these two.
    shown = text.replace("\u200c", "").replace("\u200d", "")
    return text if shown.isprintable() else ascii(text)[1:-1]
