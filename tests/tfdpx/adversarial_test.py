"""No example moves the clipped sum by more than C, in whole models with extreme weights."""

import adversarial
import processes
import pytest
from cases import slow

from tfdpx import mechanism

BOUND = adversarial.BOUND


@pytest.mark.parametrize(
    "name, policy, jit_compile",
    [
        ("dense", "float32", False),
        ("residual", "mixed_bfloat16", False),
        ("tokens", "float32", True),
        *(slow(name, "float32", False) for name in adversarial.MODELS if name != "dense"),
        slow("attention", "mixed_bfloat16", True),
        slow("tokens", "mixed_bfloat16", False),
    ],
)
def test_no_example_moves_the_sum_by_more_than_the_clip(name, policy, jit_compile):
    assert 0.5 < adversarial.largest_ratio(name, policy, jit_compile, trials=20) <= BOUND


@pytest.mark.planted("factors that clip too little")
def test_factors_that_clip_too_little_are_noticed(monkeypatch):
    """The planted bug takes the square root of the factor."""
    original = mechanism.clip_factors

    def wrong(squared_norms, *args, **kwargs):
        return original(squared_norms, *args, **kwargs) ** 0.5

    monkeypatch.setattr(mechanism, "clip_factors", wrong)
    assert adversarial.largest_ratio("dense", trials=5) > 2


@pytest.mark.slow
def test_whole_updates_on_two_replicas():
    processes.run_alone("adversarial.updates_on_replicas")
