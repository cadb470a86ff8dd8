"""Runs a few kills of the kill loop, and checks that it notices differences."""

import json
import pathlib
import subprocess
import sys

import kill_loop
import numpy as np
import pytest

TOOL = pathlib.Path(kill_loop.__file__)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_few_kills():
    process = subprocess.run(
        [sys.executable, str(TOOL), "--kills=3"], capture_output=True, text=True, check=True
    )
    report = json.loads(process.stdout.splitlines()[-1])
    for result in (report["seeded"], report["unseeded"]):
        assert result["kills"] >= 3
        assert result["differences"] == []


@pytest.mark.nightly
def test_any_bit_that_differs_is_seen(tmp_path):
    def write(name, weights, epsilon=1.0):
        np.savez(tmp_path / name, np.array(weights, "float32"), updates=3, epsilon=epsilon)
        return tmp_path / name

    first = write("a.npz", [0.0, 1.0])
    assert kill_loop.differences(first, write("b.npz", [0.0, 1.0])) == []
    assert kill_loop.differences(first, write("c.npz", [-0.0, 1.0])) == ["arr_0"]
    other = write("d.npz", [0.0, 1.0], 1.0 + 1e-15)
    assert kill_loop.differences(first, other) == ["epsilon"]
