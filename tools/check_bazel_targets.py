"""Checks that BUILD loads and that every Python file of the repository belongs to a target.

Run from the root of the repository, with `bazel` and `git` installed. Exits with 1 and lists the
files without a target, if there are any.
"""

import pathlib
import subprocess
import sys


def run(*command):
    """Returns the lines that `command` prints. Its error messages go to the terminal."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")


def python_files():
    """Returns the Python files that git tracks, or would track after `git add`."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    return {line for line in listed if line and pathlib.Path(line).exists()}


def files_of_targets():
    """Returns the files in the `srcs` of any target of BUILD."""
    # Batch mode leaves no server behind.
    labels = run("bazel", "--batch", "query", "labels(srcs, //:all)")
    return {label.removeprefix("//:") for label in labels if label.startswith("//:")}


def main():
    """Prints the outcome and returns the exit status."""
    files = python_files()
    missing = sorted(files - files_of_targets())
    if missing:
        print("These Python files belong to no target of BUILD:", *missing, sep="\n  ")
        return 1
    print(f"BUILD loads, and each of {len(files)} Python files belongs to a target.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
