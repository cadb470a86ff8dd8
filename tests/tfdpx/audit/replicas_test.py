"""The white-box audit under MirroredStrategy: noise that each replica adds is found."""

import pytest
from processes import run_alone


@pytest.mark.planted("noise of each replica, in an audit")
def test_noise_of_each_replica_is_found():
    run_alone("audit_replica_cases.honest_and_planted")
