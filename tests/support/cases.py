"""Marks for the cases of a parametrized test."""

import pytest


def slow(*values):
    """Returns a slow case."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values):
    """Returns a case that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def slow_but(cases, *quick):
    """Marks all `cases` as slow except the `quick` ones.

    Raises:
        ValueError: If a quick one is not among the cases.
    """
    cases = list(cases)
    for each in quick:
        if each not in cases:
            raise ValueError(f"Not a case: {each!r}.")
    return [
        each if each in quick else slow(*(each if isinstance(each, tuple) else [each]))
        for each in cases
    ]
