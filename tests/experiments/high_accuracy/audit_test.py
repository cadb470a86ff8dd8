"""The binary: a small audit, its report and pictures; half of the noise is caught."""

import contextlib
import io
import json

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.high_accuracy import audit
from tfdpx import mechanism


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["audit"])


def run(workdir, **given):
    values, output = flags.FlagValues(), io.StringIO()
    audit.define_flags(values)
    values.mark_as_parsed()
    small = dict(
        epsilons=["2"], num_examples=10, batch_size=0, steps=2, models=300, sweep_models=20,
        chunk=300, targets=["blank", "7_as_8"], learning_rates=["0.05"], l2_norm_clips=["1"],
    )  # fmt: skip
    for name, value in {**small, **given}.items():
        setattr(values, name, value)
    with flagsaver.flagsaver(workdir=str(workdir)), contextlib.redirect_stdout(output):
        audit.main(["audit"], values)
    return json.loads(output.getvalue().splitlines()[-1])


def test_an_honest_training_passes_and_is_resumed(tmp_path):
    report = run(tmp_path)
    [row] = report["rows"]
    assert report["passed"] and report["audited_delta"] == 0.1
    assert 0.3 < row["gdp_epsilon_lower_bound"] <= 2.0 and row["epsilon_lower_bound"] <= 2.0
    assert row["models"] == 240 and row["gdp_is_exact"]
    assert 0.5 < row["auc"] < 0.95 and row["advantage"] <= row["advantage_upper_bound"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert run(tmp_path) == report
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    assert "| 2 | " in (tmp_path / "table.md").read_text()
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="holds an audit with steps=2"):
        run(tmp_path, steps=3)


def test_half_of_the_noise_is_caught(tmp_path, monkeypatch):
    real = mechanism.privatize

    def quieter(sums, noise_multiplier, *arguments):
        return real(sums, noise_multiplier / 2, *arguments)

    monkeypatch.setattr(mechanism, "privatize", quieter)
    report = run(tmp_path)
    [row] = report["rows"]
    assert not report["passed"] and row["gdp_epsilon_lower_bound"] > row["epsilon"] == 2.0


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(models=1), "at least 2"),
        (dict(targets=["square"]), "one of blank"),
        (dict(num_examples=10_000), "num_examples"),
        (dict(epsilons=["-1"]), "epsilon"),
    ],
)
def test_flags_out_of_range_are_one_line(tmp_path, given, message):
    with pytest.raises(SystemExit, match=message) as error:
        run(tmp_path, **given)
    assert "\n" not in str(error.value)


def test_scores_of_models_without_the_target_do_not_know_it(tmp_path):
    run(tmp_path, models=20, sweep_models=2, targets=["blank"])
    pair = [np.load(path) for path in sorted(tmp_path.glob("final/*/*.npy"))]
    assert len(pair) == 2 and not np.allclose(*pair)
