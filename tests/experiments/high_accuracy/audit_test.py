"""The audit, small: its report, table and picture; half of the noise is caught."""

import json

import numpy as np
import pytest

from experiments.high_accuracy import audit
from experiments.high_accuracy.audits import phases
from tfdpx import mechanism

SMALL = {
    "epsilons": "2", "num_examples": 10, "batch_size": 0, "steps": 2, "models": 300,
    "sweep_models": 20, "chunk": 300, "targets": "blank,7_as_8", "learning_rates": "0.05",
    "l2_norm_clips": "1",
}  # fmt: skip


def run(workdir, capsys, **given):
    capsys.readouterr()
    flags = {**SMALL, "workdir": workdir, "data_dir": workdir / "data", **given}
    audit.main([f"--{name}={value}" for name, value in flags.items()])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_an_honest_training_passes_and_is_resumed(tmp_path, capsys):
    report = run(tmp_path, capsys)
    [row] = report["rows"]
    assert report["passed"] and report["audited_delta"] == 0.1
    assert 0.3 < row["gdp_epsilon_lower_bound"] <= 2.0 and row["epsilon_lower_bound"] <= 2.0
    assert row["models"] == 240 and row["gdp_is_exact"]
    assert 0.5 < row["auc"] < 0.95 and row["advantage"] <= row["advantage_upper_bound"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert run(tmp_path, capsys) == report
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    assert "| 2 | " in (tmp_path / "table.md").read_text()
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="holds an audit with steps=2"):
        run(tmp_path, capsys, steps=3)


@pytest.mark.slow
def test_half_of_the_noise_is_caught(tmp_path, monkeypatch, capsys):
    real = mechanism.privatize

    def quieter(sums, noise_multiplier, *arguments):
        return real(sums, noise_multiplier / 2, *arguments)

    monkeypatch.setattr(mechanism, "privatize", quieter)
    report = run(tmp_path, capsys)
    [row] = report["rows"]
    assert not report["passed"] and row["gdp_epsilon_lower_bound"] > row["epsilon"] == 2.0


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(models=1), "at least 2"),
        (dict(targets="square"), "one of blank"),
        (dict(num_examples=10_000), "num_examples"),
        (dict(epsilons="-1"), "epsilon"),
    ],
)
@pytest.mark.slow
def test_flags_out_of_range_are_one_line(tmp_path, capsys, given, message):
    with pytest.raises(SystemExit, match=message) as error:
        run(tmp_path, capsys, **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [100, 60_000])
def test_the_bounds_of_table_8(size):
    printed = {100: [0.47, 0.76, 0.96, 1.0], 60_000: [0.46, 0.76, 0.96, 1.0]}[size]
    found = [phases.advantage_upper_bound(epsilon, 1 / size) for epsilon in (1, 2, 4, 8)]
    assert [round(bound, 2) for bound in found] == printed


def test_the_advantage_bound_is_reached_and_never_passed():
    epsilon, delta = 1.2, 0.05
    # Tells with probability delta; else the answer is randomized.
    rate = (1 - delta) / (1 + np.exp(epsilon))
    assert phases.advantage_upper_bound(epsilon, delta) == pytest.approx(1 - 2 * rate)
    assert phases.advantage_upper_bound(5000.0, 0.5) == 1.0
    assert phases.advantage_upper_bound(0, 1e-5) == pytest.approx(1e-5)
