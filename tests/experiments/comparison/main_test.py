"""The comparison with other libraries: its tables match its results, and the part of tfdpx runs."""

import json
import pathlib
import sys

import pytest

from experiments.comparison import __main__ as comparison
from experiments.comparison import cases, report

ROOT = pathlib.Path(__file__).resolve().parents[3]
RESULTS = ROOT / "experiments" / "comparison" / "results.json"


@pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs a checkout")
def test_the_pages_show_the_results():
    results = json.loads(RESULTS.read_text())
    assert report.tables(results) in (ROOT / "docs" / "comparison.md").read_text("utf-8")
    assert report.summary(results) in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_a_comparison_of_what_is_installed(monkeypatch, tmp_path, capsys):
    """A library that is not installed has its error in every cell."""
    here = pathlib.Path(sys.executable)
    monkeypatch.setattr(comparison, "_python", lambda library, environments: here)
    flags = "--quick --parts=digits,transformer_lora --libraries=tfdpx".split()
    monkeypatch.setattr(sys, "argv", ["comparison", *flags, f"--output={tmp_path}"])
    comparison.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    of_digits, of_lora = figures["digits"]["tfdpx"], figures["transformer_lora"]["tfdpx"]
    assert of_digits["updates"] == cases.DIGITS_UPDATES and of_digits["accuracy"] > 0.8
    assert of_digits["epsilon"] == pytest.approx(of_digits["epsilon_by_pld"], abs=1e-3)
    assert of_lora["step_ratio"] > 0 and of_lora["epoch"] > of_lora["step"]
    assert (tmp_path / "comparison.png").exists()
    results = json.loads((tmp_path / "results.json").read_text())
    results |= {"wrn_16_4": comparison.times("wrn_16_4", {"opacus": here}, {}, 1, 1)}
    assert "| mode | ModuleNotFoundError: No module named 'opacus' |" in report.tables(results)
