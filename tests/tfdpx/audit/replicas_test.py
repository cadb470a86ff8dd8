"""The white-box audit under MirroredStrategy detects noise that each replica adds."""

import pytest
from processes import run_alone


@pytest.mark.planted("noise of each replica, in an audit")
def test_noise_of_each_replica_is_found():
    run_alone("audit_replica_cases.honest_and_planted")
