"""Defines `UserError`, which the programs print as one line, and helpers for error texts."""

import contextlib
import difflib
import os
import pathlib
import re
import sys
import warnings

from absl import app, flags, logging

from tfdpx._arguments import ELSEWHERE
from tfdpx._files import DiskError

# Patterns of the code in `Suggestion.advice`, and the flags that do the same.
_FLAGS_OF_CODE = (
    (r"`tfdpx\.make_private_model\([^`]*`, ", ""),
    (r'`tfdpx\.layers\.trainable\(model, "(\w+)"\)`', r"--trainable=\1 with --init_from"),
    (r"`tfdpx\.synthetic\.warm_start\(model\)`", "--warm_start"),
    (r"`tfdpx\.models\.ScatterLinear\([^`]*`", "--model=scatter_linear"),
)


class UserError(Exception):
    """Raised for errors that the user can fix, for example a wrong flag or path, or missing data.

    The programs print it as one line and exit with a nonzero status. Any other exception is a bug
    and keeps its stack trace.
    """


@contextlib.contextmanager
def checking_flags():
    """Context manager that turns a ValueError, caused by the value of a flag, into a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def in_one_line(program, argv=()):
    """Context manager that prints a `UserError` as one line and then ends the program.

    Args:
        program: String, for example "tfdpx.train.classify".
        argv: List of strings from absl: the program's path, and the arguments that are not flags.
            Such arguments are an error.
    """
    # `absl.app` sets the level INFO, and then TensorFlow Datasets prints each file that it opens.
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {with_flags(str(message))}\n"
    try:
        if len(argv) > 1:
            raise UserError(
                f"Only flags are understood, as in --workdir=PATH; --help lists them. Received: "
                f"{' '.join(argv[1:])}."
            )
        yield
    except (UserError, DiskError) as error:
        sys.exit(printable(f"{program}: {' '.join(str(error).split())}"))


def start_program(main):
    """Runs `main` with `absl.app.run`. Ends quietly if the reader of the output stops early.

    Args:
        main: Function of a list of strings, the arguments that are not flags.
    """
    try:
        app.run(main, flags_parser=_parse_flags)
    except BrokenPipeError:  # For example, `tfdpx verify RUN | head -1`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at exit.
        sys.exit(1)


def _parse_flags(argv):
    """Parses the flags for `absl.app.run`. An invalid flag ends the program with one line."""
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        name, remedy = error.flagname, ELSEWHERE.get(error.flagname, "")
        text = re.sub(r"`(\w+)`", lambda m: f"--{m[1]}" if m[1] in flags.FLAGS else m[0], remedy)
        text = f"There is no flag --{name}. {text or did_you_mean(name, flags.FLAGS)}"
        text += " --help lists the usual flags, and --helpfull lists all."
    except flags.Error as error:
        text = str(error)
        if match := re.fullmatch(r".*flag --(\w+)(?:=(.*?): .*)?", text, re.DOTALL):
            name, value = match[1], match[2] or ""
            text = f"Flag --{name} must be {valid_values(name)}. Received: --{name}={value}."
            text += " Leave out commas and signs." * bool(re.search(r"\d[,%]", value))
    sys.exit(printable(f"tfdpx.train.{pathlib.Path(argv[0]).stem}: {' '.join(text.split())}"))


def with_flags(advice):
    """Returns the text of `Suggestion.advice` with the flags of `classify` instead of code."""
    for code, flag in _FLAGS_OF_CODE:
        advice = re.sub(code, flag, advice)
    return advice


def valid_values(name):
    """Returns a phrase for the values that a flag takes, for example "a positive integer"."""
    parser = flags.FLAGS[name].parser
    choices = getattr(parser, "enum_values", ())
    choices = choices or ("true", "false") * isinstance(parser, flags.BooleanParser)
    return parser.syntactic_help or (f"one of {', '.join(choices)}" if choices else "given a value")


def did_you_mean(name, names):
    """Returns the end of an error, such as " Did you mean 'digits'?"; "" if no name is similar.

    Args:
        name: String, the name that was received.
        names: Strings, all valid names.
    """
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(path):
    """Returns a path as text for the terminal, with escapes for unprintable characters."""
    text = str(path)
    # In Persian, Indic scripts and emoji these two characters join or separate letters.
    shown = text.replace("\u200c", "").replace("\u200d", "")
    return text if shown.isprintable() else ascii(text)[1:-1]
