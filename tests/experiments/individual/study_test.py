"""The study of individual epsilons, on small data."""

import json

import numpy as np
import pytest

from experiments.individual import study


@pytest.mark.slow
def test_estimates_are_near_exact_epsilons(tmp_path, capsys):
    arguments = "--data=synthetic --seeds=1 --steps=40 --batch_size=500".split()
    study.main([*arguments, f"--workdir={tmp_path}"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    arrays = np.load(tmp_path / "private.npz")
    for refreshes in (0, 1, 2):
        exact, estimated = arrays[f"exact_{refreshes}"], arrays[f"estimated_{refreshes}"]
        close = record[f"refreshes_{refreshes}"]
        assert close["pearson"] == pytest.approx(np.corrcoef(exact, estimated)[0, 1])
        assert close["pearson"] > 0.5
        assert close["worst_error"] >= close["mean_error"] > 0
        assert estimated.max() <= close["plan_epsilon"] * (1 + 1e-6)  # Equal at the full clip.
    assert record["refreshes_2"]["pearson"] > record["refreshes_0"]["pearson"]
    assert len(record["groups"]) == 5
