"""Marks beside the cases of a parametrized test."""

import pytest


def slow(*values):
    """A slow case."""
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values):
    """A case that only `make nightly` runs."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def slow_but(cases, *quick):
    """`cases`, all of them slow but the `quick` ones.

    Raises:
        ValueError: If a quick one is no case.
    """
    cases = list(cases)
    for each in quick:
        if each not in cases:
            raise ValueError(f"Not a case: {each!r}.")
    return [
        each if each in quick else slow(*(each if isinstance(each, tuple) else [each]))
        for each in cases
    ]
