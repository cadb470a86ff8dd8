"""Finished runs, shared with the journeys."""

import pytest


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory):
    """A function from the name of a kind to its finished run."""
    from finished_runs import FinishedRuns

    return FinishedRuns.of_session(tmp_path_factory)
