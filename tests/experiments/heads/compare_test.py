"""The comparison of heads, small: its table and picture, its resume, and the timing."""

import json
import math

import feature_folder
import pytest

from experiments.features import compare_heads, head_speed


def test_methods_are_compared_and_the_comparison_resumes(tmp_path, capsys):
    folder = feature_folder.make(tmp_path / "features").path
    out = tmp_path / "out"
    given = ["--methods=dp_ls,dp_fc", f"--features={folder}", f"--workdir={out}"]
    compare_heads.main(["--epsilons=4", *given])
    capsys.readouterr()
    compare_heads.main(["--epsilons=4,inf", *given])
    assert capsys.readouterr().out.count("epsilon") == 2
    table = (out / "table.md").read_text().splitlines()
    assert table[0] == "| epsilon | dp_ls | dp_fc |" and len(table) == 4
    assert math.isinf(float(table[-1].split("|")[1]))
    assert (out / "heads.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="no method 'dp_x'"):
        compare_heads.main([*given, "--methods=dp_x"])


@pytest.mark.slow
def test_speed_is_a_ratio_of_medians(monkeypatch, capsys):
    measure = head_speed.measure
    monkeypatch.setattr(head_speed, "measure", lambda count: measure(count, repeats=1))
    compare_heads.main(["--speed", "--num_examples=256"])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    ratio = record["fit_seconds"] / record["numpy_products_seconds"]
    assert record["ratio_to_numpy_products"] == pytest.approx(ratio)
    assert record["features_mib"] < record["added_peak_mib"] < 2000
