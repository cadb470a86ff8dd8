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
    for case in quick:
        if case not in cases:
            raise ValueError(f"Not a case: {case!r}.")
    return [
        case if case in quick else slow(*(case if isinstance(case, tuple) else [case]))
        for case in cases
    ]
