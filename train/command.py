"""The command `tfdpx`: `tfdpx classify ...` is `python -m tfdpx.train.classify ...`."""

import ast
import importlib.util
import runpy
import shlex
import sys

import tfdpx
from tfdpx.train.errors import did_you_mean

PROGRAMS = ("classify", "predict", "account", "plan", "verify", "sweep")
_typed: dict[str, str] = {}
_HELP, _VERSION = ("-h", "--help", "help"), ("--version", "version")


def main() -> None:
    """Runs the program that the first argument names; the other arguments are its flags."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in _VERSION:
        print(f"tfdpx {tfdpx.__version__}")
    elif name in _HELP:
        width = max(map(len, PROGRAMS))
        lines = [f"  {program:<{width}}  {_summary(program)}" for program in PROGRAMS]
        print("\n".join(["Usage: tfdpx PROGRAM [--FLAG=VALUE ...]", "", *lines, ""]))
        print("tfdpx PROGRAM --help lists the flags of a program.")
    elif name in PROGRAMS:
        _typed[name] = shlex.join(sys.argv[:2])
        del sys.argv[1]
        # As with `python -m`, the module gets the name `__main__`, and `sys.argv[0]` is its file.
        runpy.run_module(f"tfdpx.train.{name}", run_name="__main__", alter_sys=True)
    else:
        sys.exit(
            f"tfdpx: there is no program {name!r}.{did_you_mean(name, PROGRAMS)} Programs are: "
            f"{', '.join(PROGRAMS)}."
        )


def typed(program):
    """Returns the start of the command as the user typed it, for example "tfdpx classify"."""
    python = shlex.quote(sys.orig_argv[0])
    return _typed.get(program, f"{python} -m tfdpx.train.{program}")


def _summary(name):
    """Returns the first line of a program's docstring, read from its source to avoid imports."""
    spec = importlib.util.find_spec(f"tfdpx.train.{name}")
    with open(spec.origin, encoding="utf-8") as file:
        return ast.get_docstring(ast.parse(file.read())).splitlines()[0]
