"""Studies and experiments run at night; CI runs `programs_test.py`, which only starts them."""

import pathlib

import pytest

FOLDER = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks all tests of this folder, before any is selected by its mark."""
    for item in items:
        if FOLDER in item.path.parents and item.path.name != "programs_test.py":
            item.add_marker(pytest.mark.nightly)
